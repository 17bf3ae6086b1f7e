"""Chooses the attention kernel of a step, its tiles and its memory.

An `AttentionPlanner` is created once per engine, with the workspace of the largest step. It makes the plan of a step,
or of a captured graph, from data on the CPU: the number of requests, and the maximum number of queries and context
length of each. A plan is data: launches with one plan have one grid, whatever the lengths on the device. The constants
are the only tuning parameters. Fast plans choose tile and split by batch and context, so a row's bits may differ
between batch sizes, and between prefill and decode. A deterministic planner has one tile, one number of warps and one
split for all plans: a row's bits are the same in prefill, chunks, decode and verification
(`penstock.kernels.triton.attention.tiles` explains why).

Workspace: 4 * (value_dim + 2) bytes for every split of every row that decode can have, `workspace_bytes` in all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton

from penstock.kernels.triton.capabilities import Capabilities
from penstock.utils.errors import ConfigError

MAX_DECODE_QUERY_LEN = 8
_MAX_HEAD_DIM, _MAX_GROUP, _MIN_BLOCK_SIZE = 256, 16, 16
_MAX_LATENT_DIM = 512
_MIN_TMA_BLOCK_SIZE = 64  # below this, boxes are too small to be faster than copies of 16 bytes
# More splits than this cost more to merge than they gain: a deterministic split grows with max_model_len.
_MAX_DETERMINISTIC_SPLITS = 64


@dataclass(frozen=True, slots=True)
class AttentionShape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    latent_value_dim: int = 0  # of latents, whose values are the last elements of keys; 0: values have their own plane

    @property
    def value_dim(self) -> int:
        return self.latent_value_dim or self.head_dim

    @property
    def group(self) -> int:
        """Query heads of one tile."""
        return heads_of_tile(self.num_heads // self.num_kv_heads, self.latent_value_dim > 0)


def heads_of_tile(sharing: int, is_latent: bool) -> int:
    """Returns how many of the `sharing` query heads of a KV head are in one tile: all, or of latents, which far more
    heads share, the largest number that divides them.
    """
    if not is_latent:
        return sharing
    return next(count for count in range(min(sharing, _MAX_GROUP), 0, -1) if sharing % count == 0)


@dataclass(frozen=True, slots=True)
class AttentionLimits:
    max_num_reqs: int
    max_model_len: int
    max_decode_query_len: int = 1  # 1 + K with K draft tokens


@dataclass(frozen=True, slots=True)
class PrefillTile:
    rows: int  # queries x heads of a program
    keys: int
    warps: int
    stages: int
    split: int = 0  # 0: a row is computed without splits
    use_tma: bool = False


@dataclass(frozen=True, slots=True)
class DecodeTile:
    rows: int  # of a program, padding included
    row_tiles: int  # programs for the rows of one request and KV head
    merge_rows: int  # maximum number of a program's rows that exist, rounded up to a power of two
    max_query_len: int
    keys: int
    split: int
    max_splits: int
    warps: int
    stages: int
    use_tma: bool = False
    merges: bool = True  # the last program of a request merges; else a separate kernel
    pdl: bool = False


@dataclass(frozen=True, slots=True)
class Workspace:
    """The workspace of one stream: overlapping launches would share it."""

    parts: torch.Tensor  # [rows * max_splits * value_dim] float32
    stats: torch.Tensor  # [rows * max_splits * 2] float32: running maximum and sum
    counters: torch.Tensor  # [max_num_reqs * row_tiles * num_heads / group] int32, zero between launches


@dataclass(frozen=True, slots=True)
class Operands:
    """What every attention kernel reads and writes besides its queries."""

    kv_cache: torch.Tensor  # [num_blocks, 2, Hkv, block_size, D], or of latents with one plane
    value_dim: int  # V: D, or less of latents
    group: int  # query heads of a tile
    box: object  # a TensorDescriptor of the cache's rows, or the cache where the tile has no use_tma
    block_table: torch.Tensor  # [R, max_blocks] int32
    query_start_loc: torch.Tensor  # [R + 1] int32
    seq_lens: torch.Tensor  # [R] int32
    scale: float  # times log2(e)
    sliding_window: int
    softcap: float
    sinks: torch.Tensor | None  # [Hq] float32
    out: torch.Tensor  # [T, Hq * V], written


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    tile: PrefillTile | DecodeTile
    workspace: Workspace
    deterministic: bool


@dataclass(frozen=True, slots=True)
class _Choice:
    """The choice of split and tile, up to a number of requests and a context length."""

    max_num_reqs: int
    max_seq_len: int
    split: int
    keys: int
    warps: int
    stages: int
    use_tma: bool = False  # if a tile of keys lies in one block


@dataclass(frozen=True, slots=True)
class _Tuning:
    """Tuning for heads of one size and dtype."""

    prefill: PrefillTile
    decode: tuple[_Choice, ...]  # the first that fits
    deterministic: _Choice
    max_decode_rows: int = 32


_ANY = 1 << 30
_NARROW = _Tuning(  # 16 bits, up to 128 wide
    prefill=PrefillTile(rows=64, keys=64, warps=4, stages=3),
    decode=(
        _Choice(8, 1024, split=64, keys=64, warps=4, stages=2),
        _Choice(8, 8192, split=128, keys=32, warps=1, stages=3),
        _Choice(_ANY, _ANY, split=512, keys=16, warps=1, stages=3),
    ),
    deterministic=_Choice(_ANY, _ANY, split=128, keys=16, warps=1, stages=4),
)
_WIDE = _Tuning(  # 16 bits, up to 256 wide
    prefill=PrefillTile(rows=128, keys=32, warps=8, stages=2),
    decode=(_Choice(_ANY, _ANY, split=256, keys=32, warps=4, stages=2),),
    deterministic=_Choice(_ANY, _ANY, split=128, keys=32, warps=4, stages=2),
    max_decode_rows=16,
)
_FLOAT32 = _Tuning(  # without tensor cores, for tests
    prefill=PrefillTile(rows=16, keys=16, warps=4, stages=2),
    decode=(_Choice(_ANY, _ANY, split=256, keys=16, warps=4, stages=2),),
    deterministic=_Choice(_ANY, _ANY, split=128, keys=16, warps=4, stages=2),
    max_decode_rows=16,
)
_LATENT = _Tuning(  # 16 bits, latents; not measured
    prefill=PrefillTile(rows=32, keys=32, warps=8, stages=2),
    decode=(_Choice(_ANY, _ANY, split=256, keys=32, warps=4, stages=2),),
    deterministic=_Choice(_ANY, _ANY, split=128, keys=32, warps=8, stages=2),
    max_decode_rows=16,
)
_DETERMINISTIC_ROWS = 16


class AttentionPlanner:
    """Raises ConfigError for shapes that the kernels do not support."""

    def __init__(
        self,
        shape: AttentionShape,
        limits: AttentionLimits,
        device: torch.device | str,
        deterministic: bool = False,
        merges: bool = True,
        capabilities: Capabilities = Capabilities(),  # noqa: B008 - it is frozen
    ) -> None:
        _check(shape, limits)
        self._shape, self._limits, self._deterministic = shape, limits, deterministic
        self._merges, self._capabilities = merges, capabilities
        self._tuning = _tuning(shape)
        _, row_tiles = self._rows(limits.max_decode_query_len)
        parts = max(self._num_parts(choice) for choice in self._choices())
        self._workspace = Workspace(
            torch.empty(parts * shape.value_dim, dtype=torch.float32, device=device),
            torch.empty(parts * 2, dtype=torch.float32, device=device),
            torch.zeros(
                limits.max_num_reqs * row_tiles * (shape.num_heads // shape.group), dtype=torch.int32, device=device
            ),
        )

    @property
    def workspace_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self._workspace.parts, self._workspace.stats, self._workspace.counters))

    def plan(self, num_reqs: int, max_query_len: int, max_seq_len: int) -> AttentionPlan:
        """Returns the plan of a step with `num_reqs` requests and upper bounds of their numbers of queries and
        seq_lens. A step with at most `max_decode_query_len` queries per request is planned as decode.
        """
        limits = self._limits
        assert 0 < max_seq_len <= limits.max_model_len, f"{max_seq_len} positions of {limits.max_model_len}"
        if max_query_len > limits.max_decode_query_len:
            return AttentionPlan(self._prefill_tile(), self._workspace, self._deterministic)
        assert 0 < num_reqs <= limits.max_num_reqs, f"{num_reqs} requests of {limits.max_num_reqs}"
        return AttentionPlan(
            self._decode_tile(num_reqs, max_query_len, max_seq_len), self._workspace, self._deterministic
        )

    def _prefill_tile(self) -> PrefillTile:
        if self._deterministic:
            choice = self._choices()[0]
            return PrefillTile(_DETERMINISTIC_ROWS, choice.keys, choice.warps, choice.stages, choice.split)
        tile = self._tuning.prefill
        use_tma = self._has_boxes(tile.keys) and self._shape.block_size >= _MIN_TMA_BLOCK_SIZE
        return replace(tile, use_tma=use_tma and self._tuning is not _FLOAT32)

    def _decode_tile(self, num_reqs: int, max_query_len: int, max_seq_len: int) -> DecodeTile:
        choice = next(c for c in self._choices() if num_reqs <= c.max_num_reqs and max_seq_len <= c.max_seq_len)
        rows, row_tiles = self._rows(max_query_len)
        merge_rows = min(triton.next_power_of_2(max_query_len * self._shape.group), rows)
        return DecodeTile(
            rows=rows,
            row_tiles=row_tiles,
            merge_rows=merge_rows,
            max_query_len=max_query_len,
            keys=choice.keys,
            split=choice.split,
            max_splits=triton.cdiv(max_seq_len, choice.split),
            warps=choice.warps if self._deterministic else max(choice.warps, _min_warps(merge_rows)),
            stages=choice.stages,
            use_tma=choice.use_tma and self._has_boxes(choice.keys),
            merges=self._merges,
            pdl=self._capabilities.pdl,
        )

    def _choices(self) -> tuple[_Choice, ...]:
        if not self._deterministic:
            return self._tuning.decode
        choice = self._tuning.deterministic
        longest = triton.next_power_of_2(triton.cdiv(self._limits.max_model_len, _MAX_DETERMINISTIC_SPLITS))
        return (replace(choice, split=max(choice.split, longest)),)

    def _rows(self, max_query_len: int) -> tuple[int, int]:
        """(rows of a tile, tiles) for the queries of one request and KV head."""
        needed = max_query_len * self._shape.group
        rows = 16 if needed <= 16 or self._deterministic else self._tuning.max_decode_rows
        return rows, triton.cdiv(needed, rows)

    def _has_boxes(self, keys: int) -> bool:
        """Whether a tile of this many keys lies in one block, as a box that TMA can load."""
        shape = self._shape
        is_box = shape.head_dim == triton.next_power_of_2(shape.head_dim) and not shape.latent_value_dim
        return self._capabilities.tma and shape.block_size >= keys and is_box

    def _num_parts(self, choice: _Choice) -> int:
        """Returns the maximum number of row states in the workspace: one for every row and split."""
        limits = self._limits
        requests = min(choice.max_num_reqs, limits.max_num_reqs)
        splits = triton.cdiv(min(choice.max_seq_len, limits.max_model_len), choice.split)
        return requests * limits.max_decode_query_len * self._shape.num_heads * splits


def _tuning(shape: AttentionShape) -> _Tuning:
    if shape.dtype == torch.float32:
        return _FLOAT32
    if shape.latent_value_dim:
        return _LATENT
    return _NARROW if shape.head_dim <= 128 else _WIDE


def _min_warps(rows: int) -> int:
    """Returns the minimum number of warps: with fewer, normed and rotated rows spill registers."""
    if rows <= 4:
        return 1
    return 2 if rows <= 16 else 4


def _check(shape: AttentionShape, limits: AttentionLimits) -> None:
    if shape.block_size < _MIN_BLOCK_SIZE or shape.block_size & (shape.block_size - 1):
        raise ConfigError(f"block_size is {shape.block_size}; on a GPU it is a power of two, {_MIN_BLOCK_SIZE} or more")
    if shape.latent_value_dim:
        rotated = shape.head_dim - shape.latent_value_dim
        if shape.latent_value_dim % 16 or shape.latent_value_dim > _MAX_LATENT_DIM or not 0 < rotated <= _MAX_HEAD_DIM:
            raise ConfigError(
                f"kv_lora_rank is {shape.latent_value_dim} and qk_rope_head_dim is {rotated}; on a GPU the first is a "
                f"multiple of 16 up to {_MAX_LATENT_DIM}, the second at most {_MAX_HEAD_DIM}"
            )
    elif shape.head_dim % 16 or not 0 < shape.head_dim <= _MAX_HEAD_DIM:
        raise ConfigError(f"head_dim is {shape.head_dim}; on a GPU it is a multiple of 16 up to {_MAX_HEAD_DIM}")
    if shape.num_heads % shape.num_kv_heads or shape.group > _MAX_GROUP:
        raise ConfigError(
            f"num_attention_heads is {shape.num_heads} for {shape.num_kv_heads} num_key_value_heads; "
            f"on a GPU up to {_MAX_GROUP} heads share a KV head"
        )
    if not 0 < limits.max_decode_query_len <= MAX_DECODE_QUERY_LEN:
        raise ConfigError(
            f"num_speculative_tokens is {limits.max_decode_query_len - 1}; on a GPU it is below {MAX_DECODE_QUERY_LEN}"
        )
