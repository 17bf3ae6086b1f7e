"""Builds an engine from its configuration, or several that share experts, with workers in this process or in others."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from penstock.config import env
from penstock.config.engine import EngineConfig, SchedulerConfig
from penstock.config.replicas import config_of_engine
from penstock.core.adapter_slots import AdapterSlots
from penstock.core.expert_balancer import ExpertBalancer
from penstock.core.kv_cache_manager import KVCacheManager
from penstock.core.kv_events import KVEventRecorder, StepKVEventRecorder
from penstock.core.scheduler import Scheduler
from penstock.core.structured_output import StructuredOutputs
from penstock.engine.cache_plan import bytes_per_block, bytes_per_state, plan_cache
from penstock.engine.engine_core import EngineCore
from penstock.engine.expert_memories import balanced_layers, expert_memories
from penstock.engine.joint_cores import JointCores
from penstock.engine.kv_events import make_event_publisher
from penstock.engine.rank_identity import check_arithmetic
from penstock.engine.transfer import EngineTransfer, make_transfer, token_fingerprint
from penstock.engine.warm_up import warm_up
from penstock.executor.executor import Executor
from penstock.executor.factory import make_executor
from penstock.grammar.backend import Grammar, GrammarBackend
from penstock.grammar.llguidance_backend import LLGuidanceBackend
from penstock.kv_transfer.connector import SchedulerConnector
from penstock.kv_transfer.factory import shares_kv
from penstock.messages.engine_info import EngineInfo
from penstock.messages.kv_cache_spec import KVCacheConfig
from penstock.messages.structured_outputs import GrammarSpec
from penstock.tokenizer.tokenizer import eos_token_ids, load_tokenizer
from penstock.utils import logging
from penstock.utils.clock import SystemClock
from penstock.utils.errors import ConfigError
from penstock.utils.math import cdiv
from penstock.worker.messages import InitializeWorker, WorkerFacts

logger = logging.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Engine:
    """A complete engine and its connector's scheduler side. `limits` are the scheduler's, as the memory permits."""

    core: EngineCore
    connector: SchedulerConnector
    config: EngineConfig
    limits: SchedulerConfig
    info: EngineInfo


@dataclass(frozen=True, slots=True)
class JointEngines:
    """Engines that make all steps together, in the order of their data parallel ranks."""

    cores: JointCores
    engines: tuple[Engine, ...]


def build_engine(config: EngineConfig) -> Engine:
    """Builds an engine by itself, as `build_engines` does."""
    (engine,) = build_engines(config).engines
    return engine


def build_engines(config: EngineConfig) -> JointEngines:
    """Starts the workers, loads, plans, allocates and warms up. Raises ConfigError if the configuration cannot work.

    There are several engines only if they share experts.
    """
    logging.configure(env.log_level())
    started = SystemClock().now()
    with ExitStack() as on_failure:
        engines = _build(config, on_failure, started)
        on_failure.pop_all()
    return engines


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is planned for one of the engines from the facts of its ranks."""

    config: EngineConfig
    facts: Sequence[WorkerFacts]
    limits: SchedulerConfig
    cache: KVCacheConfig
    transfer: EngineTransfer
    fingerprint: str


def _build(config: EngineConfig, on_failure: ExitStack, started: float) -> JointEngines:
    executor = make_executor(config)
    on_failure.callback(executor.shutdown)
    facts = executor.load()
    plans = _plan(config, facts, on_failure)
    memories = expert_memories(facts)
    handshakes = executor.initialize(*(_initialize(plan, memories) for plan in plans))
    for plan, of_engine in zip(plans, handshakes, strict=True):
        if plan.transfer.context is not None:
            plan.transfer.transfer.connector.set_xfer_handshake_metadata_pp_aware(of_engine)
    # Triton compiles kernels on first use, and other ones for other kinds of sampling.
    warm_up(executor, [(plan.limits, plan.cache) for plan in plans], facts[0][0].kernels == "triton")
    engines = [_make_engine(plan, executor, rank, started) for rank, plan in enumerate(plans)]
    return JointEngines(JointCores([engine.core for engine in engines], executor), tuple(engines))


def _plan(config: EngineConfig, facts: Sequence[Sequence[WorkerFacts]], on_failure: ExitStack) -> list[_Plan]:
    """Plans each engine. Raises ConfigError if the ranks differ, no input is rounded, or the memory is too small."""
    readers = [each for of_engine in facts for each in of_engine]
    check_arithmetic(readers)
    _check_rounding(config, readers)
    config = config.on_device(readers[0].device)
    plans: list[_Plan] = []
    for rank, of_engine in enumerate(facts):
        own = config if len(facts) == 1 else config_of_engine(config, rank)
        limits, cache = plan_cache(own, of_engine)
        transfer = make_transfer(own, cache, of_engine, readers)
        on_failure.callback(transfer.transfer.connector.shutdown)
        plans.append(_Plan(own, of_engine, limits, cache, transfer, token_fingerprint(own, cache, readers)))
    return plans


