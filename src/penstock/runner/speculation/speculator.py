"""The interface of speculators, which propose drafts.

Lifecycle: built once with the runner; `propose` is called after every forward pass that computed tokens, whether or not
a request sampled in it, so that a speculator with its own KV can process all tokens. Threading: the runner's thread.
Failure: an exception ends the engine. A speculator reads the rows' tokens and writes only the KV of its own layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from penstock.models.interface import ModelOutput
from penstock.runner.input_batch import InputBatch


@dataclass(frozen=True, slots=True)
class StepResult:
    """The speculator's view of a step: the computed tokens, and the tokens known now."""

    batch: InputBatch
    output: ModelOutput  # of the target model
    sampling: torch.Tensor  # [num_sampling] int64: batch rows that sampled
    rows: torch.Tensor  # [num_sampling] int64: their state rows
    num_computed_exact: torch.Tensor  # [num_sampling] int64: their tokens whose KV is in place; one more token is known
    token_ids: torch.Tensor  # [max_num_reqs, width] int32: all known tokens by state row


class Speculator(Protocol):
    leaves_gaps: bool
    """Whether it may find nothing to propose, and the CPU knows it."""

    is_capturable: bool
    """Whether a CUDA graph may contain its work: all data that differ between steps are on the device."""

    def propose(self, step: StepResult, num_drafts: int) -> torch.Tensor:
        """Returns [num_sampling, num_drafts] int64: likely tokens after each request's last known token.

        -1 is a gap, after which there is no draft.
        """
        ...


class NullSpeculator:
    """Proposes nothing."""

    leaves_gaps = False
    is_capturable = False

    def propose(self, step: StepResult, num_drafts: int) -> torch.Tensor:
        return torch.full((len(step.rows), num_drafts), -1, device=step.rows.device)
