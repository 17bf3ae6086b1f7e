"""Rejection sampling of drafts that were sampled from a drafter's distribution, and the storage of that distribution.

As in `penstock.runner.speculation.verifier` (Leviathan et al. 2023, arXiv:2211.17192): a draft x is accepted with
probability min(1, p(x) / q(x)), and otherwise replaced by a token sampled from max(0, p - q). p is the distribution
from which `draw.sample` has sampled the row's token, and q that of the drafter's logits at the request's temperature.

    probability   exp(logit / temperature - best / temperature) / total, of p nothing below the row's threshold

where the total is merged from the sums of tiles that `draw.sample` leaves in its workspace; `keep_drafts` stores those
of the drafter with its logits. Equal logits give equal bits on both sides, so a drafter equal to its target is always
accepted. For a rejected draft, `_sum_residuals` sums max(0, p - q) in each tile; `_replace`, one program per draft,
finds the tile by their cumulative sum in float64 and the token within that tile alone. No probability is stored, and of
an accepted draft only its own logits are read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from penstock.kernels.triton.sampling.draw import first_above
from penstock.kernels.triton.sampling.noise import uniform_of
from penstock.kernels.triton.sampling.tiles import (
    TILE,
    TILE_WARPS,
    SamplingTables,
    Workspace,
    padded_tiles,
)

_WARPS = 8  # probabilities are float64


@dataclass(frozen=True, slots=True)
class KeptDrafts:
    """The distributions of sampled drafts, by state row and position; a greedy request's is not stored."""

    logits: torch.Tensor  # [max_num_reqs, max_num_drafts, vocab_size], the drafter's
    tile_max: torch.Tensor  # [max_num_reqs, max_num_drafts, num_tiles] float32
    tile_sum: torch.Tensor  # [max_num_reqs, max_num_drafts, num_tiles] float32

    @classmethod
    def around(cls, logits: torch.Tensor) -> KeptDrafts:
        shape = (*logits.shape[:2], triton.cdiv(logits.shape[2], TILE))
        return cls(logits, *(torch.empty(shape, device=logits.device) for _ in range(2)))


@dataclass(frozen=True, slots=True)
class Residuals:
    """Scratch memory of one verification at a time."""

    sums: torch.Tensor  # [max_num_reqs * max_num_drafts, num_tiles] float64: of max(0, p - q)
    whole: torch.Tensor  # the same of p

    @classmethod
    def allocate(cls, drafts: KeptDrafts) -> Residuals:
        max_num_reqs, max_num_drafts, num_tiles = drafts.tile_max.shape
        shape, device = (max_num_reqs * max_num_drafts, num_tiles), drafts.logits.device
        return cls(*(torch.empty(shape, dtype=torch.float64, device=device) for _ in range(2)))


def keep_drafts(
    logits: torch.Tensor,  # [n, vocab_size], the drafter's, in the dtype of `kept`
    rows: torch.Tensor,  # [n] int64: state rows, -1 for padding
    place: int,  # of the draft after the last known token
    temperature: torch.Tensor,  # [max_num_reqs] or [max_num_reqs, 1] float32, by state row
    workspace: Workspace,  # as `draw.sample` has left it
    kept: KeptDrafts,
) -> None:
    num_rows, vocab_size = logits.shape
    max_num_drafts, num_tiles = kept.tile_max.shape[1:]
    assert logits.dtype == kept.logits.dtype and logits.stride(1) == 1, f"{logits.dtype} {logits.stride()}"
    assert rows.shape == (num_rows,) and 0 <= place < max_num_drafts, f"{rows.shape} {place}"
    _keep_drafts[(num_rows, num_tiles)](
        logits, rows, temperature, workspace.tile_max, workspace.tile_sum, kept.logits, kept.tile_max, kept.tile_sum,
        place, vocab_size, logits.stride(0), TILE, max_num_drafts,
        num_warps=TILE_WARPS,
    )  # fmt: skip


