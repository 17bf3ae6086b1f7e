"""Builds the engine core out of its arguments, each part whole before the next one needs it."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from penstock.config import env
from penstock.config.engine import CacheConfig, EngineArgs, EngineConfig, SchedulerConfig, resolve
from penstock.core.kv_cache_manager import KVCacheManager
from penstock.core.kv_cache_planning import attach_layers, block_bytes, group_layers, longest_request, plan_kv_cache
from penstock.core.kv_events import NullKVEventRecorder, StepKVEventRecorder
from penstock.core.scheduler import Scheduler
from penstock.core.structured_output import StructuredOutputs
from penstock.engine.compile_ahead import compiling_ahead
from penstock.engine.engine_core import EngineCore
from penstock.engine.grammars import make_grammar_backend
from penstock.engine.memory_profile import memory_budget, step_advice
from penstock.engine.model_path import localise
from penstock.engine.transfer import build_transfer
from penstock.engine.warm_up import warm_up
from penstock.executor.uniproc import make_executor
from penstock.kv_transfer.events import make_event_publisher
from penstock.messages.kv_cache_spec import KVCacheConfig
from penstock.runner.load import KVCache, LoadedModel, allocate_kv_cache, load_model
from penstock.runner.memory import DeviceMemory, memory_for, num_blocks_in_budget
from penstock.utils import logging
from penstock.utils.errors import ConfigError
from penstock.worker.build_runner import make_runner
from penstock.worker.parts import make_parts

logger = logging.get_logger(__name__)


def make_config(args: EngineArgs) -> EngineConfig:
    """Finds the model's files and the device, and resolves the arguments. Raises ConfigError."""
    logging.configure(env.log_level())
    device = args.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda, but torch sees no CUDA device: use device=cpu or auto")
    return resolve(localise(args), device)


def build_engine_core(config: EngineConfig) -> tuple[EngineCore, SchedulerConfig]:
    """Loads the model, plans and allocates the cache. The scheduler's limits come back as the memory allows them."""
    with compiling_ahead(config) as wait_for_kernels:
        parts = make_parts(torch.device(config.device))
        loaded = load_model(config, parts.memory)
        wait_for_kernels()
    limits, planned, room = _plan(config, loaded, parts.memory)
    cache = _allocate(planned, loaded, config.cache, room, parts.memory)
    transfer, worker = build_transfer(config, planned)
    rows = f"token ids and drafts of max_num_seqs={limits.max_num_seqs} requests of {limits.max_model_len} tokens"
    with memory_for(rows, loaded.device, lambda: "lower max_num_seqs or max_model_len"):
        runner = make_runner(loaded, cache, limits, config.execution, config.speculative, worker, debug=env.debug())
    if config.speculative is not None and config.speculative.synthetic_acceptance_rates:
        logger.warning("rejection_sample_method=synthetic takes drafts by chance: the outputs are not the model's")
    executor = make_executor(runner, limits.max_num_in_flight)
    with memory_for(
        "the first steps", loaded.device, lambda: f"lower gpu_memory_utilization, or {step_advice(limits)}"
    ):
        warm_up(executor, planned, limits)
    recorder = StepKVEventRecorder(planned) if config.kv_events.is_active else NullKVEventRecorder()
    kv = KVCacheManager(planned, config.cache.enable_prefix_caching, recorder)
    scheduler = Scheduler(limits, kv, StructuredOutputs(make_grammar_backend(config)), transfer)
    publisher = make_event_publisher(config.kv_events)
    return EngineCore(scheduler, executor, limits.max_num_in_flight, publisher, debug=env.debug()), limits


def _plan(
    config: EngineConfig, loaded: LoadedModel, memory: DeviceMemory
) -> tuple[SchedulerConfig, KVCacheConfig, int]:
    """With the bytes that the cache may have beside all else."""
    limits, block_size = config.scheduler, config.cache.block_size
    groups = group_layers(loaded.model.kv_cache_specs)
    attached = attach_layers(loaded.draft_kv_cache_specs, groups)
    budget = memory_budget(config, loaded, KVCacheConfig(1, block_size, groups, attached), memory)
    per_block = block_bytes(groups, block_size, attached)
    num_blocks = num_blocks_in_budget(config.cache, budget, per_block)
    room = budget.total - budget.taken
    if num_blocks * per_block > room:
        logger.warning("%d KV blocks leave too little memory for the largest step: %s", num_blocks, budget)
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
    return limits, planned, room


def _allocate(
    planned: KVCacheConfig, loaded: LoadedModel, config: CacheConfig, room: int, memory: DeviceMemory
) -> KVCache:
    device = loaded.device
    needed = planned.num_blocks * block_bytes(planned.groups, planned.block_size, planned.attached)
    # What is free may lie in pieces: less than was asked for in any case.
    fits = max(0, min(memory.available(), room, needed * 99 // 100))

    def advice() -> str:
        if config.num_blocks_override is not None:
            return f"lower num_gpu_blocks_override to {planned.num_blocks * fits // needed}"
        if config.kv_cache_memory is not None:
            return f"lower kv_cache_memory to {fits}"
        lower = math.floor(100 * (config.gpu_memory_utilization - (needed - fits) / memory.total())) / 100
        return f"lower gpu_memory_utilization from {config.gpu_memory_utilization} to {lower}"

    with memory_for(f"{planned.num_blocks} KV blocks", device, advice):
        return allocate_kv_cache(planned, device)
