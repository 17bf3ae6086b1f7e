"""Builds the scheduler side of an engine's connector, and the fingerprint of the engine's KV."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from penstock.config.engine import EngineConfig
from penstock.config.load_quantization import AS_STORED
from penstock.core.remote_kv import NO_TRANSFER, KVTransfer
from penstock.engine.rank_identity import digest_weights
from penstock.kv_transfer.factory import ConnectorContext, make_scheduler_connector
from penstock.messages.kv_cache_spec import KVCacheConfig
from penstock.messages.kv_transfer import ConnectorSetup
from penstock.utils.errors import ConfigError
from penstock.worker.messages import WorkerFacts

_FORMAT = 3


@dataclass(frozen=True, slots=True)
class EngineTransfer:
    """The scheduler side, and the data to build the worker sides; `context` is None if KV stays in the engine."""

    transfer: KVTransfer
    context: ConnectorContext | None = None
    setup: ConnectorSetup | None = None


def make_transfer(
    config: EngineConfig, cache: KVCacheConfig, facts: Sequence[WorkerFacts], readers: Sequence[WorkerFacts]
) -> EngineTransfer:
    """Builds the configured connector, or the null connector. `readers` are all ranks that together have read the
    model: the engine's own, and those of other engines that share its experts. Raises ConfigError.
    """
    asked = config.kv_transfer
    if asked is None:
        return EngineTransfer(NO_TRANSFER)
    if not config.cache.enable_prefix_caching:
        raise ConfigError("kv_transfer_config needs the prefix cache: loaded blocks are found there. Leave it enabled")
    context = ConnectorContext(
        config=asked,
        cache=cache,
        fingerprint=fingerprint(config, cache, readers),
        meaning=meaning(config, cache, readers),
        shards=frozenset(each.shard for each in facts),
        rank_heads={each.shard: _heads_of(each) for each in facts},
    )
    connector = make_scheduler_connector(context)
    transfer = KVTransfer(connector, asked.kv_load_failure_policy, asked.kv_load_timeout)
    return EngineTransfer(transfer, context, connector.worker_setup())


def _heads_of(facts: WorkerFacts) -> dict[str, tuple[int, int]]:
    specs = {**facts.kv_cache_specs, **facts.draft_kv_cache_specs}
    return {name: spec.heads for name, spec in specs.items()}


def fingerprint(config: EngineConfig, cache: KVCacheConfig, facts: Sequence[WorkerFacts]) -> bytes:
    """Returns 16 bytes that are equal if a block's bytes have the same meaning: weights, shapes, dtype, layout and
    arithmetic. The arithmetic of the kernels is included, because sums in another order have other last bits.
    The division of the model among ranks is not: it changes no bit, or on a GPU no more than other batches do.
    """
    layout = {
        "format": _FORMAT,
        "dtype": config.model.dtype,
        "block_size": cache.block_size,
        "groups": [asdict(group) for group in cache.groups],
        "attached": [asdict(layer) for layer in cache.attached],
        "arithmetic": _arithmetic(config, facts[0]),
        "weights": _weights(config, facts),
    }
    described = json.dumps(layout, sort_keys=True).encode()
    return hashlib.blake2b(described + _model_configs(config), digest_size=16).digest()


def meaning(config: EngineConfig, cache: KVCacheConfig, facts: Sequence[WorkerFacts]) -> dict[str, str]:
    """Returns by name everything that must be equal for KV to have the same meaning, except its layout."""
    return {
        "model configuration": hashlib.blake2b(_model_configs(config), digest_size=8).hexdigest(),
        "weights": _weights(config, facts),
        "dtype": config.model.dtype,
        "KV cache dtype": config.model.kv_dtype,
        "speculator": ", ".join(layer.name for layer in cache.attached) or "none",
        "arithmetic": _arithmetic(config, facts[0]),
    }


def token_fingerprint(config: EngineConfig, cache: KVCacheConfig, facts: Sequence[WorkerFacts]) -> str:
    """Returns text that is equal for engines that generate the same tokens: `meaning` except the speculator, which
    changes no token. Empty if the weights have no digest, or if the engine's drafts determine tokens.
    """
    drafts = config.speculative
    is_relaxed = drafts is not None and bool(drafts.samples_drafts or drafts.synthetic_acceptance_rates)
    if is_relaxed or (config.load_format != "dummy" and not config.digests_weights):
        return ""
    parts = {name: value for name, value in meaning(config, cache, facts).items() if name != "speculator"}
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


def _weights(config: EngineConfig, facts: Sequence[WorkerFacts]) -> str:
    """The digest is that of the weights as they were read."""
    rounded, digest = config.load_quantization, digest_weights(facts).hex()
    if rounded == AS_STORED:
        return digest
    inputs = ", inputs in 8" if rounded.activations else ""
    return f"{digest} in {rounded.layers} bits, head in {rounded.head}{inputs}"


def _arithmetic(config: EngineConfig, facts: WorkerFacts) -> str:
    named = f"{facts.device} {facts.arithmetic}"
    # Torch divides float32 products among its threads in a way that changes the order of sums.
    is_divided = facts.kernels == "torch" and config.model.dtype == "float32"
    return f"{named} num_threads={facts.num_threads}" if is_divided else named


def _model_configs(config: EngineConfig) -> bytes:
    shapes = [config.model, *(config.speculative.shapes if config.speculative is not None else ())]
    files = b"".join((shape.path / "config.json").read_bytes() for shape in shapes)
    # The longest context decides which factors rotate the keys (`RopeConfig.for_length`).
    return files + b"".join(b"long factors" for shape in shapes if shape.rope.has_long_factors)
