"""The end of a step: from logits to tokens in their rows, drafts verified, counts corrected."""

from __future__ import annotations

from typing import Protocol

import torch

from penstock.messages.requests import RowRequest
from penstock.messages.scheduler_output import GrammarOutput
from penstock.runner.input_batch import InputBatch
from penstock.runner.outputs import PendingOutput


class StepSampler(Protocol):
    """Lifecycle: one is chosen and built with the runner. Threading: the runner's thread.

    When `skip` or `sample` return, what is launched next finds the step's tokens and exact counts in the rows' tables.
    """

    runs_ahead: bool
    """Whether a result may be asked for later than its step is launched."""

    def add(self, row: int, request: RowRequest) -> None:
        """A request gets its row; staged as the rows themselves are."""
        ...

    def skip(self, batch: InputBatch) -> PendingOutput:
        """Ends a step in which no request samples. Its result, too, is there when the step has been computed."""
        ...

    def sample(self, logits: torch.Tensor, batch: InputBatch, grammars: GrammarOutput) -> PendingOutput:
        """Ends a step. `logits` [num_logits, vocab_size] in the model's dtype are left as they are."""
        ...
