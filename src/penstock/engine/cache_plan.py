"""From what the ranks have loaded and measured to one KV cache for all of them: arithmetic, and no device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.config.engine import CacheConfig, EngineConfig, SchedulerConfig
from penstock.config.kv_cache_groups import attach_layers, block_bytes, group_layers
from penstock.core.kv_cache_planning import longest_request, plan_kv_cache
from penstock.messages.kv_cache_spec import KVCacheConfig
from penstock.messages.memory_budget import MemoryBudget
from penstock.utils import logging
from penstock.utils.errors import ConfigError
from penstock.worker.messages import WorkerFacts

logger = logging.get_logger(__name__)

_MIN_BLOCKS = 2  # the null block, and one


def plan_cache(config: EngineConfig, facts: Sequence[WorkerFacts]) -> tuple[SchedulerConfig, KVCacheConfig]:
    """The scheduler's limits and the cache that every rank can hold. Raises ConfigError that says what to change."""
    limits, block_size = config.scheduler, config.cache.block_size
    first = facts[0]
    groups = group_layers(first.kv_cache_specs)
    attached = attach_layers(first.draft_kv_cache_specs, groups, first.num_tokens_ahead)
    per_block = block_bytes(groups, block_size, attached)
    num_blocks = min(num_blocks_in_budget(config.cache, each.memory, per_block) for each in facts)
    for each in facts:
        if num_blocks * per_block > each.memory.room:
            logger.warning("%d KV blocks leave too little memory for the largest step: %s", num_blocks, each.memory)
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
        attached=attached,
    )
    return limits, planned


def num_blocks_in_budget(config: CacheConfig, budget: MemoryBudget, bytes_per_block: int) -> int:
    """How many blocks the configuration pays for: an explicit number, else explicit bytes, else what is left.

    Raises ConfigError that says what to raise, and how far.
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
    left = budget.left(utilization)
    if left < least:
        needed = budget.utilization_for(least)
        advice = (
            f"raise it to {needed} at least" if needed <= 1 else "free memory on the device, or take a smaller model"
        )
        raise ConfigError(
            f"gpu_memory_utilization={utilization} leaves no memory for the KV cache ({budget}): {advice}, or lower "
            "max_num_batched_tokens and max_num_seqs, or set kv_cache_memory"
        )
    return left // bytes_per_block
