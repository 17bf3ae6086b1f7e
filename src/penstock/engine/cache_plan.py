"""Plans one KV cache for all ranks from what they have loaded and measured, without access to a device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from penstock.config.cache import CacheConfig
from penstock.config.engine import EngineConfig, SchedulerConfig
from penstock.config.kv_cache_groups import attach_layers, group_layers
from penstock.core.kv_cache_planning import longest_request, plan_kv_cache, states_for_one_request
from penstock.messages.kv_cache_spec import KVCacheConfig, KVCacheSpec
from penstock.messages.kv_transfer import ShardId
from penstock.messages.memory_budget import MemoryBudget
from penstock.utils import logging
from penstock.utils.errors import ConfigError
from penstock.utils.math import cdiv, round_up
from penstock.worker.messages import WorkerFacts

logger = logging.get_logger(__name__)

_MIN_BLOCKS = 2  # the null block, and one
_LEAST_USED = 7 / 8
_LEAST_INTERVAL = 8
"""Blocks between two checkpoints of a prompt, by default at least."""


def plan_cache(config: EngineConfig, facts: Sequence[WorkerFacts]) -> tuple[SchedulerConfig, KVCacheConfig]:
    """Returns the scheduler's limits and the whole engine's cache; every rank has room for its part of it.

    The cache of a model that stores nothing has no groups and takes no memory. Raises ConfigError that says what to
    change.
    """
    limits, block_size = config.scheduler, config.cache.block_size
    groups = group_layers(_whole_specs({each.shard: each.kv_cache_specs for each in facts}))
    if not groups:
        return limits, KVCacheConfig(1, block_size, ())
    draft_specs = _whole_specs({each.shard: each.draft_kv_cache_specs for each in facts})
    attached = attach_layers(draft_specs, groups, max(each.num_tokens_ahead for each in facts))
    smallest = KVCacheConfig(1, block_size, groups, attached)
    per_rank = bytes_per_block(smallest, facts)
    if not any(per_rank.values()):
        raise ConfigError("all layers are recurrent; Penstock needs at least one layer with attention")
    # Recurrent layers add their share of the memory to that of every block, on each rank by its part of a state.
    states, share = bytes_per_state(smallest, facts), config.cache.state_share
    added = sum(per_rank.values()) * share / (1 - share) / max(1, sum(states.values()))
    costs = {shard: math.ceil(num_bytes + added * states[shard]) for shard, num_bytes in per_rank.items()}
    num_blocks = _num_blocks(config.cache, facts, costs)
    max_in_flight = limits.max_num_in_flight * limits.max_num_batched_tokens + limits.num_lookahead_tokens
    longest = longest_request(groups, block_size, num_blocks, max_in_flight)
    if longest < limits.max_model_len and not config.max_model_len_is_explicit and longest >= 2:
        logger.info("max_model_len is %d: the KV cache holds no longer request", longest)
        limits = replace(limits, max_model_len=longest)
    planned = plan_kv_cache(
        groups,
        block_size=block_size,
        num_blocks=num_blocks,
        max_model_len=limits.max_model_len,
        max_in_flight=max_in_flight,
        bytes_per_block=sum(per_rank.values()),
        attached=attached,
    )
    _report_unused(planned)
    if planned.has_states:
        planned = _with_states(planned, config, limits, facts)
    return limits, planned


def _report_unused(planned: KVCacheConfig) -> None:
    """Reports if blocks of a group leave more than an eighth of their memory to those of others."""
    used: dict[str, float] = {}
    for number, group in enumerate(planned.groups):
        if not group.spec.is_recurrent:
            window = f"a window of {group.spec.sliding_window}" if group.spec.sliding_window else "no window"
            used[window] = planned.block_bytes(number) / planned.bytes_per_block
    if min(used.values(), default=1.0) < _LEAST_USED:
        shares = ", ".join(f"{share:.0%} with {window}" for window, share in used.items())
        logger.info("layers use different parts of a KV block's memory: %s", shares)


def _with_states(
    planned: KVCacheConfig, config: EngineConfig, limits: SchedulerConfig, facts: Sequence[WorkerFacts]
) -> KVCacheConfig:
    """Adds the blocks for states. Raises ConfigError if they are too few for one request."""
    cache, size = config.cache, planned.block_size
    kv_bytes, state_bytes = sum(bytes_per_block(planned, facts).values()), sum(bytes_per_state(planned, facts).values())
    interval = cache.checkpoint_interval or max(_LEAST_INTERVAL * size, cdiv(state_bytes * size, kv_bytes))
    interval = round_up(interval, size)
    num_states = int(planned.num_blocks * kv_bytes * cache.state_share / (1 - cache.state_share)) // state_bytes
    max_in_flight = min(limits.max_model_len, limits.max_num_in_flight * limits.max_num_batched_tokens)
    num_uncertain = limits.max_num_drafts + limits.num_lookahead_tokens
    needed = states_for_one_request(limits.max_num_in_flight, max_in_flight, interval, num_uncertain // size)
    if cache.num_blocks_override is not None:
        num_states = max(num_states, needed)
    if num_states < needed:
        mib = state_bytes / 2**20
        raise ConfigError(
            f"state_cache_share={cache.state_share} leaves room for {num_states} states of recurrent layers, of "
            f"{mib:.1f} MiB each, and one request needs up to {needed}: raise state_cache_share, kv_cache_memory, "
            "gpu_memory_utilization or state_checkpoint_interval, or lower max_num_batched_tokens"
        )
    return replace(
        planned,
        num_states=num_states,
        checkpoint_interval=interval,
        num_uncertain_tokens=num_uncertain,
    )


def bytes_per_block(cache: KVCacheConfig, facts: Sequence[WorkerFacts]) -> dict[ShardId, int]:
    """Returns the bytes of one of the engine's blocks on each rank, without recurrent layers."""
    return {each.shard: _part(cache, each).bytes_per_block for each in facts}


