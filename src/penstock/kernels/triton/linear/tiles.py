"""The sizes of tiles, all in one place: by role, number of tokens and weight.

A tile of a product is `rows` of the weight by `tokens` of the input, processed along K in steps of `depth`; K may be
divided into `split` parts whose sums are added by the program that finishes last. `stages` is the number of steps that
are loaded at a time.

The values were measured on an H200 with `bench/gpu_tune.py` and the shapes of Qwen3-0.6B and 8B in bfloat16; those
marked with * are unmeasured guesses.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

import triton

MAX_TOKENS = 64
BUCKETS = (1, 16, 32, 64)  # the numbers of tokens that tiles are chosen for: the smallest that fits the batch

_LARGE = 24 << 20  # bytes of a weight from which it is read once rather than by two tiles of 32 tokens *
_LONG = 4096  # elements of a row that exceed what one token's tile holds at once


class Role(Enum):
    QKV = "qkv"
    OUT = "out"
    GATE_UP = "gate_up"  # two tiles of `rows`, the gate's and the up's
    DOWN = "down"
    HEAD = "head"


@dataclass(frozen=True, slots=True)
class Tile:
    rows: int
    tokens: int
    depth: int
    warps: int
    stages: int = 1
    split: int = 1
    early: bool = True  # whether tensor cores' first step of the weight is read before the inputs are complete

    def __str__(self) -> str:
        split = f"/{self.split}" if self.split > 1 else ""
        late = "" if self.early else " late"
        return f"{self.rows}x{self.tokens}x{self.depth}{split} w{self.warps} s{self.stages}{late}"


# One token, without tensor cores. Two stages if a program has its processor to itself.
_GEMV = {
    Role.QKV: Tile(8, 1, 1024, 4, stages=2),
    Role.OUT: Tile(4, 1, 2048, 4, stages=2),
    Role.GATE_UP: Tile(8, 1, 1024, 4, stages=2),
    Role.DOWN: Tile(8, 1, 2048, 8, stages=2),
    Role.HEAD: Tile(8, 1, 512, 4),
}
# Smaller steps for long rows, so that two programs share a processor and the end of one overlaps the other's reads.
# Products that end in a residual are 4 % faster with half the rows, but the next one then reads more sums of squares.
_GEMV_LONG = {
    Role.QKV: Tile(16, 1, 512, 4, stages=2),
    Role.OUT: Tile(4, 1, 512, 4, stages=2),
    Role.GATE_UP: Tile(8, 1, 512, 2),
    Role.DOWN: Tile(8, 1, 512, 8, stages=2),
    Role.HEAD: Tile(16, 1, 512, 2),
}

# Up to 16 tokens: one tile of tokens, the narrowest that tensor cores have for weights on their long side.
_GEMM_16 = {
    Role.QKV: Tile(64, 16, 128, 4, stages=6, early=False),
    Role.OUT: Tile(64, 16, 128, 4, stages=6, split=4, early=False),
    Role.GATE_UP: Tile(64, 16, 128, 4, stages=5, early=False),
    Role.DOWN: Tile(64, 16, 128, 4, stages=6, split=4, early=False),
    Role.HEAD: Tile(64, 16, 128, 4, stages=3, early=False),
}
_GEMM_16_LARGE = _GEMM_16 | dict.fromkeys((Role.OUT, Role.DOWN), Tile(64, 16, 128, 4, stages=4, split=4))
# Up to 64: two tiles of 32 tokens beat one of 64 for small weights, because twice as many programs read them.
_GEMM_64 = {role: replace(tile, tokens=32) for role, tile in _GEMM_16.items()}
_GEMM_32_LARGE = _GEMM_64 | dict.fromkeys((Role.OUT, Role.DOWN), Tile(64, 32, 128, 4, stages=6))  # *
_GEMM_64_LARGE = {
    Role.QKV: Tile(64, 64, 128, 4, stages=5, early=False),
    Role.OUT: Tile(64, 64, 128, 4, stages=6, early=False),
    Role.GATE_UP: Tile(64, 64, 64, 4, stages=3, early=False),
    Role.DOWN: Tile(64, 64, 128, 4, stages=4, split=2, early=False),
    Role.HEAD: Tile(128, 64, 128, 4, stages=4, early=False),
}
# By bucket: the tiles of most weights, and of large ones.
_GEMM = {16: (_GEMM_16, _GEMM_16_LARGE), 32: (_GEMM_64, _GEMM_32_LARGE), 64: (_GEMM_64, _GEMM_64_LARGE)}

# Used by every product of `matmul`, of any size. *
MATMUL = Tile(128, 64, 64, 4, stages=4)
# Used by the products of experts, of any number of rows. *
GROUPED = Tile(64, 32, 64, 4, stages=3)


def choose(role: Role, bucket: int, shape: tuple[int, int], itemsize: int) -> Tile:
    """Returns the tile for a weight of `shape` [N, K] with elements of `itemsize` bytes and at most `bucket` tokens."""
    n, k = shape
    if bucket == 1:
        tile = (_GEMV_LONG if k >= _LONG else _GEMV)[role]
        return replace(tile, depth=min(tile.depth, triton.next_power_of_2(k)))
    tile = _fit(_GEMM[bucket][n * k * itemsize > _LARGE][role], k, itemsize)
    # Parts of a split have equal length, and are long enough that adding them takes less time than the product.
    steps = triton.cdiv(k, tile.depth)
    return tile if steps % tile.split == 0 and steps >= 4 * tile.split else replace(tile, split=1)


def fixed(k: int, itemsize: int) -> Tile:
    """Returns the tile of `matmul` for a weight of K = `k`; it must not depend on anything else."""
    return _fit(MATMUL, k, itemsize)


def grouped(k: int, itemsize: int) -> Tile:
    """Returns the tile of the products of experts for weights of K = `k`; it must not depend on anything else."""
    return _fit(GROUPED, k, itemsize)


def _fit(tile: Tile, k: int, itemsize: int) -> Tile:
    """Less depth for a short K, and for float32, which tensor cores do not multiply directly."""
    depth = min(tile.depth, max(triton.next_power_of_2(k), 16))
    if itemsize == 2:
        return replace(tile, depth=depth)
    return replace(tile, depth=min(depth, 32), warps=8, stages=2, early=False)
