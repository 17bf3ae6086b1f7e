"""What a GPU's memory is to hold besides the KV cache, measured by running the largest step there can be."""

from __future__ import annotations

from dataclasses import replace

from penstock.config.engine import EngineConfig, SchedulerConfig
from penstock.messages.kv_cache_spec import KVCacheConfig
from penstock.messages.memory_budget import MemoryBudget
from penstock.messages.scheduler_output import NO_GRAMMARS
from penstock.runner.kv_cache import allocate_kv_cache
from penstock.runner.loaded_model import LoadedModel
from penstock.runner.memory import memory_for
from penstock.runner.parts import DeviceParts
from penstock.worker.build_runner import make_runner
from penstock.worker.made_up_steps import KINDS, MadeUpSteps, largest_steps

# Of graphs that are captured once the cache is there.
_GRAPH_BYTES = 512 << 20


def memory_budget(config: EngineConfig, loaded: LoadedModel, cache: KVCacheConfig, parts: DeviceParts) -> MemoryBudget:
    """`cache` is the planned one, of any size. Raises ConfigError when the largest step does not fit without it."""
    limits = config.scheduler
    with memory_for("the largest step's tensors", loaded.device, lambda: step_advice(limits)):
        return parts.memory.budget(lambda: run_largest_steps(config, loaded, cache, parts), _GRAPH_BYTES)


def run_largest_steps(config: EngineConfig, loaded: LoadedModel, cache: KVCacheConfig, parts: DeviceParts) -> None:
    """On a runner of its own, rows and all, which is gone afterwards."""
    limits = config.scheduler
    tiny = allocate_kv_cache(replace(cache, num_blocks=1), parts.allocate)
    for tensor in tiny.tensors.values():
        # The memory may hold NaN, which not every kernel of torch handles.
        tensor.zero_()
    # The graphs are those of the runner that stays.
    eager = replace(config, execution=replace(config.execution, enforce_eager=True))
    runner = make_runner(parts, loaded, tiny, eager)
    steps = MadeUpSteps(limits, len(cache.groups), cache.block_size)
    for plan in largest_steps(steps, limits, KINDS):
        runner.execute_model(plan)
        runner.sample_tokens(NO_GRAMMARS).result()


def step_advice(limits: SchedulerConfig) -> str:
    """Which flags make a step smaller."""
    tokens, requests = limits.max_num_batched_tokens, limits.max_num_seqs
    return (
        f"lower max_num_batched_tokens from {tokens} to {max(1, tokens // 2)} or max_num_seqs from {requests} to "
        f"{max(1, requests // 2)}"
    )
