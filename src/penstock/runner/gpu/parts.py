"""The makers of a GPU's parts (`DeviceParts`), also for a CPU that stands in for one and for the meta device."""

from __future__ import annotations

import torch

from penstock.attention.backend import AttentionBackend
from penstock.config.engine import ExecutionConfig, SchedulerConfig
from penstock.config.speculative import SpeculativeConfig
from penstock.kv_transfer.connector import WorkerConnector
from penstock.runner.batch_shapes import BatchShapes
from penstock.runner.block_tables import BlockTables
from penstock.runner.buffers import TableWriter
from penstock.runner.gpu.buffers import FencedCopy, StagedTableWriter
from penstock.runner.gpu.cudagraphs import capture
from penstock.runner.gpu.inputs import GpuInputBuilder
from penstock.runner.gpu.kv_cache_view import GpuKVCacheView
from penstock.runner.gpu.memory import CudaMemory
from penstock.runner.gpu.ngram import GpuNgramSpeculator
from penstock.runner.gpu.sampling.logprobs import GpuScorer
from penstock.runner.gpu.sampling.sampler import GpuStepSampler, make_gpu_sampling
from penstock.runner.input_batch import InputBuilder
from penstock.runner.load import KVCache, LoadedModel
from penstock.runner.memory import HostMemory
from penstock.runner.passes import EagerPasses, Passes
from penstock.runner.request_states import RequestStates
from penstock.runner.sampling.states import SamplingStates
from penstock.runner.speculation.pick import Picker
from penstock.runner.step_sampler import StepSampler
from penstock.utils import logging

logger = logging.get_logger(__name__)


class GpuParts:
    """`DeviceParts`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        self.memory = CudaMemory(device) if self._is_cuda else HostMemory()

    def make_table_writer(self, depth: int) -> StagedTableWriter:
        return StagedTableWriter(self._device, depth)

    def make_input_builder(
        self, config: SchedulerConfig, shapes: BatchShapes, states: RequestStates, blocks: BlockTables
    ) -> GpuInputBuilder:
        return GpuInputBuilder(config, shapes, states, blocks)

    def make_sampling(
        self,
        loaded: LoadedModel,
        config: SchedulerConfig,
        speculative: SpeculativeConfig | None,
        states: RequestStates,
        sampling: SamplingStates,
        writer: TableWriter,
    ) -> tuple[GpuStepSampler, Picker]:
        return make_gpu_sampling(loaded, config, speculative, states, sampling, writer, self.memory)

    def make_scorer(self) -> GpuScorer:
        return GpuScorer()

    def make_ngram_speculator(self, shortest: int, longest: int) -> GpuNgramSpeculator:
        return GpuNgramSpeculator(shortest, longest)

    def graph_contexts(
        self, attention: AttentionBackend, execution: ExecutionConfig, connector: WorkerConnector
    ) -> tuple[int, ...]:
        if not self._is_cuda or execution.enforce_eager or not attention.graph_contexts:
            return ()
        if connector.layerwise:
            logger.info("no CUDA graphs: the KV connector moves layers while a step computes them")
            return ()
        return attention.graph_contexts

    def make_passes(
        self, eager: EagerPasses, inputs: InputBuilder, sampler: StepSampler, shapes: BatchShapes
    ) -> Passes:
        return capture(eager, inputs, sampler, shapes, self.memory) if shapes.captured else eager

    def make_kv_cache_view(self, cache: KVCache) -> GpuKVCacheView:
        return GpuKVCacheView(cache)

    def copy_to_host(self, tensor: torch.Tensor) -> FencedCopy:
        return FencedCopy.of(tensor)
