"""Steps that are recorded once and replayed: where a step is short, launching its kernels takes longer than they do.

A graph belongs to a shape (`BatchDescriptor`). It is recorded over a step that is padding throughout, whose inputs lie
in the buffers of all steps; to replay it, the input builder has published the step's counts, and padding behind them.
Padding reads no state row, writes no KV, and its results are not used.

All graphs share one pool of memory: what one leaves is gone when another one, or the same one again, is replayed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from tqdm import tqdm

from penstock.messages.scheduler_output import GrammarOutput
from penstock.models.interface import ModelOutput
from penstock.runner.batch_shapes import BatchDescriptor, BatchShapes
from penstock.runner.gpu.inputs import GpuInputBuilder
from penstock.runner.gpu.sampling.sampler import CommonSampling, GpuStepSampler
from penstock.runner.input_batch import InputBatch, InputBuilder
from penstock.runner.memory import DeviceMemory, memory_for
from penstock.runner.outputs import PendingOutput
from penstock.runner.passes import EagerPasses, Passes
from penstock.runner.step_sampler import StepSampler
from penstock.utils import logging

logger = logging.get_logger(__name__)

_ADVICE = "lower gpu_memory_utilization or max_num_seqs, or set enforce_eager"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RecordedGraph(Generic[T]):
    replay: Callable[[], None]  # launches all of it on the current stream
    outputs: T  # what the recorded function returned: tensors that every replay writes anew


class GraphRecorder(Protocol):
    def record(self, run: Callable[[], T]) -> RecordedGraph[T]:
        """Calls `run`, possibly more than once, and keeps what it launches."""
        ...


class CudaGraphRecorder:
    """`torch.cuda.CUDAGraph`, without the collection of garbage that `torch.cuda.graph` adds to each."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], T]) -> RecordedGraph[T]:
        caller = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(caller)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            # Compiles kernels, and lets libraries allocate what they keep.
            run()
            self._stream.synchronize()
            # Other threads, a connector's for instance, may go on with what a capture forbids.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                outputs = run()
            except BaseException:
                # Ending a capture that has failed fails too, and says less.
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        caller.wait_stream(self._stream)
        return RecordedGraph(graph.replay, outputs)


class GraphedPasses:
    """Replays the steps whose shapes were captured; all others are launched (`Passes`).

    A step is up to three graphs: its inputs and the forward pass; and if it is uniform, logits and sampling, where
    requests ask for nothing that is rare, and the drafts.
    """

    def __init__(self, eager: EagerPasses, sampler: GpuStepSampler) -> None:
        self._eager = eager
        self._sampler = sampler
        self._forward: dict[BatchDescriptor, RecordedGraph[ModelOutput]] = {}
        self._sample: dict[tuple[BatchDescriptor, CommonSampling], RecordedGraph[None]] = {}
        self._propose: dict[BatchDescriptor, RecordedGraph[None]] = {}

    def capture_forward(self, batch: InputBatch, recorder: GraphRecorder) -> ModelOutput:
        """`batch` is padding throughout. Returns what `capture_behind` needs."""
        graph = self._forward[batch.shape] = recorder.record(lambda: self._eager.forward(batch))
        return graph.outputs

    def capture_behind(self, batch: InputBatch, output: ModelOutput, recorder: GraphRecorder) -> None:
        """What follows a uniform step's forward pass. One that verifies some drafts is taken to propose as many."""
        eager, shape = self._eager, batch.shape
        for kind in CommonSampling:
            self._sample[shape, kind] = recorder.record(
                lambda kind=kind: self._sampler.draw(eager.logits(batch, output), batch, kind)
            )
        if eager.is_capturable:
            num_drafts = shape.max_query_len - 1
            self._propose[shape] = recorder.record(lambda: eager.propose(batch, output, num_drafts))

    def replays(self, batch: InputBatch) -> bool:
        return batch.shape in self._forward

    def forward(self, batch: InputBatch) -> ModelOutput:
        graph = self._forward.get(batch.shape)
        if graph is None:
            return self._eager.forward(batch)
        graph.replay()
        return graph.outputs

    def sample(self, batch: InputBatch, output: ModelOutput, grammars: GrammarOutput) -> PendingOutput:
        kind = self._sampler.common_kind(batch, grammars)
        graph = self._sample.get((batch.shape, kind)) if kind is not None else None
        if graph is None:
            return self._eager.sample(batch, _cut(output, batch), grammars)
        self._sampler.begin()
        graph.replay()
        return self._sampler.fetch(batch)

    def propose(self, batch: InputBatch, output: ModelOutput, num_drafts: int) -> None:
        graph = self._propose.get(batch.shape)
        if graph is not None and num_drafts == batch.shape.max_query_len - 1:
            graph.replay()
        elif self._eager.has_drafts:
            self._eager.propose(batch, _cut(output, batch), num_drafts)


def _cut(output: ModelOutput, batch: InputBatch) -> ModelOutput:
    """Without padding."""
    count = batch.host.num_tokens
    return ModelOutput(output.hidden[:count], output.aux_hidden[:count])


def make_passes(
    memory: DeviceMemory, eager: EagerPasses, inputs: InputBuilder, sampler: StepSampler, shapes: BatchShapes
) -> Passes:
    """Records every shape that is to be captured, which shows as progress. See `DeviceParts`."""
    if not shapes.captured:
        return eager
    assert isinstance(inputs, GpuInputBuilder), type(inputs)
    assert isinstance(sampler, GpuStepSampler), type(sampler)
    passes, recorder = GraphedPasses(eager, sampler), CudaGraphRecorder(inputs.device)
    torch.cuda.empty_cache()
    free = memory.available()
    with memory_for("CUDA graphs", inputs.device, lambda: _ADVICE), torch.inference_mode():
        for shape in tqdm(shapes.captured, desc="capturing CUDA graphs", unit="shape"):
            batch = inputs.blank(shape)
            output = passes.capture_forward(batch, recorder)
            if not shapes.is_mixed(shape):
                passes.capture_behind(batch, output, recorder)
    # What the first calls needed belongs to the recorder's stream and would never be used again.
    torch.cuda.empty_cache()
    logger.info("CUDA graphs take %.2f GiB", (free - memory.available()) / 2**30)
    return passes
