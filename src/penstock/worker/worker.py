"""The lifecycle of one rank: load, measure, allocate, return facts and handshake, step, shut down.

    loaded = load_worker(message)          # the weights are on the device; `loaded.facts` is what the core plans from
    worker = loaded.initialize(plan)       # the KV cache, the connector's worker side and the runner; `worker.ready`
    worker.execute_model(plan)             # then the steps
    worker.sample_tokens(grammars)

A worker does not depend on other processes: an executor calls it in this process, or `worker_process` in a separate
one.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace

import torch

from penstock.config import env
from penstock.config.engine import EngineConfig
from penstock.config.kv_cache_groups import cache_of_one_rank
from penstock.config.parallel import ParallelConfig
from penstock.kernels import native
from penstock.kv_transfer.connector import WorkerConnector
from penstock.kv_transfer.factory import import_connector, make_worker_connector
from penstock.kv_transfer.null import NullWorkerConnector
from penstock.messages.kv_cache_spec import KVCacheConfig
from penstock.messages.kv_transfer import ShardId
from penstock.messages.scheduler_output import NO_GRAMMARS, GrammarOutput, SchedulerOutput
from penstock.parallel.groups import NO_LINKS, RankLinks
from penstock.parallel.shared_memory import shared_links
from penstock.runner.kv_cache import KVCache, allocate_kv_cache, allocate_shared_kv_cache
from penstock.runner.loaded_model import LoadedModel
from penstock.runner.memory import memory_for
from penstock.runner.model_runner import ModelRunner
from penstock.runner.outputs import PendingOutput
from penstock.runner.parts import DeviceParts
from penstock.runner.shared_experts import make_expert_step
from penstock.utils import logging
from penstock.utils.errors import ConfigError, EngineDeadError
from penstock.utils.shared_memory import attach_memory
from penstock.worker.build_runner import make_runner
from penstock.worker.compile_ahead import compiling_ahead
from penstock.worker.load import load_model
from penstock.worker.memory_profile import memory_budget, step_advice
from penstock.worker.messages import InitializeWorker, LoadWorker, Rendezvous, WorkerFacts, WorkerReady
from penstock.worker.parts import choose_device, make_parts


def load_worker(message: LoadWorker) -> LoadedWorker:
    """Connects to the other ranks, loads the weights and measures the device.

    Raises ConfigError if the configuration cannot work here.
    """
    logging.configure(env.log_level())
    config, shard = choose_device(message.config), message.shard
    if not config.model.path.is_dir():
        raise ConfigError(f"there is no folder {str(config.model.path)!r} on the host of rank {message.name}")
    if config.kv_transfer is not None:
        import_connector(config.kv_transfer)
    parts = make_parts(torch.device(config.device))
    with compiling_ahead(config, parts.compute_capability) as wait_for_kernels:
        parts.set_up(config.execution, config.parallel.num_ranks * config.cache.num_sharers)
        links = meet(message, config.parallel, parts)
        loaded = load_model(config, parts, shard, links)
        wait_for_kernels()
    return LoadedWorker(config, shard, loaded, parts)


def meet(message: LoadWorker, parallel: ParallelConfig, parts: DeviceParts) -> RankLinks:
    """Returns the rank's connections to the others. Raises EngineDeadError if their memory no longer exists, and
    ConfigError for memory that the device cannot use.
    """
    links = _connect(message.rendezvous, parallel, (parallel.pp, parallel.tp), message.shard, parts)
    if parallel.num_joint_engines == 1:
        return links
    place = message.dp_rank * parallel.tp + message.shard[1]
    stage = _connect(message.experts, parallel, (1, parallel.num_joint_engines * parallel.tp), (0, place), parts)

    def close() -> None:
        links.close()
        stage.close()

    return replace(links, shared_experts=stage.group, close=close)


def _connect(
    rendezvous: Rendezvous, parallel: ParallelConfig, size: tuple[int, int], place: ShardId, parts: DeviceParts
) -> RankLinks:
    """Returns the links of the rank at `place` among pp x tp ranks, `size`."""
    if size == (1, 1):
        return NO_LINKS
    if rendezvous.memory is not None and not parts.shares_main_memory:
        raise ConfigError(
            "torch sees a GPU and CUDA's driver (libcuda.so.1) lists none, so the ranks would exchange tensors through "
            "main memory, which ranks on GPUs cannot: set device=cpu, or repair the driver's installation"
        )
    if rendezvous.memory is not None:
        try:
            memory = attach_memory(rendezvous.memory, rendezvous.num_bytes)
        except OSError as error:
            raise EngineDeadError(f"the memory that the ranks share cannot be mapped: {error}") from error
        return shared_links(memory, *size, place)
    if parallel.experts is not None and parallel.experts.balancing is not None:
        raise ConfigError(
            "enable_eplb needs ranks on one host that share memory (distributed_executor_backend mp or uniproc on a "
            "CPU), because they copy experts from each other: leave it out"
        )
    # Imported here: ranks on one host need no torch.distributed.
    from penstock.parallel.distributed import distributed_links

    assert rendezvous.address is not None, f"{parallel} without a rendezvous"
    return distributed_links(rendezvous.address, *size, place, parts.collectives)


class LoadedWorker:
    """A rank with its weights and without a KV cache."""

    def __init__(self, config: EngineConfig, shard: ShardId, loaded: LoadedModel, parts: DeviceParts) -> None:
        self._config = config
        self._loaded = loaded
        self._parts = parts
        specs, draft_specs, ahead = loaded.model.kv_cache_specs, loaded.draft_kv_cache_specs, loaded.num_tokens_ahead
        smallest = cache_of_one_rank(specs, draft_specs, ahead, config.cache.block_size)
        self.facts = WorkerFacts(
            shard=shard,
            device=config.device,
            kv_cache_specs=dict(specs),
            draft_kv_cache_specs=draft_specs,
            num_tokens_ahead=ahead,
            memory=memory_budget(config, loaded, smallest, parts),
            lora_targets={} if loaded.lora is None else loaded.lora.targets,
            arithmetic=parts.arithmetic(config.execution),
            read=loaded.read,
            num_weights=loaded.size.num_weights,
            weight_bytes=loaded.size.num_bytes,
            roundings=tuple(sorted(loaded.size.roundings)),
            kernels=parts.kernels,
            device_name=parts.device_name,
            num_threads=native.num_threads(),
            expert_memories={
                name: tuple(memory.name for memory in each.memories)
                for name, each in loaded.experts.items()
                if each.memories
            },
        )

    def initialize(self, plan: InitializeWorker) -> Worker:
        """Raises ConfigError if the memory is too small, or if the connector refuses its configuration."""
        loaded, config, limits = self._loaded, self._config, plan.limits
        connector: WorkerConnector = NullWorkerConnector()
        if plan.connector is not None:
            connector = make_worker_connector(plan.connector, self.facts.shard, plan.connector_setup)
        own = plan.cache.part({**self.facts.kv_cache_specs, **self.facts.draft_kv_cache_specs})
        cache = self._allocate(own, is_shared=connector.needs_shared_memory)
        rows = f"token ids and drafts of max_num_seqs={limits.max_num_seqs} requests of {limits.max_model_len} tokens"
        with memory_for(rows, loaded.device, lambda: "lower max_num_seqs or max_model_len"):
            planned = replace(config, scheduler=limits)
            experts = make_expert_step(loaded, plan.expert_memories, self.facts.shard[0])
            runner = make_runner(self._parts, loaded, cache, planned, connector, env.debug(), experts)
        ready = WorkerReady(self.facts.shard, connector.get_handshake_metadata(), runner.runs_ahead)
        advice = f"lower gpu_memory_utilization, or {step_advice(limits)}"
        return Worker(runner, ready, loaded.device, advice, loaded.links)

    def _allocate(self, planned: KVCacheConfig, *, is_shared: bool) -> KVCache:
        config, budget, memory = self._config.cache, self.facts.memory, self._parts.memory
        needed = planned.num_bytes
        # Free memory may be fragmented: the advice is always less than was requested.
        fits = max(0, min(memory.available(), budget.room, needed * 99 // 100))

        def advice() -> str:
            if config.num_blocks_override is not None:
                return f"lower num_gpu_blocks_override to {planned.num_blocks * fits // needed}"
            if config.kv_cache_memory is not None:
                return f"lower kv_cache_memory to {config.kv_cache_memory * fits // needed}"
            lower = math.floor(100 * (config.gpu_memory_utilization - (needed - fits) / memory.total())) / 100
            return f"lower gpu_memory_utilization from {config.gpu_memory_utilization} to {lower}"

        with memory_for(f"{planned.num_blocks} KV blocks", self._loaded.device, advice):
            if is_shared:
                return allocate_shared_kv_cache(planned, self._parts.allocate_shared)
            return allocate_kv_cache(planned, self._parts.allocate)


class Worker:
    """A complete rank. One thread calls it, in the order of the steps."""

    def __init__(
        self, runner: ModelRunner, ready: WorkerReady, device: torch.device, memory_advice: str, links: RankLinks
    ) -> None:
        self.ready = ready
        self._links = links
        self._runner = runner
        self._device = device
        self._memory_advice = memory_advice
        self._is_warming_up = False

    def execute_model(self, plan: SchedulerOutput) -> None:
        """Launches the forward pass."""
        self._is_warming_up = plan.is_warm_up
        native.look_at_cores()
        with self._enough_memory():
            self._runner.execute_model(plan)

    def sample_tokens(self, grammars: GrammarOutput | None) -> PendingOutput:
        """Launches sampling for the previous step."""
        with self._enough_memory():
            return self._runner.sample_tokens(grammars or NO_GRAMMARS)

    def shutdown(self) -> None:
        """Frees the rank; no step may follow."""
        self._runner.shutdown()
        self._links.close()

    def _enough_memory(self) -> contextlib.AbstractContextManager[None]:
        """Converts running out of memory in the first steps, which use unmeasured memory, to a ConfigError."""
        if not self._is_warming_up:
            return contextlib.nullcontext()
        return memory_for("the first steps", self._device, lambda: self._memory_advice)
