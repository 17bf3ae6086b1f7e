"""The choice of a token's experts on a GPU: see `penstock.kernels.router`. One program per token.

The scores of a token are one tile [groups, experts of a group], the same for any number of tokens, so a row's bits
depend on its own logits. Experts are chosen one after another, among equal scores the one with the lowest number; a NaN
counts as the largest score, as in the reference, so that the row's weights show it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from penstock.config.experts import TWO_BEST, ExpertsConfig


def route(
    logits: torch.Tensor, config: ExpertsConfig, correction: torch.Tensor | None, least_sum: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [T, num_experts] float32 -> ids [T, top_k] int64, weights [T, top_k] float32. The wrapper in
    `penstock.kernels` has checked them; `least_sum` is added to the sum by which weights are divided.
    """
    rows, top_k = len(logits), config.top_k
    ids = torch.empty((rows, top_k), dtype=torch.int64, device=logits.device)
    weights = logits.new_empty((rows, top_k))
    size = config.num_experts // config.num_groups
    if rows:
        _route[(rows,)](
            logits, correction, ids, weights, least_sum, config.scaling, config.num_groups, size, top_k,
            triton.next_power_of_2(config.num_groups), triton.next_power_of_2(size), triton.next_power_of_2(top_k),
            config.top_groups, config.scores, config.group_score == TWO_BEST, config.renormalizes,
            num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return ids, weights


@triton.jit
def _largest(keys, is_free, places):
    """Returns the lowest of the places with the largest key among those that are free."""
    best = tl.max(tl.where(is_free, keys, float("-inf")))
    return tl.min(tl.where(is_free & (keys == best), places, 1 << 30))


@triton.jit
def _route(
    logits_ptr, correction_ptr, ids_ptr, weights_ptr, least_sum, scaling,
    num_groups: tl.constexpr, size: tl.constexpr, top_k: tl.constexpr, groups_tile: tl.constexpr,
    size_tile: tl.constexpr, top_k_tile: tl.constexpr, top_groups: tl.constexpr, kind: tl.constexpr,
    sums_two_best: tl.constexpr, renormalizes: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    group, place = tl.arange(0, groups_tile), tl.arange(0, size_tile)
    expert = group[:, None] * size + place[None, :]
    is_free = (group < num_groups)[:, None] & (place < size)[None, :]
    scores = tl.load(logits_ptr + row * (num_groups * size) + expert, mask=is_free, other=float("-inf"))
    if kind == "softmax":
        scores = tl.exp(scores - tl.max(scores))
        scores = scores / tl.sum(scores)
    elif kind == "sigmoid":
        scores = 1.0 / (1.0 + tl.exp(-scores))
    keys = scores
    if correction_ptr is not None:
        keys += tl.load(correction_ptr + expert, mask=is_free, other=0.0)
    keys = tl.where(keys == keys, keys, float("inf"))
    if num_groups > 1:
        inside = tl.where(is_free, keys, float("-inf"))
        group_keys = tl.max(inside, 1)
        if sums_two_best:
            first = tl.min(tl.where(inside == group_keys[:, None], place[None, :], size_tile), 1)
            group_keys += tl.max(tl.where(place[None, :] == first[:, None], float("-inf"), inside), 1)
            group_keys = tl.where(group_keys == group_keys, group_keys, float("inf"))
        is_left = group < num_groups
        for _ in tl.static_range(top_groups):
            is_left &= group != _largest(group_keys, is_left, group)
        is_free &= ~is_left[:, None]
    column = tl.arange(0, top_k_tile)
    ids = tl.zeros([top_k_tile], tl.int32)
    weights = tl.full([top_k_tile], float("-inf"), tl.float32)
    for choice in tl.static_range(top_k):
        chosen = tl.minimum(_largest(keys, is_free, expert), num_groups * size - 1)
        is_free &= expert != chosen
        ids = tl.where(column == choice, chosen, ids)
        weights = tl.where(column == choice, tl.sum(tl.where(expert == chosen, scores, 0.0)), weights)
    is_choice = column < top_k
    if kind == "top_k_softmax":
        weights = tl.exp(weights - tl.max(weights))
        weights = weights / tl.sum(weights)
    if renormalizes:
        weights = weights / (tl.sum(tl.where(is_choice, weights, 0.0)) + least_sum)
    tl.store(ids_ptr + row * top_k + column, ids.to(tl.int64), mask=is_choice)
    tl.store(weights_ptr + row * top_k + column, weights * scaling, mask=is_choice)
