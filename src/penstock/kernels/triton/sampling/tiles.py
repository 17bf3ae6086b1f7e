"""The division of a row of logits among programs, and the data that they exchange."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

TILE = 4096  # logits per program; it affects the result, because a tile's sum is rounded
TILE_WARPS = 4
CAPACITY = 8192  # candidates of a truncated row that one program can hold
NUM_CUTS = 8  # points at which a truncated row's distribution is measured


@dataclass(frozen=True, slots=True)
class SamplingTables:
    """Sampling parameters by state row, each [max_num_reqs] or [max_num_reqs, 1]."""

    temperature: torch.Tensor  # float32; 0 is greedy
    top_k: torch.Tensor  # int32; 0 keeps all
    top_p: torch.Tensor  # float32; 1 keeps all
    log_min_p: torch.Tensor  # float32; minus infinity keeps all
    seed: torch.Tensor  # int64: the bits of a 64-bit seed


@dataclass(frozen=True, slots=True)
class Workspace:
    """Scratch memory of one sampling at a time; keeps no state between steps."""

    tile_max: torch.Tensor  # [max_rows, num_tiles] float32: NaN where the tile holds one
    tile_best: torch.Tensor  # [max_rows, num_tiles] int32: the first token of tile_max
    tile_sum: torch.Tensor  # [max_rows, num_tiles] float32: of exp((logit - tile_max) / temperature) over kept tokens
    threshold: torch.Tensor  # [max_rows] float32: logits / temperature below it are not drawn
    cut_count: torch.Tensor  # [max_rows, num_tiles, NUM_CUTS] int32: logits above each cut
    cut_sum: torch.Tensor  # [max_rows, num_tiles, NUM_CUTS + 1] float32: their mass, and that of the tile
    num_candidates: torch.Tensor  # [max_rows] int32: -1 where they do not fit
    candidates: (
        torch.Tensor
    )  # [max_rows, CAPACITY] float32: the largest logits / temperature, in the vocabulary's order

    @classmethod
    def allocate(cls, max_rows: int, vocab_size: int, device: torch.device) -> Workspace:
        """For up to `max_rows` rows of `vocab_size` logits: 32 KiB and 84 bytes per tile for each of them."""
        num_tiles = triton.cdiv(vocab_size, TILE)

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty((max_rows, *shape), dtype=dtype, device=device)

        return cls(
            tile_max=empty(num_tiles),
            tile_best=empty(num_tiles, dtype=torch.int32),
            tile_sum=empty(num_tiles),
            threshold=empty(),
            cut_count=empty(num_tiles, NUM_CUTS, dtype=torch.int32),
            cut_sum=empty(num_tiles, NUM_CUTS + 1),
            num_candidates=empty(dtype=torch.int32),
            candidates=empty(CAPACITY),
        )


def padded_tiles(num_tiles: int) -> int:
    """Returns how many tiles' results a program that merges a row loads at once."""
    return max(triton.next_power_of_2(num_tiles), 16)


def check_logits(logits: torch.Tensor, rows: torch.Tensor, workspace: Workspace) -> None:
    num_rows, vocab_size = logits.shape
    assert rows.shape == (num_rows,) and rows.dtype == torch.int64, f"{rows.shape} {rows.dtype} for {num_rows} rows"
    assert logits.stride(1) == 1, f"logits have strides {logits.stride()}"
    max_rows, num_tiles = workspace.tile_max.shape
    assert num_rows <= max_rows and num_tiles == triton.cdiv(vocab_size, TILE), (
        f"a workspace of {max_rows} rows and {num_tiles} tiles for {tuple(logits.shape)} logits"
    )


@triton.jit
def load_tile(logits_ptr, index, number, vocab: tl.constexpr, stride: tl.constexpr, tile: tl.constexpr):
    """Returns a tile of logits, [tile] float32, with minus infinity beyond the vocabulary."""
    place = number * tile + tl.arange(0, tile)
    return tl.load(logits_ptr + index.to(tl.int64) * stride + place, mask=place < vocab, other=-float("inf")).to(
        tl.float32
    )


@triton.jit
def mass_of(scaled, scaled_max, threshold):
    """Returns exp(scaled - scaled_max), and 0 below the threshold, for NaN, or if all tokens are forbidden."""
    is_kept = (scaled >= threshold) & (scaled > -float("inf"))
    return tl.where(is_kept, tl.exp(scaled - scaled_max), 0.0)


@triton.jit
def best_of_row(tile_max_ptr, index, num_tiles: tl.constexpr, all_tiles: tl.constexpr):
    """(maxima [all_tiles], the row's maximum, its first tile, the row's verdict as `draw.sample` writes it)."""
    place = tl.arange(0, all_tiles)
    maxima = tl.load(tile_max_ptr + index * num_tiles + place, mask=place < num_tiles, other=-float("inf"))
    has_nan = tl.max((maxima != maxima).to(tl.int32), 0) > 0
    maxima = tl.where(maxima == maxima, maxima, -float("inf"))
    best, number = tl.max(maxima, 0, return_indices=True)
    verdict = tl.where(has_nan | (best == float("inf")), 1, tl.where(best == -float("inf"), 2, 0))
    return maxima, best, number, verdict


@triton.jit
def key_of(value):
    """int64 that is ordered as float32 values are."""
    bits = value.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def value_of(key):
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
