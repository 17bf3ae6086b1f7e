"""Speculators with their own model and KV: a smaller model, or a head on the target's hidden states.

Both process every step's tokens after the target, so that their KV is complete, and then continue one token at a time.
Slots of rejected drafts are never read: the next pass over these positions overwrites them first.
"""

from __future__ import annotations

import torch

from penstock.attention.forward_context import LayerCaches
from penstock.models.interface import DraftHead, Model
from penstock.runner.input_batch import InputBuilder
from penstock.runner.speculation.pick import Picker
from penstock.runner.speculation.speculator import StepResult


class DraftModelSpeculator:
    """A smaller model with the target's vocabulary."""

    leaves_gaps = False

    def __init__(self, model: Model, cache: LayerCaches, inputs: InputBuilder, picker: Picker) -> None:
        self.is_capturable = picker.is_capturable
        self._model = model
        self._cache = cache
        self._inputs = inputs
        self._picker = picker

    def propose(self, step: StepResult, num_drafts: int) -> torch.Tensor:
        tensors = step.batch.tensors
        context = self._cache.context(tensors.attention)
        self._model.forward(tensors.tokens.input_ids, tensors.tokens.positions, context)
        pick = self._picker.of_step(step)
        drafts: list[torch.Tensor] = []
        last = step.token_ids[step.rows, step.num_computed_exact].long()
        for index in range(num_drafts if len(step.rows) else 0):
            following = self._inputs.follow(step.batch, index)
            hidden = self._model.forward(last, following.positions, self._cache.context(following.attention)).hidden
            last = pick(self._model.compute_logits(hidden), index)
            drafts.append(last)
        return _stack(drafts, step, num_drafts)


class HeadSpeculator:
    """Multi-token prediction and EAGLE: its inputs are the target's hidden states and then its own."""

    leaves_gaps = False

    def __init__(self, head: DraftHead, cache: LayerCaches, inputs: InputBuilder, picker: Picker) -> None:
        self.is_capturable = picker.is_capturable
        self._head = head
        self._cache = cache
        self._inputs = inputs
        self._picker = picker

    def propose(self, step: StepResult, num_drafts: int) -> torch.Tensor:
        tensors, head = step.batch.tensors, self._head
        tokens, context = tensors.tokens, self._cache.context(tensors.attention)
        next_ids = step.token_ids[tokens.rows, tokens.positions + 1].long()
        hidden = head.forward(head.enter(step.output), next_ids, tokens.positions, context)
        pick = self._picker.of_step(step)
        drafts: list[torch.Tensor] = []
        if num_drafts and len(step.rows):
            # The last position of each request whose token and hidden state are both final.
            starts = tensors.query_start_loc[step.sampling].long()
            first = tokens.positions[starts]
            hidden = hidden[starts + step.num_computed_exact - 1 - first]
            drafts.append(pick(head.compute_logits(hidden), 0))
        for index in range(1, num_drafts if len(step.rows) else 0):
            following = self._inputs.follow(step.batch, index - 1)
            context = self._cache.context(following.attention)
            hidden = head.forward(hidden, drafts[-1], following.positions, context)
            drafts.append(pick(head.compute_logits(hidden), index))
        return _stack(drafts, step, num_drafts)


def _stack(drafts: list[torch.Tensor], step: StepResult, num_drafts: int) -> torch.Tensor:
    if not drafts:
        return step.rows.new_zeros((len(step.rows), num_drafts))
    return torch.stack(drafts, 1)
