"""The end of a step: samples tokens into their rows, verifies drafts, corrects counts."""

from __future__ import annotations

from typing import Protocol

import torch

from penstock.messages.requests import RowRequest
from penstock.messages.scheduler_output import GrammarOutput
from penstock.runner.input_batch import InputBatch
from penstock.runner.outputs import PendingOutput


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
