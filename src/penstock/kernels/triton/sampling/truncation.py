"""top_k, top_p and min_p as a threshold per row: a logit / temperature below it is never sampled.

The rules and their order are those of `penstock.runner.sampling.truncation`: min_p, then top_k of the remaining tokens,
then top_p of those, each keeping values equal to its threshold.

    min_p     the row's maximum + log(min_p)
    top_k     the largest value that at least k logits reach
    top_p     the largest value above which at least top_p of the remaining mass lies

`_measure_cuts` counts, per tile, the logits above a few cuts below the row's maximum, and their mass. The highest cut
that certainly leaves enough of them bounds the candidates. `_collect` packs these, in the vocabulary's order and
without atomics, because the counts determine each tile's position. `_select`, one program per row, holds the candidates
in registers and bisects over the bits of float32, which finds the thresholds exactly. If the candidates do not fit (a
flat distribution), it bisects over the row itself, which is slower but equally exact.

Counts are integers; masses are added in a fixed order. A row's threshold therefore depends only on that row. For rows
without top_k and top_p each of these programs ends at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from penstock.kernels.triton.sampling.tiles import (
    CAPACITY,
    NUM_CUTS,
    TILE,
    TILE_WARPS,
    SamplingTables,
    Workspace,
    best_of_row,
    check_logits,
    key_of,
    load_tile,
    mass_of,
    padded_tiles,
    value_of,
)

_SMALL = 1024  # most rows have at most this many candidates
_SELECT_WARPS = 8


def find_thresholds(logits: torch.Tensor, rows: torch.Tensor, tables: SamplingTables, workspace: Workspace) -> None:
    """Fills `workspace.threshold` of each row of `logits` [n, vocab_size]; reads the maxima of its tiles there.

    `rows` [n] int64 are state rows. Greedy rows, padding and rows that are not finite get minus infinity.
    """
    check_logits(logits, rows, workspace)
    num_rows, vocab_size = logits.shape
    num_tiles = workspace.tile_max.shape[1]
    params = (rows, tables.temperature, tables.top_k, tables.top_p, tables.log_min_p)
    cuts = (workspace.cut_count, workspace.cut_sum)
    candidates = (workspace.num_candidates, workspace.candidates)
    shape = (vocab_size, logits.stride(0), TILE, num_tiles, padded_tiles(num_tiles), NUM_CUTS)
    grid = (num_rows, num_tiles)
    _measure_cuts[grid](logits, *params, workspace.tile_max, *cuts, *shape, num_warps=TILE_WARPS)
    _collect[grid](logits, *params, workspace.tile_max, *cuts, *candidates, *shape, CAPACITY, num_warps=TILE_WARPS)
    _select[(num_rows,)](
        logits, *params, workspace.tile_max, cuts[1], *candidates, workspace.threshold, *shape, CAPACITY, _SMALL,
        num_warps=_SELECT_WARPS,
    )  # fmt: skip


@triton.jit
def _cut(number, scaled_max, floor, temperature, top_k):
    """Distances are 1 to 18.5: of logits for top_k, of their exponents for mass. Programs that compute a cut separately
    must get the same one: the polynomial's values are exact.
    """
    distance = 1.0 + 0.25 * number * (number + 3.0)
    distance = tl.where(top_k > 0, tl.div_rn(distance, temperature), distance)
    return tl.maximum(scaled_max - distance, floor)


@triton.jit
def _load_params(index, rows_ptr, temperature_ptr, top_k_ptr, top_p_ptr, log_min_p_ptr, vocab: tl.constexpr):
    """(temperature, top_k, top_p, log_min_p) of a row; temperature 0 for padding, top_k 0 where it keeps all."""
    row = tl.load(rows_ptr + index)
    temperature = tl.load(temperature_ptr + row, mask=row >= 0, other=0.0)
    top_k = tl.load(top_k_ptr + row, mask=row >= 0, other=0)
    top_p = tl.load(top_p_ptr + row, mask=row >= 0, other=1.0)
    log_min_p = tl.load(log_min_p_ptr + row, mask=row >= 0, other=-float("inf"))
    temperature = tl.where(temperature > 0, tl.maximum(temperature, 1e-6), 0.0)
    return temperature, tl.where(top_k < vocab, top_k, 0), top_p, log_min_p


@triton.jit(do_not_specialize_on_alignment=["rows_ptr"])
def _measure_cuts(
    logits_ptr, rows_ptr, temperature_ptr, top_k_ptr, top_p_ptr, log_min_p_ptr, tile_max_ptr, cut_count_ptr,
    cut_sum_ptr,
    vocab: tl.constexpr, stride: tl.constexpr, tile: tl.constexpr, num_tiles: tl.constexpr, all_tiles: tl.constexpr,
    num_cuts: tl.constexpr,
):  # fmt: skip
    index, number = tl.program_id(0), tl.program_id(1)
    temperature, top_k, top_p, log_min_p = _load_params(
        index, rows_ptr, temperature_ptr, top_k_ptr, top_p_ptr, log_min_p_ptr, vocab
    )
    if (temperature > 0) & ((top_k > 0) | (top_p < 1)):
        _, best, _, verdict = best_of_row(tile_max_ptr, index, num_tiles, all_tiles)
        if verdict == 0:
            scaled_max = tl.div_rn(best, temperature)
            floor = scaled_max + log_min_p
            scaled = tl.div_rn(load_tile(logits_ptr, index, number, vocab, stride, tile), temperature)
            masses = mass_of(scaled, scaled_max, floor)
            counts = cut_count_ptr + (index * num_tiles + number) * num_cuts
            sums = cut_sum_ptr + (index * num_tiles + number) * (num_cuts + 1)
            for cut_number in tl.static_range(num_cuts):
                cut = _cut(tl.full([], cut_number, tl.float32), scaled_max, floor, temperature, top_k)
                is_above = scaled >= cut
                tl.store(counts + cut_number, tl.sum(is_above.to(tl.int32), 0))
                tl.store(sums + cut_number, tl.sum(tl.where(is_above, masses, 0.0), 0))
            tl.store(sums + num_cuts, tl.sum(masses, 0))


@triton.jit(do_not_specialize_on_alignment=["rows_ptr"])
def _collect(
    logits_ptr, rows_ptr, temperature_ptr, top_k_ptr, top_p_ptr, log_min_p_ptr, tile_max_ptr, cut_count_ptr,
    cut_sum_ptr, num_candidates_ptr, candidates_ptr,
    vocab: tl.constexpr, stride: tl.constexpr, tile: tl.constexpr, num_tiles: tl.constexpr, all_tiles: tl.constexpr,
    num_cuts: tl.constexpr, capacity: tl.constexpr,
):  # fmt: skip
    index, number = tl.program_id(0), tl.program_id(1)
    temperature, top_k, top_p, log_min_p = _load_params(
        index, rows_ptr, temperature_ptr, top_k_ptr, top_p_ptr, log_min_p_ptr, vocab
    )
    if (temperature > 0) & ((top_k > 0) | (top_p < 1)):
        _, best, _, verdict = best_of_row(tile_max_ptr, index, num_tiles, all_tiles)
        if verdict == 0:
            scaled_max = tl.div_rn(best, temperature)
            floor = scaled_max + log_min_p
            numbers = tl.arange(0, all_tiles)
            cut_numbers = tl.arange(0, num_cuts)
            is_tile = numbers[:, None] < num_tiles
            tile_counts = cut_count_ptr + (index * num_tiles + numbers[:, None]) * num_cuts + cut_numbers[None, :]
            tile_sums = cut_sum_ptr + (index * num_tiles + numbers[:, None]) * (num_cuts + 1) + cut_numbers[None, :]
            counts = tl.load(tile_counts, mask=is_tile, other=0)
            count = tl.sum(counts, 0)
            mass = tl.sum(tl.load(tile_sums, mask=is_tile, other=0.0).to(tl.float64), 0)
            total = _total_mass(cut_sum_ptr, index, num_tiles, all_tiles, num_cuts)
            cuts = _cut(cut_numbers.to(tl.float32), scaled_max, floor, temperature, top_k)
            # The margin covers the rounding of either sum.
            has_mass = mass >= top_p.to(tl.float64) * total * 1.00001
            is_enough = tl.where(top_k > 0, count >= top_k, has_mass) | (cuts <= floor)
            chosen = tl.min(tl.where(is_enough & (count <= capacity), cut_numbers, num_cuts), 0)
            if number == 0:
                found = tl.sum(tl.where(cut_numbers == chosen, count, 0), 0)
                tl.store(num_candidates_ptr + index, tl.where(chosen < num_cuts, found, -1))
            above_cut = tl.sum(tl.where(cut_numbers[None, :] == chosen, counts, 0), 1)
            if tl.sum(tl.where(numbers == number, above_cut, 0), 0) > 0:
                start = tl.sum(tl.where(numbers < number, above_cut, 0), 0)
                cut = tl.max(tl.where(cut_numbers == chosen, cuts, -float("inf")), 0)
                scaled = tl.div_rn(load_tile(logits_ptr, index, number, vocab, stride, tile), temperature)
                is_above = scaled >= cut
                place = start + tl.cumsum(is_above.to(tl.int32), 0) - 1
                tl.store(candidates_ptr + index.to(tl.int64) * capacity + place, scaled, mask=is_above)


@triton.jit(do_not_specialize_on_alignment=["rows_ptr"])
def _select(
    logits_ptr, rows_ptr, temperature_ptr, top_k_ptr, top_p_ptr, log_min_p_ptr, tile_max_ptr, cut_sum_ptr,
    num_candidates_ptr, candidates_ptr, threshold_ptr,
    vocab: tl.constexpr, stride: tl.constexpr, tile: tl.constexpr, num_tiles: tl.constexpr, all_tiles: tl.constexpr,
    num_cuts: tl.constexpr, capacity: tl.constexpr, small: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    temperature, top_k, top_p, log_min_p = _load_params(
        index, rows_ptr, temperature_ptr, top_k_ptr, top_p_ptr, log_min_p_ptr, vocab
    )
    threshold = -float("inf")
    if temperature > 0:
        _, best, _, verdict = best_of_row(tile_max_ptr, index, num_tiles, all_tiles)
        if verdict == 0:
            scaled_max = tl.div_rn(best, temperature)
            threshold = scaled_max + log_min_p
            if (top_k > 0) | (top_p < 1):
                count = tl.load(num_candidates_ptr + index)
                total = _total_mass(cut_sum_ptr, index, num_tiles, all_tiles, num_cuts)
                logits = logits_ptr + index.to(tl.int64) * stride
                source = candidates_ptr + index.to(tl.int64) * capacity
                if count < 0:
                    threshold = _bisect_row(
                        logits, temperature, scaled_max, threshold, top_k, top_p, total, vocab, tile
                    )
                elif count <= small:
                    threshold = _bisect_candidates(source, count, scaled_max, threshold, top_k, top_p, total, small)
                else:
                    threshold = _bisect_candidates(source, count, scaled_max, threshold, top_k, top_p, total, capacity)
    tl.store(threshold_ptr + index, threshold)


@triton.jit
def _total_mass(cut_sum_ptr, index, num_tiles: tl.constexpr, all_tiles: tl.constexpr, num_cuts: tl.constexpr):
    numbers = tl.arange(0, all_tiles)
    place = (index * num_tiles + numbers) * (num_cuts + 1) + num_cuts
    return tl.sum(tl.load(cut_sum_ptr + place, mask=numbers < num_tiles, other=0.0).to(tl.float64), 0)


@triton.jit
def _bisect_candidates(source, count, scaled_max, floor, top_k, top_p, total, size: tl.constexpr):
    place = tl.arange(0, size)
    values = tl.load(source + place, mask=place < count, other=-float("inf"))
    threshold = floor
    if top_k > 0:
        low, high = _search_range(floor, scaled_max)
        while high - low > 1:
            middle = low + (high - low) // 2
            is_enough = tl.sum((values >= value_of(middle)).to(tl.int32), 0) >= top_k
            low, high = tl.where(is_enough, middle, low), tl.where(is_enough, high, middle)
        threshold = value_of(low)
    if top_p < 1:
        masses = mass_of(values, scaled_max, threshold).to(tl.float64)
        if top_k > 0:
            total = tl.sum(masses, 0)
        low, high = _search_range(threshold, scaled_max)
        while high - low > 1:
            middle = low + (high - low) // 2
            above = tl.sum(tl.where(values >= value_of(middle), masses, 0.0), 0)
            is_enough = above >= top_p.to(tl.float64) * total
            low, high = tl.where(is_enough, middle, low), tl.where(is_enough, high, middle)
        threshold = value_of(low)
    return threshold


@triton.jit
def _bisect_row(logits, temperature, scaled_max, floor, top_k, top_p, total, vocab: tl.constexpr, tile: tl.constexpr):
    threshold = floor
    if top_k > 0:
        low, high = _search_range(floor, scaled_max)
        while high - low > 1:
            middle = low + (high - low) // 2
            above, _ = _measure_row(logits, temperature, scaled_max, value_of(middle), vocab, tile)
            is_enough = above >= top_k
            low, high = tl.where(is_enough, middle, low), tl.where(is_enough, high, middle)
        threshold = value_of(low)
        _, total = _measure_row(logits, temperature, scaled_max, threshold, vocab, tile)
    if top_p < 1:
        low, high = _search_range(threshold, scaled_max)
        while high - low > 1:
            middle = low + (high - low) // 2
            _, mass = _measure_row(logits, temperature, scaled_max, value_of(middle), vocab, tile)
            is_enough = mass >= top_p.to(tl.float64) * total
            low, high = tl.where(is_enough, middle, low), tl.where(is_enough, high, middle)
        threshold = value_of(low)
    return threshold


@triton.jit
def _measure_row(logits, temperature, scaled_max, value, vocab: tl.constexpr, tile: tl.constexpr):
    """Returns (count, mass) of the logits that are at least `value`."""
    place = tl.arange(0, tile)
    count = tl.zeros([tile], tl.int32)
    mass = tl.zeros([tile], tl.float64)
    for start in range(0, vocab, tile):
        tile_logits = tl.load(logits + start + place, mask=start + place < vocab, other=-float("inf"))
        scaled = tl.div_rn(tile_logits.to(tl.float32), temperature)
        count += ((scaled >= value) & (start + place < vocab)).to(tl.int32)
        mass += mass_of(scaled, scaled_max, value)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def _search_range(floor, scaled_max):
    """Returns keys (int64) between which a threshold lies: every logit reaches the first, none the second."""
    return key_of(floor), key_of(scaled_max) + 1
