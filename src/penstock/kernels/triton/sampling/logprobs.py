"""Log probabilities of chosen tokens, their ranks and the most likely tokens, without a softmax of the vocabulary.

    logsumexp   max + log(sum over tiles of tile_sum * exp(tile_max - max)), merged in float64 in the order of the tiles
    logprob     logit - logsumexp
    rank        1 + the number of larger logits

The distribution is the model's own, without temperature. `_measure_tiles` reads the logits once. The k most likely
tokens are in tiles whose maximum is among the k largest maxima, and none of them is below the smallest of these:
`_collect_top` extracts the few logits above it from each tile, in descending order. `_merge_tiles` does the same with
the results of all tiles of a row. Logit and token are combined into one integer, so that among equal logits the first
token comes first:

    key   int64: the logit's bits in float32's order, then ones' complement of the token

A row's bits depend only on that row; for a row without log probabilities each of these programs ends at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from penstock.kernels.triton.sampling.tiles import TILE, TILE_WARPS, key_of, load_tile, mass_of, padded_tiles, value_of
from penstock.messages.sampling_params import MAX_LOGPROBS

_MERGE_WARPS = 4
_SLOTS = triton.next_power_of_2(MAX_LOGPROBS)  # maximum number of keys stored by a tile
RECORD = 3 + 2 * MAX_LOGPROBS
"""The number of 4-byte values in a row's record: the chosen token's log probability (float32), its rank and the token,
then the MAX_LOGPROBS most likely tokens, and their log probabilities (float32).
"""


@dataclass(frozen=True, slots=True)
class LogprobsWorkspace:
    """Scratch memory of one scoring at a time."""

    tile_max: torch.Tensor  # [max_rows, num_tiles] float32
    tile_sum: torch.Tensor  # [max_rows, num_tiles] float32: of exponents
    tile_count: torch.Tensor  # [max_rows, num_tiles] int32: logits above the chosen one
    num_keys: torch.Tensor  # [max_rows, num_tiles] int32
    keys: torch.Tensor  # [max_rows, num_tiles, _SLOTS] int64, descending

    @classmethod
    def allocate(cls, max_rows: int, vocab_size: int, device: torch.device) -> LogprobsWorkspace:
        """For up to `max_rows` rows of `vocab_size` logits: 272 bytes per tile for each of them."""
        num_tiles = triton.cdiv(vocab_size, TILE)

        def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.empty((max_rows, num_tiles, *shape), dtype=dtype, device=device)

        return cls(
            tile_max=empty(torch.float32),
            tile_sum=empty(torch.float32),
            tile_count=empty(torch.int32),
            num_keys=empty(torch.int32),
            keys=empty(torch.int64, _SLOTS),
        )


def score_tokens(
    logits: torch.Tensor,  # [n, vocab_size] float32, bfloat16 or float16
    rows: torch.Tensor,  # [n] int64: rows of `num_top`; -1 is padding
    num_top: torch.Tensor,  # [rows, 1] int32: likeliest tokens wanted, at most MAX_LOGPROBS; -1: no record
    chosen: torch.Tensor,  # [n] int64: tokens of the vocabulary
    workspace: LogprobsWorkspace,
    has_top: bool,  # whether any of these rows needs the most likely tokens
    records: torch.Tensor,  # [n, RECORD] int32, written as far as a row requests
) -> None:
    """Computes `penstock.runner.sampling.logprobs` of the chosen tokens."""
    num_rows, vocab_size = logits.shape
    max_rows, num_tiles = workspace.tile_max.shape
    assert rows.shape == chosen.shape == (num_rows,) and logits.stride(1) == 1, f"{chosen.shape} for {logits.shape}"
    assert records.shape == (num_rows, RECORD) and records.is_contiguous(), f"{records.shape} {records.stride()}"
    assert num_rows <= max_rows and num_tiles == triton.cdiv(vocab_size, TILE), f"{max_rows} rows for {logits.shape}"
    wanted, shape = (rows, num_top), (vocab_size, logits.stride(0))
    tiles = (workspace.tile_max, workspace.tile_sum, workspace.tile_count)
    keys = (workspace.num_keys, workspace.keys)
    grid, padded = (num_rows, num_tiles), padded_tiles(num_tiles)
    _measure_tiles[grid](logits, *wanted, chosen, *tiles, *shape, TILE, num_warps=TILE_WARPS)
    if has_top:
        _collect_top[grid](
            logits, *wanted, tiles[0], *keys, *shape, TILE, num_tiles, padded, _SLOTS, num_warps=TILE_WARPS
        )
    _merge_tiles[(num_rows,)](
        logits, *wanted, chosen, *tiles, *keys, records, *shape, num_tiles, padded, _SLOTS, MAX_LOGPROBS,
        num_warps=_MERGE_WARPS,
    )  # fmt: skip


@triton.jit
def _wanted(index, rows_ptr, num_top_ptr):
    row = tl.load(rows_ptr + index)
    return tl.load(num_top_ptr + row, mask=row >= 0, other=-1)


@triton.jit(do_not_specialize_on_alignment=["rows_ptr", "num_top_ptr", "chosen_ptr"])
def _measure_tiles(
    logits_ptr, rows_ptr, num_top_ptr, chosen_ptr, tile_max_ptr, tile_sum_ptr, tile_count_ptr,
    vocab: tl.constexpr, stride: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    index, number = tl.program_id(0), tl.program_id(1)
    if _wanted(index, rows_ptr, num_top_ptr) >= 0:
        of_chosen = tl.load(logits_ptr + index.to(tl.int64) * stride + tl.load(chosen_ptr + index)).to(tl.float32)
        logits = load_tile(logits_ptr, index, number, vocab, stride, tile)
        best = tl.max(logits, 0)
        target = index * tl.num_programs(1) + number
        # A NaN of the model must propagate to the sum: all log probabilities of its row are then NaN.
        has_nan = tl.max((logits != logits).to(tl.int32), 0) > 0
        total = tl.sum(mass_of(logits, best, -float("inf")), 0)
        tl.store(tile_max_ptr + target, best)
        tl.store(tile_sum_ptr + target, tl.where(has_nan, float("nan"), total))
        tl.store(tile_count_ptr + target, tl.sum((logits > of_chosen).to(tl.int32), 0))


@triton.jit(do_not_specialize_on_alignment=["rows_ptr", "num_top_ptr"])
def _collect_top(
    logits_ptr, rows_ptr, num_top_ptr, tile_max_ptr, num_keys_ptr, keys_ptr,
    vocab: tl.constexpr, stride: tl.constexpr, tile: tl.constexpr, num_tiles: tl.constexpr, all_tiles: tl.constexpr,
    slots: tl.constexpr,
):  # fmt: skip
    index, number = tl.program_id(0), tl.program_id(1)
    wanted = _wanted(index, rows_ptr, num_top_ptr)
    if wanted > 0:
        numbers = tl.arange(0, all_tiles)
        maxima = tl.load(tile_max_ptr + index * num_tiles + numbers, mask=numbers < num_tiles, other=-float("inf"))
        num_larger = tl.sum((maxima[None, :] >= maxima[:, None]).to(tl.int32), 1)
        bound = tl.max(tl.where(num_larger >= wanted, maxima, -float("inf")), 0)
        logits = load_tile(logits_ptr, index, number, vocab, stride, tile)
        token = number * tile + tl.arange(0, tile)
        key = (key_of(logits) << 32) | (4294967295 - token.to(tl.int64))
        nothing = tl.full([tile], -(2**63), tl.int64)
        key = tl.where((token < vocab) & (logits >= bound), key, nothing)
        target = (index.to(tl.int64) * num_tiles + number) * slots
        count = tl.zeros_like(wanted)
        best = tl.max(key, 0)
        while (count < wanted) & (best > -(2**63)):
            tl.store(keys_ptr + target + count, best)
            key = tl.where(key == best, nothing, key)
            best = tl.max(key, 0)
            count += 1
        tl.store(num_keys_ptr + index * num_tiles + number, count)


@triton.jit(do_not_specialize_on_alignment=["rows_ptr", "num_top_ptr", "chosen_ptr", "records_ptr"])
def _merge_tiles(
    logits_ptr, rows_ptr, num_top_ptr, chosen_ptr, tile_max_ptr, tile_sum_ptr, tile_count_ptr, num_keys_ptr, keys_ptr,
    records_ptr,
    vocab: tl.constexpr, stride: tl.constexpr, num_tiles: tl.constexpr, all_tiles: tl.constexpr, slots: tl.constexpr,
    max_top: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    wanted = _wanted(index, rows_ptr, num_top_ptr)
    if wanted >= 0:
        number = tl.arange(0, all_tiles)
        source, is_tile = index * num_tiles + number, number < num_tiles
        maxima = tl.load(tile_max_ptr + source, mask=is_tile, other=-float("inf"))
        sums = tl.load(tile_sum_ptr + source, mask=is_tile, other=0.0)
        counts = tl.load(tile_count_ptr + source, mask=is_tile, other=0)
        best = tl.max(maxima, 0)
        scales = tl.where(maxima > -float("inf"), tl.exp(maxima - best), 0.0)
        total = tl.sum(sums.to(tl.float64) * scales, 0)
        logsumexp = best + tl.log(total).to(tl.float32)
        chosen = tl.load(chosen_ptr + index)
        of_chosen = tl.load(logits_ptr + index.to(tl.int64) * stride + chosen).to(tl.float32)
        record = records_ptr + index * (3 + 2 * max_top)
        tl.store(record, (of_chosen - logsumexp).to(tl.int32, bitcast=True))
        tl.store(record + 1, tl.sum(counts, 0) + 1)
        tl.store(record + 2, chosen.to(tl.int32))
        if wanted > 0:
            slot = tl.arange(0, slots)
            num_keys = tl.load(num_keys_ptr + source, mask=is_tile, other=0)
            is_key = slot[None, :] < num_keys[:, None]
            nothing = tl.full([all_tiles, slots], -(2**63), tl.int64)
            places = source[:, None].to(tl.int64) * slots + slot[None, :]
            key = tl.load(keys_ptr + places, mask=is_key, other=0)
            key = tl.where(is_key, key, nothing)
            count = tl.zeros_like(wanted)
            while count < wanted:
                largest = tl.max(tl.max(key, 1), 0)
                token = 4294967295 - (largest & 4294967295)
                tl.store(record + 3 + count, token.to(tl.int32))
                logprob = value_of(largest >> 32) - logsumexp
                tl.store(record + 3 + max_top + count, logprob.to(tl.int32, bitcast=True))
                key = tl.where(key == largest, nothing, key)
                count += 1
