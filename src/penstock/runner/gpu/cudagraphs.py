"""Steps that are recorded once and replayed: where a step is short, launching its kernels takes longer than they do.

A graph belongs to a shape (`BatchDescriptor`). It is recorded over a step that is padding throughout, whose inputs lie
in the buffers of all steps; to replay it, the input builder has filled these buffers, padding behind the step's own
inputs. Padding reads no state row, writes no KV, and its results are nobody's.

All graphs share one pool of memory: what one leaves is gone when another one, or the same one again, is replayed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from tqdm import tqdm

from penstock.models.interface import ModelOutput
from penstock.runner.batch_shapes import BatchDescriptor, BatchShapes
from penstock.runner.gpu.inputs import GpuInputBuilder
from penstock.runner.input_batch import InputBatch, InputBuilder
from penstock.runner.memory import available_bytes, memory_for
from penstock.runner.passes import EagerPasses
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
    """Replays the steps whose shapes were captured; all others are launched (`Passes`)."""

    def __init__(self, eager: EagerPasses) -> None:
        self._eager = eager
        self._forward: dict[BatchDescriptor, RecordedGraph[ModelOutput]] = {}
        self._propose: dict[BatchDescriptor, RecordedGraph[None]] = {}

    def capture(self, batch: InputBatch, recorder: GraphRecorder) -> None:
        """`batch` is padding throughout. A step that verifies some drafts is taken to propose as many."""
        forward = self._forward[batch.shape] = recorder.record(lambda: self._eager.forward(batch))
        if self._eager.is_capturable:
            num_drafts = batch.shape.max_query_len - 1
            self._propose[batch.shape] = recorder.record(
                lambda: self._eager.propose(batch, forward.outputs, num_drafts)
            )

    def replays(self, batch: InputBatch) -> bool:
        return batch.shape in self._forward

    def forward(self, batch: InputBatch) -> ModelOutput:
        graph = self._forward.get(batch.shape)
        if graph is None:
            return self._eager.forward(batch)
        graph.replay()
        count = batch.host.num_tokens
        return ModelOutput(graph.outputs.hidden[:count], graph.outputs.aux_hidden[:count])

    def propose(self, batch: InputBatch, output: ModelOutput, num_drafts: int) -> None:
        graph = self._propose.get(batch.shape)
        if graph is None or num_drafts != batch.shape.max_query_len - 1:
            self._eager.propose(batch, output, num_drafts)
        else:
            graph.replay()


def capture(eager: EagerPasses, inputs: InputBuilder, shapes: BatchShapes) -> GraphedPasses:
    """Records every shape that is to be captured. Raises ConfigError where there is no memory for all."""
    assert isinstance(inputs, GpuInputBuilder), type(inputs)
    passes, recorder = GraphedPasses(eager), CudaGraphRecorder(inputs.device)
    torch.cuda.empty_cache()
    free = available_bytes(inputs.device)
    with memory_for("CUDA graphs", inputs.device, lambda: _ADVICE), torch.inference_mode():
        for shape in tqdm(shapes.captured, desc="capturing CUDA graphs", unit="graph"):
            passes.capture(inputs.blank(shape), recorder)
    # What the first calls needed belongs to the recorder's stream and would never be used again.
    torch.cuda.empty_cache()
    logger.info("CUDA graphs take %.2f GiB", (free - available_bytes(inputs.device)) / 2**30)
    return passes
