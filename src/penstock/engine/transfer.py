"""Builds an engine's connector, and the fingerprint of its KV."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

from penstock.config.engine import EngineConfig
from penstock.core.remote_kv import NO_TRANSFER, KVTransfer
from penstock.kv_transfer.abilities import Abilities
from penstock.kv_transfer.connector import WorkerConnector
from penstock.kv_transfer.factory import ConnectorContext, make_scheduler_connector, make_worker_connector
from penstock.kv_transfer.null import NullWorkerConnector
from penstock.messages.kv_cache_spec import KVCacheConfig
from penstock.runner.load import arithmetic
from penstock.utils.errors import ConfigError

_FORMAT = 1
_THIS_SHARD = (0, 0)
_SAMPLE_BYTES = 1 << 20


def build_transfer(config: EngineConfig, cache: KVCacheConfig) -> tuple[KVTransfer, WorkerConnector]:
    """Both parts of the connector that the configuration asks for, or those that move nothing. Raises ConfigError."""
    asked = config.kv_transfer
    if asked is None:
        return NO_TRANSFER, NullWorkerConnector()
    if not config.cache.enable_prefix_caching:
        raise ConfigError("kv_transfer_config needs the prefix cache: loaded blocks are found there. Leave it enabled")
    context = ConnectorContext(
        config=asked,
        cache=cache,
        fingerprint=fingerprint(config, cache),
        shards=frozenset({_THIS_SHARD}),
    )
    part = make_scheduler_connector(context)
    abilities = Abilities(part)
    worker = make_worker_connector(context, _THIS_SHARD, abilities.worker_setup())
    abilities.set_xfer_handshake_metadata_pp_aware({_THIS_SHARD: worker.get_handshake_metadata()})
    return KVTransfer(part, asked.kv_load_failure_policy, asked.kv_load_timeout), worker


def fingerprint(config: EngineConfig, cache: KVCacheConfig) -> bytes:
    """[16 bytes] Equal where a block's bytes mean the same: weights, shapes, dtype, layout and arithmetic.

    Weights are told apart by their files' sizes and by their first and last megabyte. The kernels' instruction set is
    part of it, because sums in another order have other last bits.
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
    digest = hashlib.blake2b(json.dumps(layout, sort_keys=True).encode(), digest_size=16)
    folders = [config.model.path]
    if config.speculative is not None:
        folders += config.speculative.model_paths
    for folder in folders:
        for file in [folder / "config.json", *sorted(folder.glob("*.safetensors"))]:
            digest.update(_sample(file))
    return digest.digest()


def _sample(file: Path) -> bytes:
    if not file.exists():
        return b""
    with file.open("rb") as stream:
        size = stream.seek(0, 2)
        stream.seek(0)
        head = stream.read(_SAMPLE_BYTES)
        stream.seek(max(0, size - _SAMPLE_BYTES))
        return str(size).encode() + head + stream.read(_SAMPLE_BYTES)
