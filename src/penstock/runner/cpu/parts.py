"""The makers of a CPU's parts (`DeviceParts`)."""

from __future__ import annotations

import torch

from penstock.attention.backend import AttentionBackend
from penstock.config.engine import ExecutionConfig, SchedulerConfig
from penstock.config.speculative import SpeculativeConfig
from penstock.kv_transfer.connector import WorkerConnector
from penstock.runner.batch_shapes import BatchShapes
from penstock.runner.block_tables import BlockTables
from penstock.runner.buffers import TableWriter
from penstock.runner.cpu.buffers import HostTableWriter, ReadyCopy
from penstock.runner.cpu.inputs import TorchInputBuilder
from penstock.runner.cpu.kv_cache_view import HostKVCacheView
from penstock.runner.cpu.logprobs import TorchScorer
from penstock.runner.cpu.ngram import NgramSpeculator
from penstock.runner.cpu.step_sampler import TorchStepSampler, make_verification
from penstock.runner.input_batch import InputBuilder
from penstock.runner.load import KVCache, LoadedModel
from penstock.runner.memory import HostMemory
from penstock.runner.passes import EagerPasses
from penstock.runner.request_states import RequestStates
from penstock.runner.sampling.states import SamplingStates
from penstock.runner.speculation.pick import Picker
from penstock.runner.step_sampler import StepSampler


class CpuParts:
    """`DeviceParts`."""

    def __init__(self) -> None:
        self.memory = HostMemory()

    def make_table_writer(self, depth: int) -> HostTableWriter:
        return HostTableWriter()

    def make_input_builder(
        self, config: SchedulerConfig, shapes: BatchShapes, states: RequestStates, blocks: BlockTables
    ) -> TorchInputBuilder:
        return TorchInputBuilder(config, shapes, states, blocks)

    def make_sampling(
        self,
        loaded: LoadedModel,
        config: SchedulerConfig,
        speculative: SpeculativeConfig | None,
        states: RequestStates,
        sampling: SamplingStates,
        writer: TableWriter,
    ) -> tuple[TorchStepSampler, Picker]:
        picker, verifier = make_verification(loaded, speculative, states.drafts, sampling, self.memory)
        return TorchStepSampler(states, sampling, verifier, knows_positions=config.max_num_drafts == 0), picker

    def make_scorer(self) -> TorchScorer:
        return TorchScorer()

    def make_ngram_speculator(self, shortest: int, longest: int) -> NgramSpeculator:
        return NgramSpeculator(shortest, longest)

    def graph_contexts(
        self, attention: AttentionBackend, execution: ExecutionConfig, connector: WorkerConnector
    ) -> tuple[int, ...]:
        return ()

    def make_passes(
        self, eager: EagerPasses, inputs: InputBuilder, sampler: StepSampler, shapes: BatchShapes
    ) -> EagerPasses:
        return eager

    def make_kv_cache_view(self, cache: KVCache) -> HostKVCacheView:
        return HostKVCacheView(cache)

    def copy_to_host(self, tensor: torch.Tensor) -> ReadyCopy:
        return ReadyCopy(tensor.clone().numpy())
