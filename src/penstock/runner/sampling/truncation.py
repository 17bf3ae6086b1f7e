"""The temperature, and top_k, top_p and min_p: which tokens may be drawn at all.

Each of the last three keeps the tokens whose logit reaches a threshold that depends only on the row, so ties are kept
together and neither the neighbours nor the order in which equal logits are sorted affect what is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from penstock.messages.requests import RowRequest
from penstock.runner.sampling.batch import SMALLEST_TEMPERATURE, SamplingBatch
from penstock.runner.sampling.feature import Column, Feature

# Most distributions have their mass in few tokens: try this many before sorting a whole vocabulary.
_NUM_CANDIDATES = 1024


def _divide_by_temperature(logits: torch.Tensor, batch: SamplingBatch, chosen: Sequence[int]) -> None:
    # Copying the chosen rows would take longer than dividing all of them.
    divisors = torch.ones((len(logits), 1), device=logits.device)
    divisors[batch.indices(chosen)] = batch.temperatures(chosen)
    logits /= divisors


def _keep_by_min_p(logits: torch.Tensor, batch: SamplingBatch, chosen: Sequence[int]) -> None:
    """Keeps tokens at least `min_p` times as likely as the likeliest one (Nguyen et al. 2024, arXiv:2407.01082)."""
    index = batch.indices(chosen)
    log_min_p = batch.column(math.log(batch.requests[i].sampling_params.min_p) for i in chosen)
    values = logits[index]
    _keep(logits, index, values, values.amax(-1, keepdim=True) + log_min_p)


def _keep_top_k(logits: torch.Tensor, batch: SamplingBatch, chosen: Sequence[int]) -> None:
    """Keeps the `top_k` likeliest tokens (Fan et al. 2018, arXiv:1805.04833)."""
    index = batch.indices(chosen)
    values = logits[index]
    ks = [batch.requests[i].sampling_params.top_k for i in chosen]
    threshold = values.new_empty((len(ks), 1))
    # A row with a large k takes as long as sorting it, and must not have the others take that long.
    for k in set(ks):
        rows = batch.indices(row for row, own in enumerate(ks) if own == k)
        threshold[rows] = values[rows].topk(k).values[:, -1:]
    _keep(logits, index, values, threshold)


def _keep_top_p(logits: torch.Tensor, batch: SamplingBatch, chosen: Sequence[int]) -> None:
    """Keeps the likeliest tokens that together reach `top_p` (Holtzman et al. 2019, arXiv:1904.09751)."""
    index = batch.indices(chosen)
    values = logits[index]
    probs = values.softmax(-1)
    top_p = batch.column(batch.requests[i].sampling_params.top_p for i in chosen)
    best, order = values.topk(min(_NUM_CANDIDATES, values.shape[1]))
    threshold, mass = _reach(best, probs.gather(1, order), top_p)
    rest = (mass < top_p).nonzero()[:, 0]
    if best.shape[1] < values.shape[1] and len(rest):
        best, order = values[rest].sort(descending=True)
        threshold[rest] = _reach(best, probs[rest].gather(1, order), top_p[rest])[0]
    _keep(logits, index, values, threshold)


def _reach(best: torch.Tensor, probs: torch.Tensor, top_p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the logits at which the mass of the best tokens reaches `top_p`, and their whole mass, both [n, 1]."""
    mass = probs.cumsum(-1, dtype=torch.float64)
    # The first index at which the mass is reached; rounding may keep a whole row's mass just below 1.
    last = (mass < top_p).sum(-1, keepdim=True).clamp_(max=best.shape[1] - 1)
    return best.gather(1, last), mass[:, -1:]


def _keep(logits: torch.Tensor, index: torch.Tensor, values: torch.Tensor, threshold: torch.Tensor) -> None:
    logits[index] = values.masked_fill(values < threshold, -torch.inf)


def _top_k(request: RowRequest, vocab_size: int) -> int:
    """Returns 0 if all tokens are kept."""
    top_k = request.sampling_params.top_k
    return top_k if 0 < top_k < vocab_size else 0


def _temperature(request: RowRequest, vocab_size: int) -> tuple[float]:
    """Returns 0 for greedy requests."""
    params = request.sampling_params
    return (0.0 if params.is_greedy else max(params.temperature, SMALLEST_TEMPERATURE),)


def _log_min_p(request: RowRequest, vocab_size: int) -> tuple[float]:
    min_p = request.sampling_params.min_p
    return (math.log(min_p) if min_p > 0 else -math.inf,)


def _for_random_rows(concerns: Callable[[RowRequest, int], object]) -> Callable[[RowRequest, int], object]:
    return lambda request, vocab_size: not request.sampling_params.is_greedy and concerns(request, vocab_size)


TEMPERATURE = Feature(
    concerns=lambda request, _: not request.sampling_params.is_greedy,
    columns=(Column("temperature", torch.float32, _temperature),),
    apply=_divide_by_temperature,
)
MIN_P = Feature(
    concerns=_for_random_rows(lambda request, _: request.sampling_params.min_p > 0),
    columns=(Column("log_min_p", torch.float32, _log_min_p),),
    apply=_keep_by_min_p,
)
TOP_K = Feature(
    concerns=_for_random_rows(_top_k),
    columns=(Column("top_k", torch.int32, lambda request, vocab_size: (_top_k(request, vocab_size),)),),
    apply=_keep_top_k,
)
TOP_P = Feature(
    concerns=_for_random_rows(lambda request, _: request.sampling_params.top_p < 1),
    columns=(Column("top_p", torch.float32, lambda request, _: (request.sampling_params.top_p,)),),
    apply=_keep_top_p,
)
