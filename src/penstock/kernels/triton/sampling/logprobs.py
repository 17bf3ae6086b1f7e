"""Log probabilities of chosen tokens and their ranks, without a softmax of the vocabulary.

    logsumexp   max + log(sum over tiles of tile_sum * exp(tile_max - max)), merged in float64 in the order of the tiles
    logprob     logit - logsumexp
    rank        1 + the number of larger logits

Of the model's own distribution: no temperature. A row's bits depend on that row alone. The likeliest tokens are left to
`torch.topk` of the logits; less logsumexp, they are log probabilities too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from penstock.kernels.triton.sampling.tiles import TILE, TILE_WARPS, load_tile, mass_of, padded_tiles

_MERGE_WARPS = 1
_TILE_DTYPES = (torch.float32, torch.float32, torch.int32)  # of a tile: maximum, sum of exponents, larger logits


@dataclass(frozen=True, slots=True)
class ChosenLogprobs:
    logsumexp: torch.Tensor  # [n] float32
    logprobs: torch.Tensor  # [n] float32: of the chosen tokens
    ranks: torch.Tensor  # [n] int64: 1 for the likeliest token


def chosen_logprobs(
    logits: torch.Tensor,  # [n, vocab_size] float32, bfloat16 or float16
    chosen: torch.Tensor,  # [n] int64: tokens of the vocabulary
) -> ChosenLogprobs:
    """What `penstock.runner.sampling.logprobs` says of the chosen tokens."""
    num_rows, vocab_size = logits.shape
    assert chosen.shape == (num_rows,) and logits.stride(1) == 1, f"{chosen.shape} for {logits.shape} logits"
    num_tiles = triton.cdiv(vocab_size, TILE)
    tiles = [logits.new_empty((num_rows, num_tiles), dtype=dtype) for dtype in _TILE_DTYPES]
    logsumexp, logprobs = (logits.new_empty(num_rows, dtype=torch.float32) for _ in range(2))
    ranks = torch.empty_like(chosen)
    shape = (vocab_size, logits.stride(0))
    _measure_tiles[(num_rows, num_tiles)](logits, chosen, *tiles, *shape, TILE, num_warps=TILE_WARPS)
    _merge_tiles[(num_rows,)](
        logits,
        chosen,
        *tiles,
        logsumexp,
        logprobs,
        ranks,
        *shape,
        num_tiles,
        padded_tiles(num_tiles),
        num_warps=_MERGE_WARPS,
    )
    return ChosenLogprobs(logsumexp, logprobs, ranks)


@triton.jit(do_not_specialize_on_alignment=["chosen_ptr"])
def _measure_tiles(
    logits_ptr,
    chosen_ptr,
    tile_max_ptr,
    tile_sum_ptr,
    tile_count_ptr,
    vocab: tl.constexpr,
    stride: tl.constexpr,
    tile: tl.constexpr,
):
    index, number = tl.program_id(0), tl.program_id(1)
    of_chosen = tl.load(logits_ptr + index.to(tl.int64) * stride + tl.load(chosen_ptr + index)).to(tl.float32)
    logits = load_tile(logits_ptr, index, number, vocab, stride, tile)
    best = tl.max(logits, 0)
    target = index * tl.num_programs(1) + number
    # A NaN must show in the sum: it is the model's, and no log probability of its row is a number.
    has_nan = tl.max((logits != logits).to(tl.int32), 0) > 0
    total = tl.sum(mass_of(logits, best, -float("inf")), 0)
    tl.store(tile_max_ptr + target, best)
    tl.store(tile_sum_ptr + target, tl.where(has_nan, float("nan"), total))
    tl.store(tile_count_ptr + target, tl.sum((logits > of_chosen).to(tl.int32), 0))


@triton.jit(do_not_specialize_on_alignment=["chosen_ptr"])
def _merge_tiles(
    logits_ptr,
    chosen_ptr,
    tile_max_ptr,
    tile_sum_ptr,
    tile_count_ptr,
    logsumexp_ptr,
    logprobs_ptr,
    ranks_ptr,
    vocab: tl.constexpr,
    stride: tl.constexpr,
    num_tiles: tl.constexpr,
    all_tiles: tl.constexpr,
):
    index = tl.program_id(0)
    number = tl.arange(0, all_tiles)
    source, is_tile = index * num_tiles + number, number < num_tiles
    maxima = tl.load(tile_max_ptr + source, mask=is_tile, other=-float("inf"))
    sums = tl.load(tile_sum_ptr + source, mask=is_tile, other=0.0)
    counts = tl.load(tile_count_ptr + source, mask=is_tile, other=0)
    best = tl.max(maxima, 0)
    scales = tl.where(maxima > -float("inf"), tl.exp(maxima - best), 0.0)
    total = tl.sum(sums.to(tl.float64) * scales, 0)
    logsumexp = best + tl.log(total).to(tl.float32)
    of_chosen = tl.load(logits_ptr + index.to(tl.int64) * stride + tl.load(chosen_ptr + index)).to(tl.float32)
    tl.store(logsumexp_ptr + index, logsumexp)
    tl.store(logprobs_ptr + index, of_chosen - logsumexp)
    tl.store(ranks_ptr + index, tl.sum(counts.to(tl.int64), 0) + 1)
