"""Steps that are recorded once and replayed, because launching the kernels of a short step takes longer than they run.

A graph belongs to a shape (`BatchDescriptor`). It is recorded over a step of padding only, whose inputs are in the
buffers of all steps; before a replay the input builder has published the step's counts, and padding after them. Padding
reads no state row, writes no KV, and its results are not used.

All graphs share one pool of memory: the outputs of one are lost when any graph is replayed.
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
from penstock.runner.passes import EagerPasses, Passes, StepSampler
from penstock.utils import logging

logger = logging.get_logger(__name__)

_ADVICE = "lower gpu_memory_utilization or max_num_seqs, or set enforce_eager"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RecordedGraph(Generic[T]):
    replay: Callable[[], None]  # launches the whole graph on the current stream
    outputs: T  # the return value of the recorded function: tensors that every replay overwrites


class GraphRecorder(Protocol):
    def record(self, run: Callable[[], T]) -> RecordedGraph[T]:
        """Calls `run`, possibly more than once, and records its launches."""
        ...


class CudaGraphRecorder:
    """`torch.cuda.CUDAGraph`, without the garbage collection that `torch.cuda.graph` adds to each capture."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], T]) -> RecordedGraph[T]:
        caller = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(caller)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            # Compiles kernels, and lets libraries allocate their permanent memory.
            run()
            self._stream.synchronize()
            # Other threads, such as a connector's, may continue with operations that a capture forbids.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                outputs = run()
            except BaseException:
                # Ending a failed capture fails too, with a less specific error.
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        caller.wait_stream(self._stream)
        return RecordedGraph(graph.replay, outputs)


class GraphedPasses:
    """Replays the steps whose shapes were captured; all others are launched (`Passes`).

    A step is up to three graphs: its inputs and the forward pass; and if it is uniform, logits and sampling, provided
    that requests only use common features, and the drafts.
    """

    def __init__(self, eager: EagerPasses, sampler: GpuStepSampler) -> None:
        self._eager = eager
        self._sampler = sampler
        self._forward: dict[BatchDescriptor, RecordedGraph[ModelOutput]] = {}
        self._sample: dict[tuple[BatchDescriptor, CommonSampling], RecordedGraph[None]] = {}
        self._propose: dict[BatchDescriptor, RecordedGraph[None]] = {}

    def capture_forward(self, batch: InputBatch, recorder: GraphRecorder) -> ModelOutput:
        """`batch` is padding only. Returns the input of `capture_behind`."""
        graph = self._forward[batch.shape] = recorder.record(lambda: self._eager.forward(batch))
        return graph.outputs

    def capture_behind(self, batch: InputBatch, output: ModelOutput, recorder: GraphRecorder) -> None:
        """Captures what follows a uniform step's forward pass; assumes as many new drafts as it verifies."""
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
    """Returns the output without padding."""
    count = batch.host.num_tokens
    return ModelOutput(output.hidden[:count], output.aux_hidden[:count])


def make_passes(
    memory: DeviceMemory, eager: EagerPasses, inputs: InputBuilder, sampler: StepSampler, shapes: BatchShapes
) -> Passes:
    """Records every shape that is to be captured, and shows the progress. See `DeviceParts`."""
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
    # The memory of the first calls belongs to the recorder's stream and would never be reused.
    torch.cuda.empty_cache()
    logger.info("CUDA graphs take %.2f GiB", (free - memory.available()) / 2**30)
    return passes
