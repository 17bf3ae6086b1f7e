"""Log probabilities of the model's own distribution, before any sampling parameter is applied."""

from __future__ import annotations

from collections.abc import Callable

import torch

from penstock.messages.requests import RowRequest
from penstock.messages.runner_output import TokenLogprobs
from penstock.runner.sampling.feature import Column, Feature

PendingLogprobs = Callable[[], list[TokenLogprobs]]
"""Waits for them and returns one entry per row."""

Score = Callable[[torch.Tensor, torch.Tensor, int], PendingLogprobs]
"""Like `token_logprobs`, with the same number of likeliest tokens for every row. It never waits."""


def token_logprobs(logits: torch.Tensor, chosen: torch.Tensor, num_top: list[int]) -> list[TokenLogprobs]:
    """Returns for each row the chosen token with its rank, then the `num_top[row]` likeliest tokens.

    `logits` is [num_rows, vocab_size], `chosen` [num_rows] int64.
    """
    logprobs = logits.float().log_softmax(-1)
    of_chosen = logprobs.gather(1, chosen[:, None])
    ranks = (logprobs > of_chosen).sum(-1) + 1
    best, best_ids = logprobs.topk(max(num_top)) if max(num_top) else (of_chosen[:, :0], chosen[:, None][:, :0])
    columns = (chosen, of_chosen[:, 0], ranks, best_ids, best)
    rows = zip(num_top, *(column.tolist() for column in columns), strict=True)
    return [
        TokenLogprobs((token, *ids[:count]), (logprob, *values[:count]), rank)
        for count, token, logprob, rank, ids, values in rows
    ]


def num_top(request: RowRequest, vocab_size: int) -> tuple[int]:
    """Returns the number of likeliest tokens that a request asks for, -1 without log probabilities."""
    count = request.sampling_params.logprobs
    return (-1 if count is None else min(count, vocab_size),)


LOGPROBS = Feature(
    concerns=lambda request, _: request.sampling_params.logprobs is not None,
    columns=(Column("num_top", torch.int32, num_top),),
)
TOP_LOGPROBS = Feature(concerns=lambda request, _: request.sampling_params.logprobs)
PROMPT_LOGPROBS = Feature(concerns=lambda request, _: request.sampling_params.prompt_logprobs is not None)