def _initialize(plan: _Plan, memories: dict[str, tuple[tuple[str, ...], ...]]) -> InitializeWorker:
    return InitializeWorker(
        cache=plan.cache,
        limits=plan.limits,
        connector=plan.transfer.context,
        connector_setup=plan.transfer.setup,
        expert_memories=memories,
    )


def _make_engine(plan: _Plan, executor: Executor, number: int, started: float) -> Engine:
    """`number`: the engine's among those of this executor."""
    config, facts, limits, cache, transfer = plan.config, plan.facts, plan.limits, plan.cache, plan.transfer
    if config.speculative is not None and config.speculative.synthetic_acceptance_rates:
        logger.warning("rejection_sample_method=synthetic accepts drafts at random: the outputs are not the model's")
    has_listeners = config.kv_events.is_active or config.is_prefix_aware
    recorder = StepKVEventRecorder(cache) if has_listeners else KVEventRecorder()
    kv = KVCacheManager(cache, config.cache.enable_prefix_caching, recorder)
    # Without a tokenizer there is no text to constrain.
    grammars = None if config.tokenizer_path is None else LazyGrammarBackend(config)
    # The first engine's scheduler balances the experts of all.
    experts = ExpertBalancer(balanced_layers(facts), config.parallel.experts) if number == 0 else ExpertBalancer()
    scheduler = Scheduler(
        limits, kv, StructuredOutputs(grammars), transfer.transfer, experts=experts, adapters=AdapterSlots(config.lora)
    )
    publisher = make_event_publisher(config.kv_events, config.dp_rank)
    core = EngineCore(
        scheduler,
        executor,
        limits.max_num_in_flight,
        publisher,
        debug=env.debug(),
        reports_kv_events=config.is_prefix_aware,
    )
    info = EngineInfo(
        dtype=config.model.dtype,
        device=facts[0].device,
        device_name=facts[0].device_name,
        kernels=facts[0].kernels,
        num_threads=facts[0].num_threads,
        max_model_len=limits.max_model_len,
        num_blocks=core.num_blocks,
        block_size=cache.block_size,
        kv_cache_bytes=cache.num_blocks * sum(bytes_per_block(cache, facts).values()),
        state_cache_bytes=cache.num_states * sum(bytes_per_state(cache, facts).values()),
        num_states=cache.num_states,
        checkpoint_interval=cache.checkpoint_interval,
        kv_cache_dtype=config.model.kv_dtype,
        load_seconds=SystemClock().now() - started,
        tensor_parallel_size=config.parallel.tp,
        pipeline_parallel_size=config.parallel.pp,
        data_parallel_size=config.parallel.dp,
        shares_kv=config.parallel.dp == 1 and shares_kv(config.kv_transfer),
        shares_experts=config.parallel.num_joint_engines > 1,
        pooling=None if config.pooling is None else config.pooling.summary,
        wrapper=config.model.wrapper,
        weights=_weight_formats(config, facts),
        num_weights=sum(each.num_weights for each in facts),
        weight_bytes=sum(each.weight_bytes for each in facts),
        fingerprint=plan.fingerprint,
        max_loras=0 if config.lora is None else config.lora.max_running,
        lora_bytes=sum(each.memory.adapters for each in facts) // config.cache.num_sharers,
        lora_targets={name: target for each in facts for name, target in each.lora_targets.items()},
    )
    return Engine(core, transfer.transfer.connector, config, limits, info)


def _check_rounding(config: EngineConfig, facts: Sequence[WorkerFacts]) -> None:
    """Raises ConfigError if inputs are to be rounded and no layer does so."""
    if config.load_quantization.activations and not any(each.roundings for each in facts):
        raise ConfigError(
            f"quantize_activations=int8 would change nothing: no layer of {config.model.path} has weights in integers. "
            "They are floats, dummies, or in GPTQ's act-order: use another checkpoint, or leave it out"
        )


def _weight_formats(config: EngineConfig, facts: Sequence[WorkerFacts]) -> str:
    """Returns the formats of the weights, and what makes layers round their inputs, in words."""
    rounded, stored = config.load_quantization, config.model.quantization
    name = stored.name if stored is not None else f"int{rounded.layers}" if rounded.layers else config.model.dtype
    found = {way for each in facts for way in each.roundings}
    causes = {"by row": "W8A8 checkpoint", "by group": "quantize_activations"}
    by = ", ".join(words for way, words in causes.items() if way in found)
    return f"{name} with int8 activations ({by})" if by else name


class LazyGrammarBackend:
    """Builds the backend on first use: reading a large vocabulary takes a second, unneeded without structured
    outputs.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self.num_words = cdiv(config.model.vocab_size, 32)

    def compile(self, spec: GrammarSpec) -> Grammar:
        return self._backend.compile(spec)

    @functools.cached_property
    def _backend(self) -> GrammarBackend:
        tokenizer = load_tokenizer(self._config)
        assert tokenizer is not None, "structured outputs without a tokenizer"
        eos = eos_token_ids(self._config, tokenizer)
        return LLGuidanceBackend(tokenizer.backend.to_str(), self._config.model.vocab_size, eos)
