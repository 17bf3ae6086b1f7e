"""top_k, top_p and min_p: which tokens may be drawn at all.

Each rule keeps the tokens whose logit reaches a threshold that the row alone decides, so ties are kept together and
neither the neighbours nor the order in which equal logits are sorted can change what is kept.
"""

from __future__ import annotations

import math

import torch

from penstock.runner.sampling.batch import SamplingBatch

# Most distributions have their mass in few tokens: look at these many before sorting a whole vocabulary.
_NUM_CANDIDATES = 1024


def apply_min_p(logits: torch.Tensor, batch: SamplingBatch) -> None:
    """Keeps tokens at least `min_p` times as likely as the likeliest one (Nguyen et al. 2024, arXiv:2407.01082)."""
    chosen = batch.where(lambda request: request.sampling_params.min_p > 0)
    if chosen:
        index = batch.indices(chosen)
        log_min_p = batch.column(math.log(batch.requests[i].sampling_params.min_p) for i in chosen)
        values = logits[index]
        _keep(logits, index, values, values.amax(-1, keepdim=True) + log_min_p)


def apply_top_k(logits: torch.Tensor, batch: SamplingBatch) -> None:
    """Keeps the `top_k` likeliest tokens (Fan et al. 2018, arXiv:1805.04833)."""
    vocab_size = logits.shape[1]
    chosen = batch.where(lambda request: 0 < request.sampling_params.top_k < vocab_size)
    if chosen:
        index = batch.indices(chosen)
        values = logits[index]
        ks = [batch.requests[i].sampling_params.top_k for i in chosen]
        best = values.topk(max(ks)).values
        _keep(logits, index, values, best.gather(1, batch.indices(k - 1 for k in ks)[:, None]))


def apply_top_p(logits: torch.Tensor, batch: SamplingBatch) -> None:
    """Keeps the likeliest tokens that together reach `top_p` (Holtzman et al. 2019, arXiv:1904.09751)."""
    chosen = batch.where(lambda request: request.sampling_params.top_p < 1)
    if not chosen:
        return
    index = batch.indices(chosen)
    values = logits[index]
    probs = values.softmax(-1)
    top_p = batch.column(batch.requests[i].sampling_params.top_p for i in chosen)
    num_candidates = min(_NUM_CANDIDATES, values.shape[1])
    best, order = values.topk(num_candidates)
    mass = probs.gather(1, order).cumsum(-1, dtype=torch.float64)
    if num_candidates < values.shape[1] and bool((mass[:, -1:] < top_p).any()):
        best, order = values.sort(descending=True)
        mass = probs.gather(1, order).cumsum(-1, dtype=torch.float64)
    # The first place at which the mass is reached; rounding may keep a whole row's mass just below 1.
    last = (mass < top_p).sum(-1, keepdim=True).clamp_(max=best.shape[1] - 1)
    _keep(logits, index, values, best.gather(1, last))


def _keep(logits: torch.Tensor, index: torch.Tensor, values: torch.Tensor, threshold: torch.Tensor) -> None:
    logits[index] = values.masked_fill(values < threshold, -torch.inf)
