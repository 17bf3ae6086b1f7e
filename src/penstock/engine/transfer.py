"""Builds an engine's connector, and the fingerprint of its KV."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict

from penstock.config.engine import EngineConfig
from penstock.core.remote_kv import NO_TRANSFER, KVTransfer
from penstock.kv_transfer.connector import WorkerConnector
from penstock.kv_transfer.factory import ConnectorContext, make_connector
from penstock.kv_transfer.null import NullWorkerConnector
from penstock.messages.kv_cache_spec import KVCacheConfig
from penstock.runner.load import arithmetic
from penstock.utils.errors import ConfigError

_FORMAT = 2
_THIS_SHARD = (0, 0)


def build_transfer(
    config: EngineConfig, cache: KVCacheConfig, weights_digest: bytes
) -> tuple[KVTransfer, WorkerConnector]:
    """Both parts of the connector that the configuration asks for, or those that move nothing. Raises ConfigError."""
    asked = config.kv_transfer
    if asked is None:
        return NO_TRANSFER, NullWorkerConnector()
    if not config.cache.enable_prefix_caching:
        raise ConfigError("kv_transfer_config needs the prefix cache: loaded blocks are found there. Leave it enabled")
    context = ConnectorContext(
        config=asked,
        cache=cache,
        fingerprint=fingerprint(config, cache, weights_digest),
        shards=frozenset({_THIS_SHARD}),
    )
    connector = make_connector(context)
    scheduler_part, worker = connector.make_scheduler_connector(), connector.make_worker_connector(_THIS_SHARD)
    scheduler_part.set_xfer_handshake_metadata_pp_aware({_THIS_SHARD: worker.get_handshake_metadata()})
    return KVTransfer(scheduler_part, asked.kv_load_failure_policy, asked.kv_load_timeout), worker


def fingerprint(config: EngineConfig, cache: KVCacheConfig, weights_digest: bytes) -> bytes:
    """[16 bytes] Equal where a block's bytes mean the same: weights, configuration, dtype, layout and arithmetic.

    `weights_digest` is of all weights that were loaded. The kernels' instruction set is part of the fingerprint,
    because sums in another order have other last bits.
    """
    layout = {
        "format": _FORMAT,
        "dtype": config.model.dtype,
        "load_format": config.load_format,
        "block_size": cache.block_size,
        "groups": [asdict(group) for group in cache.groups],
        "attached": [asdict(layer) for layer in cache.attached],
        "arithmetic": arithmetic(config),
        "device": config.device,
    }
    digest = hashlib.blake2b(json.dumps(layout, sort_keys=True).encode() + weights_digest, digest_size=16)
    folders = [config.model.path]
    if config.speculative is not None:
        folders += config.speculative.model_paths
    for folder in folders:
        digest.update((folder / "config.json").read_bytes())
    return digest.digest()
