"""Samples tokens from logits, greedy and random rows in one launch.

    best      the first token of the largest logit
    random    inversion: the first token whose cumulative probability, in the order of the vocabulary, exceeds the
              number determined by (seed, position, purpose), as in `penstock.runner.cpu.sampler.draw`

`_reduce_tiles` reads the logits once, in their dtype, and stores the maximum of each tile, its position, and the sum of
exp((logit - maximum) / temperature). `_pick_token`, one program per row, scales the sums to the row's maximum, finds
the tile by their cumulative sum in float64 and the token within that tile alone. No probability is ever stored. For
truncated rows, the tiles' sums are recomputed above the threshold found by `truncation`.

A row's token depends only on that row: tiles are fixed, and they are merged in order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from penstock.kernels.triton.sampling.noise import uniform_of
from penstock.kernels.triton.sampling.tiles import (
    TILE,
    TILE_WARPS,
    SamplingTables,
    Workspace,
    best_of_row,
    check_logits,
    load_tile,
    mass_of,
    padded_tiles,
)
from penstock.kernels.triton.sampling.truncation import find_thresholds

_PICK_WARPS = 8


def sample(
    logits: torch.Tensor,  # [n, vocab_size] float32, bfloat16 or float16, unchanged
    rows: torch.Tensor,  # [n] int64: state rows; -1 is padding and gets token 0
    positions: torch.Tensor,  # [n] int64: the sampled token's position
    tables: SamplingTables,
    workspace: Workspace,
    purpose: int,
    truncates: bool,  # whether any row may have top_k, top_p or min_p; otherwise they are ignored
    token_ids: torch.Tensor,  # [n] int64, written
    verdicts: torch.Tensor,  # [n] int8, written: 0, or 1 and 2 as below
) -> None:
    """One token per row. If nothing can be sampled it is an arbitrary token, and the verdict gives the reason: 1 the
    logits are not finite, 2 all of them are minus infinity.
    """
    check_logits(logits, rows, workspace)
    num_rows, vocab_size = logits.shape
    num_tiles = workspace.tile_max.shape[1]
    assert positions.shape == token_ids.shape == verdicts.shape == (num_rows,), f"{positions.shape} {token_ids.shape}"
    grid, shape = (num_rows, num_tiles), (vocab_size, logits.stride(0), TILE)
    found = (workspace.tile_max, workspace.tile_best, workspace.tile_sum)
    _reduce_tiles[grid](logits, rows, tables.temperature, *found, *shape, num_warps=TILE_WARPS)
    if truncates:
        find_thresholds(logits, rows, tables, workspace)
        _sum_kept[grid](
            logits, rows, tables.temperature, workspace.threshold, found[0], found[2], *shape, num_warps=TILE_WARPS
        )
    _pick_token[(num_rows,)](
        logits, rows, positions, tables.temperature, tables.seed, workspace.threshold, *found, token_ids, verdicts,
        purpose, truncates, *shape, num_tiles, padded_tiles(num_tiles),
        num_warps=_PICK_WARPS,
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["rows_ptr"])
def _reduce_tiles(
    logits_ptr, rows_ptr, temperature_ptr, tile_max_ptr, tile_best_ptr, tile_sum_ptr,
    vocab: tl.constexpr, stride: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    index, number = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows_ptr + index)
    if row >= 0:
        logits = load_tile(logits_ptr, index, number, vocab, stride, tile)
        is_nan = logits != logits
        best, place = tl.max(tl.where(is_nan, -float("inf"), logits), 0, return_indices=True)
        has_nan = tl.max(is_nan.to(tl.int32), 0) > 0
        target = index * tl.num_programs(1) + number
        tl.store(tile_max_ptr + target, tl.where(has_nan, float("nan"), best))
        tl.store(tile_best_ptr + target, number * tile + place)
        temperature = tl.load(temperature_ptr + row)
        if temperature > 0:
            temperature = tl.maximum(temperature, 1e-6)
            masses = mass_of(tl.div_rn(logits, temperature), tl.div_rn(best, temperature), -float("inf"))
            tl.store(tile_sum_ptr + target, tl.sum(masses, 0))


@triton.jit(do_not_specialize_on_alignment=["rows_ptr"])
def _sum_kept(
    logits_ptr, rows_ptr, temperature_ptr, threshold_ptr, tile_max_ptr, tile_sum_ptr,
    vocab: tl.constexpr, stride: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    index, number = tl.program_id(0), tl.program_id(1)
    threshold = tl.load(threshold_ptr + index)
    if threshold > -float("inf"):
        target = index * tl.num_programs(1) + number
        temperature = tl.maximum(tl.load(temperature_ptr + tl.load(rows_ptr + index)), 1e-6)
        scaled_max = tl.div_rn(tl.load(tile_max_ptr + target), temperature)
        if scaled_max >= threshold:
            scaled = tl.div_rn(load_tile(logits_ptr, index, number, vocab, stride, tile), temperature)
            tl.store(tile_sum_ptr + target, tl.sum(mass_of(scaled, scaled_max, threshold), 0))
        else:
            tl.store(tile_sum_ptr + target, 0.0)


@triton.jit(do_not_specialize_on_alignment=["rows_ptr", "positions_ptr", "token_ids_ptr", "verdicts_ptr"])
def _pick_token(
    logits_ptr, rows_ptr, positions_ptr, temperature_ptr, seed_ptr, threshold_ptr, tile_max_ptr, tile_best_ptr,
    tile_sum_ptr, token_ids_ptr, verdicts_ptr,
    purpose: tl.constexpr, truncates: tl.constexpr, vocab: tl.constexpr, stride: tl.constexpr, tile: tl.constexpr,
    num_tiles: tl.constexpr, all_tiles: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    row = tl.load(rows_ptr + index)
    if row < 0:
        tl.store(token_ids_ptr + index, 0)
        tl.store(verdicts_ptr + index, 0)
    else:
        maxima, best, number, verdict = best_of_row(tile_max_ptr, index, num_tiles, all_tiles)
        tl.store(verdicts_ptr + index, verdict.to(tl.int8))
        token = tl.load(tile_best_ptr + index * num_tiles + number)
        temperature = tl.load(temperature_ptr + row)
        if (temperature > 0) & (verdict == 0):
            temperature = tl.maximum(temperature, 1e-6)
            threshold = -float("inf")
            if truncates:
                threshold = tl.load(threshold_ptr + index)
            noise = uniform_of(tl.load(seed_ptr + row), tl.load(positions_ptr + index), purpose)
            numbers = tl.arange(0, all_tiles)
            sums = tl.load(tile_sum_ptr + index * num_tiles + numbers, mask=numbers < num_tiles, other=0.0)
            scales = tl.exp(tl.div_rn(maxima, temperature) - tl.div_rn(best, temperature)).to(tl.float64)
            masses = sums.to(tl.float64) * scales
            cdf = tl.cumsum(masses, 0)
            total = tl.max(cdf, 0)
            # Rounding must not raise the target to the total, which no token exceeds.
            target = tl.minimum(noise * total, total * (1.0 - 1.0 / 9007199254740992.0))
            number = first_above(cdf, masses, target, all_tiles)
            before = tl.max(tl.where(numbers < number, cdf, 0.0), 0)
            is_chosen = numbers == number
            scale = tl.sum(tl.where(is_chosen, scales, 0.0), 0)
            scaled_max = tl.div_rn(tl.max(tl.where(is_chosen, maxima, -float("inf")), 0), temperature)
            scaled = tl.div_rn(load_tile(logits_ptr, index, number, vocab, stride, tile), temperature)
            inner = mass_of(scaled, scaled_max, threshold).to(tl.float64)
            token = number * tile + first_above(tl.cumsum(inner, 0), inner, (target - before) / scale, tile)
        tl.store(token_ids_ptr + index, token.to(tl.int64))


@triton.jit
def first_above(cdf, masses, target, count: tl.constexpr):
    """Returns the first position whose cumulative mass exceeds the target, or the last one with any mass: by rounding,
    the sum from which the target was computed may exceed the sum of its parts.
    """
    place = tl.arange(0, count)
    has_mass = masses > 0
    first = tl.min(tl.where(has_mass & (cdf > target), place, count), 0)
    last = tl.max(tl.where(has_mass, place, 0), 0)
    return tl.minimum(first, last)
