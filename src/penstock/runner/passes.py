"""What a step computes: the model's pass over its tokens, and behind the sampling the speculator's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from penstock.attention.backend import AttentionBackend
from penstock.attention.metadata import ForwardContext, LayerHooks
from penstock.kernels.prepare_inputs import store_drafts
from penstock.models.interface import Model, ModelOutput
from penstock.runner.batch_shapes import BatchShapes
from penstock.runner.input_batch import InputBatch, InputBuilder
from penstock.runner.load import KVCache
from penstock.runner.request_states import RequestStates
from penstock.runner.speculation.speculator import Speculator, StepResult


class Passes(Protocol):
    """Lifecycle: one is chosen and built with the runner. Threading: the runner's thread. They wait for nothing."""

    def replays(self, batch: InputBatch) -> bool:
        """Whether `forward` takes a graph."""
        ...

    def forward(self, batch: InputBatch) -> ModelOutput:
        """The model over the step's tokens. What it returns is valid until the next step's pass."""
        ...

    def propose(self, batch: InputBatch, output: ModelOutput, num_drafts: int) -> None:
        """Lets the speculator follow the step, and stores its drafts behind the last known tokens."""
        ...


class EagerPasses:
    """Launches every kernel anew (`Passes`). `hooks` tells whom to tell of the step's layers."""

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        attention: AttentionBackend,
        hooks: Callable[[], LayerHooks],
        speculator: Speculator,
        states: RequestStates,
    ) -> None:
        self._model = model
        self._cache = cache
        self._attention = attention
        self._hooks = hooks
        self._speculator = speculator
        self._states = states

    @property
    def is_capturable(self) -> bool:
        """Whether there are drafts, and a CUDA graph may hold what proposes them."""
        return self._speculator.is_capturable

    def replays(self, batch: InputBatch) -> bool:
        return False

    def forward(self, batch: InputBatch) -> ModelOutput:
        groups = zip(self._cache.config.groups, batch.attention, strict=True)
        by_layer = {name: metadata for group, metadata in groups for name in group.layer_names}
        context = ForwardContext(by_layer, self._cache.tensors, self._attention, self._hooks())
        return self._model.forward(batch.tokens.input_ids, batch.tokens.positions, context)

    def propose(self, batch: InputBatch, output: ModelOutput, num_drafts: int) -> None:
        if not self._states.drafts.shape[1]:
            return
        states, rows = self._states, batch.sampling_rows
        num_computed = states.num_computed_exact[rows, 0]
        step = StepResult(batch, output, batch.sampling, rows, num_computed, states.token_ids)
        drafts = self._speculator.propose(step, num_drafts)
        if num_drafts and len(rows):
            store_drafts(drafts, rows, states.num_computed_exact, states.drafts, states.token_ids)


def make_passes(eager: EagerPasses, inputs: InputBuilder, shapes: BatchShapes) -> Passes:
    """With graphs of the shapes that are to be captured; that they are recorded shows as progress."""
    if not shapes.captured:
        return eager
    # Only now: a CPU has no graphs.
    from penstock.runner.gpu.cudagraphs import capture

    return capture(eager, inputs, shapes)
