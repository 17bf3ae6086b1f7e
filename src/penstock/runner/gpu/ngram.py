"""Prompt lookup on the device (`Speculator`): the CPU does not learn which lookups found nothing."""

from __future__ import annotations

import torch

from penstock.kernels.triton.ngram import propose_ngrams
from penstock.runner.speculation.speculator import StepResult


class GpuNgramSpeculator:
    leaves_gaps = False
    is_capturable = True

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest = shortest
        self._longest = longest

    def propose(self, step: StepResult, num_drafts: int) -> torch.Tensor:
        drafts = torch.empty((len(step.rows), num_drafts), dtype=torch.int64, device=step.rows.device)
        if drafts.numel():
            propose_ngrams(step.token_ids, step.rows, step.num_computed_exact, self._shortest, self._longest, drafts)
        return drafts