def bytes_per_state(cache: KVCacheConfig, facts: Sequence[WorkerFacts]) -> dict[ShardId, int]:
    """Returns the bytes of the states of the recurrent layers on each rank."""
    return {each.shard: _part(cache, each).bytes_per_state for each in facts}


def _part(cache: KVCacheConfig, facts: WorkerFacts) -> KVCacheConfig:
    return cache.part({**facts.kv_cache_specs, **facts.draft_kv_cache_specs})


def _whole_specs(by_rank: Mapping[ShardId, Mapping[str, KVCacheSpec]]) -> dict[str, KVCacheSpec]:
    """Returns all layers, in the order of the stages, with all heads of the model."""
    whole: dict[str, KVCacheSpec] = {}
    ends: dict[str, int] = {}
    for shard in sorted(by_rank):
        for name, spec in by_rank[shard].items():
            assert whole.setdefault(name, spec.whole()) == spec.whole(), f"{name} of rank {shard}: {spec}"
            first, end = spec.heads
            assert first <= ends.get(name, 0), f"{name}: no rank has the KV heads [{ends.get(name, 0)}, {first})"
            ends[name] = max(end, ends.get(name, 0))
    for name, spec in whole.items():
        assert ends[name] == spec.heads[1], f"{name}: no rank has the KV heads [{ends[name]}, {spec.heads[1]})"
    return whole


def _num_blocks(config: CacheConfig, facts: Sequence[WorkerFacts], per_rank: Mapping[ShardId, int]) -> int:
    """Returns the number of blocks that fit into the memory with the least room, counting all ranks that share it."""
    pools: dict[str, list[WorkerFacts]] = {}
    for each in facts:
        pools.setdefault(each.memory.pool or f"rank {each.shard}", []).append(each)
    budgets = [
        (MemoryBudget.of_pool([each.memory for each in users]), sum(per_rank[each.shard] for each in users))
        for users in pools.values()
        if any(per_rank[each.shard] for each in users)
    ]
    num_blocks = min(num_blocks_in_budget(config, budget, num_bytes) for budget, num_bytes in budgets)
    for budget, num_bytes in budgets:
        if num_blocks * num_bytes > budget.room:
            logger.warning("%d KV blocks leave too little memory for the largest step: %s", num_blocks, budget)
    return num_blocks


def num_blocks_in_budget(config: CacheConfig, budget: MemoryBudget, bytes_per_block: int) -> int:
    """Returns the configured number of blocks: an explicit number, else explicit bytes, else the remaining memory.
    Raises ConfigError that says which setting to raise, and to what value.
    """
    if config.num_blocks_override is not None:
        return config.num_blocks_override
    least = _MIN_BLOCKS * bytes_per_block
    if config.kv_cache_memory is not None:
        if config.kv_cache_memory < least:
            raise ConfigError(
                f"kv_cache_memory={config.kv_cache_memory} is less than two KV blocks of {bytes_per_block} bytes: "
                f"raise it to {least} at least"
            )
        return config.kv_cache_memory // bytes_per_block
    utilization = config.gpu_memory_utilization
    left = budget.left(utilization) // config.num_sharers
    if left < least:
        needed = budget.utilization_for(config.num_sharers * least)
        advice = (
            f"raise it to {needed} at least" if needed <= 1 else "free memory on the device, or take a smaller model"
        )
        adapters = "max_cpu_loras, max_loras or max_lora_rank, or " if budget.adapters else ""
        raise ConfigError(
            f"gpu_memory_utilization={utilization} leaves no memory for the KV cache ({budget}): {advice}, or lower "
            f"{adapters}max_num_batched_tokens and max_num_seqs, or set kv_cache_memory"
        )
    return left // bytes_per_block