def accept_or_resample(
    logits: torch.Tensor,  # [num_logits, vocab_size]: what `draw.sample` has drawn from
    positions: torch.Tensor,  # [num_logits] int64
    drafts: torch.Tensor,  # [max_num_reqs, max_num_drafts] int64, by state row; -1 is a gap
    kept: KeptDrafts,
    tables: SamplingTables,
    workspace: Workspace,  # as `draw.sample` has left it
    truncates: bool,  # as in `draw.sample`
    purposes: tuple[int, int],  # of the number that accepts a draft, and of the one that samples its replacement
    rows: torch.Tensor,  # [R] int64: state rows, -1 for padding
    logits_start_loc: torch.Tensor,  # [R + 1] int32: request r owns rows logits_start_loc[r] .. [r + 1] of the logits
    residuals: Residuals,
    token_ids: torch.Tensor,  # [num_logits] int64: of requests that are not greedy, written where there is a draft
) -> None:
    """Returns each draft, or the token that replaces it."""
    num_reqs, vocab_size = len(rows), logits.shape[1]
    max_num_drafts, num_tiles = kept.tile_max.shape[1:]
    assert logits_start_loc.shape == (num_reqs + 1,), f"{tuple(logits_start_loc.shape)} for {num_reqs} requests"
    assert drafts.is_contiguous() and drafts.shape[1] == max_num_drafts, f"{drafts.stride()} {drafts.shape}"
    assert token_ids.shape == positions.shape == (len(logits),) and logits.stride(1) == 1, f"{token_ids.shape}"
    pointers = (
        logits, kept.logits, positions, drafts, rows, logits_start_loc, tables.temperature, tables.seed,
        workspace.threshold, workspace.tile_max, workspace.tile_sum, kept.tile_max, kept.tile_sum,
        residuals.sums, residuals.whole,
    )  # fmt: skip
    shape = (vocab_size, logits.stride(0), TILE, num_tiles, padded_tiles(num_tiles), max_num_drafts)
    grid = (num_reqs * max_num_drafts, num_tiles)
    _sum_residuals[grid](*pointers, purposes[0], truncates, *shape, num_warps=_WARPS)
    _replace[grid[:1]](*pointers, token_ids, *purposes, truncates, *shape, num_warps=_WARPS)


@triton.jit(do_not_specialize=["place"], do_not_specialize_on_alignment=["rows_ptr"])
def _keep_drafts(
    logits_ptr, rows_ptr, temperature_ptr, tile_max_ptr, tile_sum_ptr, kept_ptr, kept_max_ptr, kept_sum_ptr, place,
    vocab: tl.constexpr, stride: tl.constexpr, tile: tl.constexpr, max_num_drafts: tl.constexpr,
):  # fmt: skip
    index, number = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows_ptr + index)
    temperature = tl.load(temperature_ptr + row, mask=row >= 0, other=0.0)
    if temperature > 0:
        draft = row * max_num_drafts + place
        token = number * tile + tl.arange(0, tile)
        logits = tl.load(logits_ptr + index.to(tl.int64) * stride + token, mask=token < vocab)
        tl.store(kept_ptr + draft * vocab + token, logits, mask=token < vocab)
        source, target = index * tl.num_programs(1) + number, draft * tl.num_programs(1) + number
        tl.store(kept_max_ptr + target, tl.load(tile_max_ptr + source))
        tl.store(kept_sum_ptr + target, tl.load(tile_sum_ptr + source))


@triton.jit
def _find_draft(slot, drafts_ptr, rows_ptr, starts_ptr, temperature_ptr, max_num_drafts: tl.constexpr):
    """Returns (row of the logits that verifies it, its state row, index among all drafts, token or -1 for none,
    temperature).
    """
    request, place = slot // max_num_drafts, slot % max_num_drafts
    row = tl.load(rows_ptr + request)
    start = tl.load(starts_ptr + request)
    is_draft = (row >= 0) & (start + place + 1 < tl.load(starts_ptr + request + 1))
    temperature = tl.load(temperature_ptr + row, mask=is_draft, other=0.0)
    draft = row * max_num_drafts + place
    token = tl.load(drafts_ptr + draft, mask=temperature > 0, other=-1)
    return start + place, row, draft, token, tl.maximum(temperature, 1e-6)


