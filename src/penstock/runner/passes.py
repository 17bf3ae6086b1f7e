"""The computations of a step: the model's pass over its tokens, the sampling, and then the speculator's passes."""

from __future__ import annotations

from typing import Protocol

import torch

from penstock.attention.forward_context import LayerCaches
from penstock.kernels.prepare_inputs import store_drafts
from penstock.messages.requests import RowRequest
from penstock.messages.scheduler_output import GrammarOutput
from penstock.models.interface import Model, ModelOutput
from penstock.runner.input_batch import InputBatch, InputBuilder
from penstock.runner.outputs import PendingOutput
from penstock.runner.request_states import RequestStates
from penstock.runner.speculation.speculator import Speculator, StepResult


class StepSampler(Protocol):
    """Lifecycle: one is chosen and built with the runner. Threading: the runner's thread.

    Everything launched after `skip` or `sample` finds the step's tokens and exact counts in the rows' tables.
    """

    runs_ahead: bool
    """Whether a result may be requested later than its step is launched."""

    def add(self, row: int, request: RowRequest) -> None:
        """Called when a request gets its row; staged like the rows themselves."""
        ...

    def skip(self, batch: InputBatch) -> PendingOutput:
        """Ends a step in which no request samples. Its result, too, is available when the step has been computed."""
        ...

    def sample(self, logits: torch.Tensor, batch: InputBatch, grammars: GrammarOutput) -> PendingOutput:
        """Ends a step. `logits` [num_logits, vocab_size] in the model's dtype stay unchanged."""
        ...


class Passes(Protocol):
    """Lifecycle: one is chosen and built with the runner. Threading: the runner's thread. No method waits."""

    def replays(self, batch: InputBatch) -> bool:
        """Returns whether `forward` replays a graph."""
        ...

    def forward(self, batch: InputBatch) -> ModelOutput:
        """Runs the model over the step's tokens. The output is valid until the next step's pass.

        There may be padding after the tokens.
        """
        ...

    def sample(self, batch: InputBatch, output: ModelOutput, grammars: GrammarOutput) -> PendingOutput:
        """Ends the step except for its drafts: tokens and exact counts are in the rows' tables."""
        ...

    def propose(self, batch: InputBatch, output: ModelOutput, num_drafts: int) -> None:
        """Lets the speculator process the step, and stores its drafts after the last known tokens."""
        ...


class ForwardPasses:
    """The model's pass alone, launched in every step."""

    def __init__(self, model: Model, cache: LayerCaches, inputs: InputBuilder) -> None:
        self._model = model
        self._cache = cache
        self._inputs = inputs

    def forward(self, batch: InputBatch) -> ModelOutput:
        """See `Passes.forward`."""
        self._inputs.prepare(batch)
        tokens = batch.tensors.tokens
        return self._model.forward(tokens.input_ids, tokens.positions, self._cache.context(batch.tensors.attention))


class EagerPasses(ForwardPasses):
    """Launches all kernels in every step (`Passes`)."""

    def __init__(
        self,
        model: Model,
        cache: LayerCaches,
        inputs: InputBuilder,
        sampler: StepSampler,
        speculator: Speculator,
        states: RequestStates,
    ) -> None:
        super().__init__(model, cache, inputs)
        self._sampler = sampler
        self._speculator = speculator
        self._states = states

    @property
    def has_drafts(self) -> bool:
        """Whether steps propose drafts."""
        return self._states.drafts.shape[1] > 0

    @property
    def is_capturable(self) -> bool:
        """Whether there are drafts, and a CUDA graph may contain their proposal."""
        return self._speculator.is_capturable

    def replays(self, batch: InputBatch) -> bool:
        return False

    def logits(self, batch: InputBatch, output: ModelOutput) -> torch.Tensor:
        """Returns [num_logits, vocab_size]: the logits of the tokens that are sampled from."""
        samples_all = batch.host.num_logits == batch.host.num_tokens
        return self._model.compute_logits(output.hidden if samples_all else output.hidden[batch.tensors.logits_indices])

    def sample(self, batch: InputBatch, output: ModelOutput, grammars: GrammarOutput) -> PendingOutput:
        if not len(batch.host.sampling):
            return self._sampler.skip(batch)
        return self._sampler.sample(self.logits(batch, output), batch, grammars)

    def propose(self, batch: InputBatch, output: ModelOutput, num_drafts: int) -> None:
        if not self.has_drafts:
            return
        states, rows = self._states, batch.tensors.sampling_rows
        num_computed = states.num_computed_exact[rows, 0]
        step = StepResult(batch, output, batch.tensors.sampling, rows, num_computed, states.token_ids)
        drafts = self._speculator.propose(step, num_drafts)
        if num_drafts and len(rows):
            store_drafts(drafts, rows, states.num_computed_exact, states.drafts, states.token_ids)
