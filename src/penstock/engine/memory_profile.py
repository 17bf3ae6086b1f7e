"""What a GPU's memory is to hold besides the KV cache, measured by running the largest step there can be."""

from __future__ import annotations

from dataclasses import replace

from penstock.config.engine import EngineConfig, SchedulerConfig
from penstock.engine.made_up_steps import MadeUpSteps, largest_steps
from penstock.engine.warm_up import KINDS
from penstock.messages.kv_cache_spec import KVCacheConfig
from penstock.messages.scheduler_output import NO_GRAMMARS
from penstock.runner.load import LoadedModel, allocate_kv_cache
from penstock.runner.memory import (
    CPU_DEFAULT_KV_BYTES,
    CudaMeter,
    MemoryBudget,
    MemoryMeter,
    available_bytes,
    measure,
    memory_for,
    total_bytes,
)
from penstock.runner.model_runner import ModelRunner

# Of graphs that are captured once the cache is there.
_GRAPH_BYTES = 512 << 20


def memory_budget(config: EngineConfig, loaded: LoadedModel, cache: KVCacheConfig) -> MemoryBudget:
    """`cache` is the planned one, of whatever size. On a CPU nothing is measured: its memory is everybody's."""
    if loaded.device.type != "cuda":
        total = total_bytes(loaded.device)
        return MemoryBudget(total, total - available_bytes(loaded.device), most=CPU_DEFAULT_KV_BYTES)
    return profile(config, loaded, cache, CudaMeter(loaded.device))


def profile(config: EngineConfig, loaded: LoadedModel, cache: KVCacheConfig, meter: MemoryMeter) -> MemoryBudget:
    """Raises ConfigError when the largest step does not fit even without a KV cache."""
    limits = config.scheduler
    with memory_for("the largest step's tensors", loaded.device, lambda: step_advice(limits)):
        return measure(meter, lambda: run_largest_steps(config, loaded, cache), _GRAPH_BYTES)


def run_largest_steps(config: EngineConfig, loaded: LoadedModel, cache: KVCacheConfig) -> None:
    """On a runner of its own, rows and all, which is gone afterwards."""
    limits = config.scheduler
    tiny = allocate_kv_cache(replace(cache, num_blocks=1), loaded.device)
    for tensor in tiny.tensors.values():
        # Whatever lay there may be no number, and not every kernel of torch's can be trusted with those.
        tensor.zero_()
    # The graphs are those of the runner that stays.
    execution = replace(config.execution, enforce_eager=True)
    runner = ModelRunner(loaded, tiny, limits, execution, config.speculative)
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