@triton.jit
def _total_of(tile_max_ptr, tile_sum_ptr, index, temperature, num_tiles: tl.constexpr, all_tiles: tl.constexpr):
    """(the largest logit / temperature, the sum of exponents): NaN where there is a NaN."""
    number = tl.arange(0, all_tiles)
    source, is_tile = index * num_tiles + number, number < num_tiles
    maxima = tl.load(tile_max_ptr + source, mask=is_tile, other=-float("inf"))
    sums = tl.load(tile_sum_ptr + source, mask=is_tile, other=0.0)
    best = tl.div_rn(tl.max(tl.where(maxima == maxima, maxima, -float("inf")), 0), temperature)
    masses = sums.to(tl.float64) * tl.exp(tl.div_rn(maxima, temperature) - best).to(tl.float64)
    masses = tl.where(maxima > -float("inf"), masses, 0.0)
    total = tl.sum(masses, 0)
    return best, tl.where(tl.max((maxima != maxima).to(tl.int32), 0) > 0, float("nan"), total)


@triton.jit
def _probability(logit, temperature, best, total, threshold):
    """Returns float64; NaN for an infinite logit, whose row is NaN too."""
    scaled = tl.div_rn(logit, temperature)
    probability = tl.exp(scaled - best).to(tl.float64) / total
    return tl.where((scaled < threshold) | (scaled == -float("inf")), 0.0, probability)


@triton.jit
def _load_residual(
    logits, kept, place, temperature, best, total, kept_best, kept_total, threshold, vocab: tl.constexpr
):
    """Returns (max(0, p - q), p), float64 and 0 beyond the vocabulary."""
    target = tl.load(logits + place, mask=place < vocab, other=-float("inf")).to(tl.float32)
    draft = tl.load(kept + place, mask=place < vocab, other=-float("inf")).to(tl.float32)
    target = _probability(target, temperature, best, total, threshold)
    residual = target - _probability(draft, temperature, kept_best, kept_total, -float("inf"))
    return tl.where(residual < 0, 0.0, residual), target


@triton.jit
def _is_accepted(logit, kept_logit, number, temperature, best, total, kept_best, kept_total, threshold):
    of_target = _probability(logit.to(tl.float32), temperature, best, total, threshold)
    of_draft = _probability(kept_logit.to(tl.float32), temperature, kept_best, kept_total, -float("inf"))
    return (of_draft > 0) & (number * of_draft < of_target)


@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "rows_ptr", "starts_ptr"])
def _sum_residuals(
    logits_ptr, kept_ptr, positions_ptr, drafts_ptr, rows_ptr, starts_ptr, temperature_ptr, seed_ptr, threshold_ptr,
    tile_max_ptr, tile_sum_ptr, kept_max_ptr, kept_sum_ptr, residual_ptr, whole_ptr,
    accept_purpose: tl.constexpr, truncates: tl.constexpr, vocab: tl.constexpr, stride: tl.constexpr,
    tile: tl.constexpr, num_tiles: tl.constexpr, all_tiles: tl.constexpr, max_num_drafts: tl.constexpr,
):  # fmt: skip
    slot, number = tl.program_id(0), tl.program_id(1)
    index, row, draft, token, temperature = _find_draft(
        slot, drafts_ptr, rows_ptr, starts_ptr, temperature_ptr, max_num_drafts
    )
    if token >= 0:
        best, total = _total_of(tile_max_ptr, tile_sum_ptr, index, temperature, num_tiles, all_tiles)
        kept_best, kept_total = _total_of(kept_max_ptr, kept_sum_ptr, draft, temperature, num_tiles, all_tiles)
        threshold = -float("inf")
        if truncates:
            threshold = tl.load(threshold_ptr + index)
        logits, kept = logits_ptr + index.to(tl.int64) * stride, kept_ptr + draft * vocab
        coin = uniform_of(tl.load(seed_ptr + row), tl.load(positions_ptr + index), accept_purpose)
        of_token, of_draft = tl.load(logits + token), tl.load(kept + token)
        if not _is_accepted(of_token, of_draft, coin, temperature, best, total, kept_best, kept_total, threshold):
            place = number * tile + tl.arange(0, tile)
            residual, whole = _load_residual(
                logits, kept, place, temperature, best, total, kept_best, kept_total, threshold, vocab
            )
            tl.store(residual_ptr + slot * num_tiles + number, tl.sum(residual, 0))
            tl.store(whole_ptr + slot * num_tiles + number, tl.sum(whole, 0))


