"""Log probabilities by torch, which are there when the call returns."""

from __future__ import annotations

import torch

from penstock.messages.runner_output import TokenLogprobs
from penstock.runner.sampling.logprobs import PendingLogprobs, token_logprobs


class ReadyLogprobs:
    """`PendingLogprobs`."""

    def __init__(self, rows: list[TokenLogprobs]) -> None:
        self._rows = rows

    def result(self) -> list[TokenLogprobs]:
        return self._rows


class TorchScorer:
    """`Scorer`."""

    def score(self, logits: torch.Tensor, chosen: torch.Tensor, num_top: int) -> PendingLogprobs:
        return ReadyLogprobs(token_logprobs(logits, chosen, [num_top] * len(chosen)))
