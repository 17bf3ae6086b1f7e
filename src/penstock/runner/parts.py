"""What a runner is made of, and what makes the parts that differ between devices.

A worker asks once which device it has and gets that device's `DeviceParts` (`penstock.worker.parts`). Everything else
in this folder is the same on every device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from penstock.attention.backend import AttentionBackend
from penstock.config.engine import ExecutionConfig, SchedulerConfig
from penstock.config.speculative import SpeculativeConfig
from penstock.kv_transfer.connector import WorkerConnector
from penstock.kv_transfer.kv_step import KVStep
from penstock.kv_transfer.view import KVCacheView
from penstock.runner.batch_shapes import BatchShapes
from penstock.runner.block_tables import BlockTables
from penstock.runner.buffers import HostCopy, TableWriter
from penstock.runner.input_batch import InputBuilder
from penstock.runner.load import KVCache, LoadedModel
from penstock.runner.memory import DeviceMemory
from penstock.runner.passes import EagerPasses, Passes
from penstock.runner.request_states import RequestStates
from penstock.runner.sampling.logprobs import Scorer
from penstock.runner.sampling.prompt_logprobs import PromptScorer
from penstock.runner.sampling.states import SamplingStates
from penstock.runner.speculation.pick import Picker
from penstock.runner.speculation.speculator import Speculator
from penstock.runner.step_sampler import StepSampler


class DeviceParts(Protocol):
    """Makes the parts of one device's runner. Lifecycle: one per worker; each method is called once per runner."""

    @property
    def memory(self) -> DeviceMemory: ...

    def make_table_writer(self, depth: int) -> TableWriter:
        """`depth` is how many steps the CPU may have launched whose results it does not know."""
        ...

    def make_input_builder(
        self, config: SchedulerConfig, shapes: BatchShapes, states: RequestStates, blocks: BlockTables
    ) -> InputBuilder: ...

    def make_sampling(
        self,
        loaded: LoadedModel,
        config: SchedulerConfig,
        speculative: SpeculativeConfig | None,
        states: RequestStates,
        sampling: SamplingStates,
        writer: TableWriter,
    ) -> tuple[StepSampler, Picker]:
        """What samples tokens and verifies drafts, and what picks these drafts: the two belong together.

        Raises ConfigError when the drafts' distributions do not fit into memory.
        """
        ...

    def make_scorer(self) -> Scorer: ...

    def make_ngram_speculator(self, shortest: int, longest: int) -> Speculator: ...

    def graph_contexts(
        self, attention: AttentionBackend, execution: ExecutionConfig, connector: WorkerConnector
    ) -> tuple[int, ...]:
        """The context lengths for which steps are captured as graphs; none where graphs are not used."""
        ...

    def make_passes(
        self, eager: EagerPasses, inputs: InputBuilder, sampler: StepSampler, shapes: BatchShapes
    ) -> Passes:
        """Captures the graphs that `shapes` lists. Raises ConfigError when they do not fit into memory."""
        ...

    def make_kv_cache_view(self, cache: KVCache) -> KVCacheView:
        """The cache as connectors see it."""
        ...

    def copy_to_host(self, tensor: torch.Tensor) -> HostCopy:
        """The tensor as it is when the device reaches this."""
        ...


@dataclass(frozen=True, slots=True)
class RunnerParts:
    """The finished parts of a `ModelRunner`."""

    states: RequestStates
    sampling: SamplingStates
    blocks: BlockTables
    writer: TableWriter  # of all tables of the three above
    inputs: InputBuilder
    prompt_scorer: PromptScorer
    sampler: StepSampler
    speculator: Speculator
    passes: Passes
    kv_step: KVStep
    copy_to_host: Callable[[torch.Tensor], HostCopy]
    poisoned: tuple[torch.Tensor, ...]  # the cache where new blocks are filled with NaN, to show reads before writes