@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "rows_ptr", "starts_ptr", "token_ids_ptr"])
def _replace(
    logits_ptr, kept_ptr, positions_ptr, drafts_ptr, rows_ptr, starts_ptr, temperature_ptr, seed_ptr, threshold_ptr,
    tile_max_ptr, tile_sum_ptr, kept_max_ptr, kept_sum_ptr, residual_ptr, whole_ptr, token_ids_ptr,
    accept_purpose: tl.constexpr, resample_purpose: tl.constexpr, truncates: tl.constexpr, vocab: tl.constexpr,
    stride: tl.constexpr, tile: tl.constexpr, num_tiles: tl.constexpr, all_tiles: tl.constexpr,
    max_num_drafts: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0)
    index, row, draft, token, temperature = _find_draft(
        slot, drafts_ptr, rows_ptr, starts_ptr, temperature_ptr, max_num_drafts
    )
    if token >= 0:
        best, total = _total_of(tile_max_ptr, tile_sum_ptr, index, temperature, num_tiles, all_tiles)
        kept_best, kept_total = _total_of(kept_max_ptr, kept_sum_ptr, draft, temperature, num_tiles, all_tiles)
        threshold = -float("inf")
        if truncates:
            threshold = tl.load(threshold_ptr + index)
        logits, kept = logits_ptr + index.to(tl.int64) * stride, kept_ptr + draft * vocab
        seed, position = tl.load(seed_ptr + row), tl.load(positions_ptr + index)
        coin = uniform_of(seed, position, accept_purpose)
        of_token, of_draft = tl.load(logits + token), tl.load(kept + token)
        if not _is_accepted(of_token, of_draft, coin, temperature, best, total, kept_best, kept_total, threshold):
            numbers = tl.arange(0, all_tiles)
            source, is_tile = slot * num_tiles + numbers, numbers < num_tiles
            sums = tl.load(residual_ptr + source, mask=is_tile, other=0.0)
            # Except for rounding, nothing remains if the distributions are equal or the drafter's is NaN.
            has_residual = tl.sum(sums, 0) > 0
            sums = tl.where(has_residual, sums, tl.load(whole_ptr + source, mask=is_tile, other=0.0))
            cdf = tl.cumsum(sums, 0)
            mass = tl.max(cdf, 0)
            goal = uniform_of(seed, position, resample_purpose) * mass
            goal = tl.minimum(goal, mass * (1.0 - 1.0 / 9007199254740992.0))
            number = first_above(cdf, sums, goal, all_tiles)
            before = tl.max(tl.where(numbers < number, cdf, 0.0), 0)
            place = number * tile + tl.arange(0, tile)
            residual, whole = _load_residual(
                logits, kept, place, temperature, best, total, kept_best, kept_total, threshold, vocab
            )
            masses = tl.where(has_residual, residual, whole)
            token = (number * tile + first_above(tl.cumsum(masses, 0), masses, goal - before, tile)).to(tl.int64)
        tl.store(token_ids_ptr + index, token)
