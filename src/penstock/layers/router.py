"""The rule by which a mixture of experts chooses the experts of a token, and their weights.

Among equal scores the expert with the lowest number is chosen, and among equal groups the first one; experts are in
order of descending score. Everything is float32. A row depends on its own logits alone: sums have one order, and
there is no elementwise function whose result depends on the position in memory, as torch's exponential does.
"""

from __future__ import annotations

import torch

from penstock.config.experts import SIGMOID, SOFTMAX, TWO_BEST, ExpertsConfig
from penstock.kernels.sigmoid import sigmoid

# Added to the sum of sigmoids by which weights are divided: all of them may be zero.
_LEAST_SUM = 1e-20


def route(
    logits: torch.Tensor, config: ExpertsConfig, correction: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [T, num_experts] float32 -> expert ids [T, top_k] int64 and weights [T, top_k] float32.

    `correction`, [num_experts], is added to the scores for the choice alone.
    """
    assert logits.dtype == torch.float32 and logits.shape[1] == config.num_experts, f"{logits.dtype} {logits.shape}"
    scores = _scores(logits, config.scores)
    preference = scores if correction is None else scores + correction
    if config.num_groups > 1:
        preference = _keep_best_groups(preference, config)
    ids = top_k(preference, config.top_k)
    weights = scores.gather(1, ids)
    if config.scores not in (SOFTMAX, SIGMOID):
        weights = weights.softmax(-1)
    if config.renormalizes:
        weights = weights / (_sum(weights) + (_LEAST_SUM if config.scores == SIGMOID else 0.0))
    return ids, weights * config.scaling


def top_k(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Returns the ids [T, count] of the largest scores of each row, in descending order; equal ones in ascending order
    of ids. (`torch.topk` chooses any of equal ones.)
    """
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count].contiguous()


def _scores(logits: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == SOFTMAX:
        return logits.softmax(-1)
    return sigmoid(logits) if kind == SIGMOID else logits


def _keep_best_groups(preference: torch.Tensor, config: ExpertsConfig) -> torch.Tensor:
    """Returns the scores with minus infinity in all but the best groups."""
    grouped = preference.view(len(preference), config.num_groups, -1)
    best = grouped.sort(dim=-1, descending=True).values
    score = best[..., 0] + best[..., 1] if config.group_score == TWO_BEST else best[..., 0]
    is_kept = torch.zeros_like(score, dtype=torch.bool).scatter_(1, top_k(score, config.top_groups), True)
    return grouped.masked_fill(~is_kept[..., None], -torch.inf).view_as(preference)


def _sum(weights: torch.Tensor) -> torch.Tensor:
    """[T, k] -> [T, 1], added in order."""
    total = weights[:, :1]
    for column in range(1, weights.shape[1]):
        total = total + weights[:, column : column + 1]
    return total
