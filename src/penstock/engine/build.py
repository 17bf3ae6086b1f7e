"""Builds the engine core out of its arguments, each part whole before the next one needs it."""

from __future__ import annotations

from dataclasses import replace

import torch

from penstock.config import env
from penstock.config.engine import EngineArgs, EngineConfig, SchedulerConfig, resolve
from penstock.core.kv_cache_manager import KVCacheManager
from penstock.core.kv_cache_planning import attach_layers, block_bytes, group_layers, longest_request, plan_kv_cache
from penstock.core.kv_events import NullKVEventRecorder, StepKVEventRecorder
from penstock.core.scheduler import Scheduler
from penstock.core.structured_output import StructuredOutputs
from penstock.engine.engine_core import EngineCore
from penstock.engine.grammars import make_grammar_backend
from penstock.engine.model_path import localise
from penstock.engine.transfer import build_transfer
from penstock.engine.warm_up import warm_up
from penstock.executor.uniproc import make_executor
from penstock.kv_transfer.events import make_event_publisher
from penstock.messages.kv_cache_spec import KVCacheConfig
from penstock.runner.load import KVCache, LoadedModel, allocate_kv_cache, load_model, num_blocks_in_budget
from penstock.runner.model_runner import ModelRunner
from penstock.utils import logging
from penstock.utils.errors import ConfigError

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
    loaded = load_model(config)
    limits, planned = _plan(config, loaded)
    cache = _allocate(planned, loaded)
    transfer, worker = build_transfer(config, planned)
    try:
        runner = ModelRunner(
            loaded, cache, limits, config.speculative, worker, config.attention_backend, debug=env.debug()
        )
    except (RuntimeError, MemoryError) as error:
        raise ConfigError(
            f"max_num_seqs={limits.max_num_seqs} requests of max_model_len={limits.max_model_len} need more memory for "
            f"their token ids and drafts than {loaded.device} has: lower one of them ({str(error).splitlines()[0]})"
        ) from None
    if config.speculative is not None and config.speculative.synthetic_acceptance_rates:
        logger.warning("rejection_sample_method=synthetic takes drafts by chance: the outputs are not the model's")
    executor = make_executor(runner, limits.max_num_in_flight)
    warm_up(executor, planned, limits)
    recorder = StepKVEventRecorder(planned) if config.kv_events.is_active else NullKVEventRecorder()
    kv = KVCacheManager(planned, config.cache.enable_prefix_caching, recorder)
    scheduler = Scheduler(limits, kv, StructuredOutputs(make_grammar_backend(config)), transfer)
    publisher = make_event_publisher(config.kv_events)
    return EngineCore(scheduler, executor, limits.max_num_in_flight, publisher, debug=env.debug()), limits


def _plan(config: EngineConfig, loaded: LoadedModel) -> tuple[SchedulerConfig, KVCacheConfig]:
    limits, block_size = config.scheduler, config.cache.block_size
    groups = group_layers(loaded.model.kv_cache_specs)
    attached = attach_layers(loaded.draft_kv_cache_specs, groups)
    num_blocks = num_blocks_in_budget(config.cache, loaded.device, block_bytes(groups, block_size, attached))
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


def _allocate(planned: KVCacheConfig, loaded: LoadedModel) -> KVCache:
    try:
        return allocate_kv_cache(planned, loaded.device)
    except (RuntimeError, OSError, torch.OutOfMemoryError) as error:
        raise ConfigError(
            f"the KV cache of {planned.num_blocks} blocks cannot be allocated on {loaded.device}: lower "
            f"gpu_memory_utilization, kv_cache_memory or num_gpu_blocks_override ({error})"
        ) from None
