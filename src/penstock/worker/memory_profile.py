"""Measures a GPU's memory needs besides the KV cache by running the largest possible step."""

from __future__ import annotations

from dataclasses import replace

from msgspec import structs

from penstock.config.engine import EngineConfig, SchedulerConfig
from penstock.messages.kv_cache_spec import KVCacheConfig
from penstock.messages.memory_budget import MemoryBudget
from penstock.messages.scheduler_output import NO_GRAMMARS
from penstock.runner.kv_cache import allocate_kv_cache
from penstock.runner.loaded_model import LoadedModel
from penstock.runner.memory import memory_for
from penstock.runner.parts import DeviceParts
from penstock.worker.build_runner import make_runner
from penstock.worker.synthetic_steps import KINDS, SyntheticSteps, largest_steps

# For graphs, which are captured after the cache is allocated.
_GRAPH_BYTES = 512 << 20


def memory_budget(config: EngineConfig, loaded: LoadedModel, cache: KVCacheConfig, parts: DeviceParts) -> MemoryBudget:
    """`cache` is a plan of any size. Raises ConfigError if the largest step does not fit even without it."""
    limits = config.scheduler
    with memory_for("the largest step's tensors", loaded.device, lambda: step_advice(limits)):
        budget = parts.memory.budget(lambda: run_largest_steps(config, loaded, cache, parts), _GRAPH_BYTES)
    if config.lora is None or loaded.lora is None:
        return budget
    # The engines that share the memory have adapters each.
    adapters = loaded.lora.num_bytes(config.lora.max_rank) * config.cache.num_sharers
    return structs.replace(budget, adapters=adapters)


def run_largest_steps(config: EngineConfig, loaded: LoadedModel, cache: KVCacheConfig, parts: DeviceParts) -> None:
    """Runs the largest steps on a temporary runner with all rows."""
    limits = config.scheduler
    tiny = allocate_kv_cache(replace(cache, num_blocks=1), parts.allocate)
    for tensor in tiny.tensors.values():
        # The memory may contain NaN, which not every torch kernel handles.
        tensor.zero_()
    # The permanent runner captures the graphs.
    eager = replace(config, execution=replace(config.execution, enforce_eager=True))
    runner = make_runner(parts, loaded, tiny, eager)
    steps = SyntheticSteps(limits, len(cache.groups), cache.block_size)
    for plan in largest_steps(steps, limits, KINDS):
        runner.execute_model(plan)
        runner.sample_tokens(NO_GRAMMARS).result()


def step_advice(limits: SchedulerConfig) -> str:
    """Returns which flags reduce the size of a step."""
    tokens, requests = limits.max_num_batched_tokens, limits.max_num_seqs
    return (
        f"lower max_num_batched_tokens from {tokens} to {max(1, tokens // 2)} or max_num_seqs from {requests} to "
        f"{max(1, requests // 2)}"
    )
