"""Speculators with their own model and KV: a smaller model, or a head on the target's hidden states.

Both process every step's tokens after the target, so that their KV is complete, and then continue one token at a time.
Slots of rejected drafts are never read: the next pass over these positions overwrites them first. A `Picker` picks
drafts from their logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from penstock.attention.forward_context import LayerCaches
from penstock.models.interface import DraftHead, Model
from penstock.runner.input_batch import InputBuilder
from penstock.runner.loaded_model import LoadedModel
from penstock.runner.memory import DeviceMemory
from penstock.runner.speculation.speculator import StepResult
from penstock.utils.errors import ConfigError

Pick = Callable[[torch.Tensor, int], torch.Tensor]
"""(logits [num_sampling, vocab_size], place of the draft after the last known token) -> [num_sampling] int64."""


class Picker(Protocol):
    """Picks drafts from a drafter's logits, one after the other once `of_step` has been called in a step.

    Lifecycle: built with the runner. Threading: the runner's thread.
    """

    is_capturable: bool
    """See `Speculator.is_capturable`."""

    def of_step(self, step: StepResult) -> Pick:
        """Returns the function that picks the drafts of the step's sampling requests."""
        ...


class BestPicker:
    """Picks the likeliest token."""

    is_capturable = True

    def of_step(self, step: StepResult) -> Pick:
        return lambda logits, place: logits.argmax(-1)


def allocate_draft_logits(
    loaded: LoadedModel, max_num_reqs: int, max_num_drafts: int, memory: DeviceMemory
) -> torch.Tensor:
    """Allocates [max_num_reqs, max_num_drafts, vocab_size] in the model's dtype. ConfigError if it does not fit."""
    device, dtype, vocab_size = loaded.device, loaded.model.logits_dtype, loaded.config.vocab_size
    needed = max_num_reqs * max_num_drafts * vocab_size * dtype.itemsize
    available = memory.available()
    if needed > available:
        raise ConfigError(
            f"draft_sample_method=probabilistic keeps {vocab_size} logits for each of {max_num_drafts} drafts of "
            f"max_num_seqs={max_num_reqs} requests, which take {needed / 2**30:.1f} GiB, and {device} has "
            f"{available / 2**30:.1f} GiB free: lower max_num_seqs or num_speculative_tokens, or sample the drafts "
            "greedily"
        )
    return torch.empty((max_num_reqs, max_num_drafts, vocab_size), dtype=dtype, device=device)


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
