"""Low-rank adapters (Hu et al. 2021, arXiv:2106.09685) of a linear layer, a different one for every row or none.

Shapes: T tokens, K inputs, N outputs, R ranks. To the output of a layer, in the model's dtype, is added

    out = round(out + up (scale (down x)))

All sums are float32, and down x and its multiple are not rounded. The inputs are added in four sums, input k to sum
k % 4; the ranks in their order. A row's result depends on the row and its adapter alone, however many rows there are
and whatever adapters the others have. The torch reference adds in another order.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from penstock.kernels.native import DTYPE_CODES, NativeLibrary, library, num_threads
from penstock.messages.adapters import NO_SLOT
from penstock.utils.math import cdiv, round_up

_LANES, _MOST_RANKS = 16, 8 * 512  # of the native kernel, the second of all projections of a layer
_BLOCK_NUMBERS = 3  # of int64 in its `Block`
_MOST_ROWS = 8  # that the native kernel computes together


class _Adapter(ctypes.Structure):
    """`Adapter` in native/lora.cpp."""

    _fields_ = (
        ("down", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("up", ctypes.c_void_p),
        ("blocks", ctypes.c_void_p),
        ("ranks", ctypes.c_int64),
    )


class _Site(ctypes.Structure):
    """`Site` in native/lora.cpp."""

    _fields_ = (
        ("adapters", ctypes.c_void_p),
        ("groups", ctypes.c_void_p),
        ("inputs", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
    )


class _Groups(ctypes.Structure):
    """`Groups` in native/lora.cpp."""

    _fields_ = (
        ("count", ctypes.c_int64),
        ("starts", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
    )


class RowSlots:
    """The slot of the adapter of every row of a step, in memory that does not move.

    The rows of one adapter are computed together, so that its weights are read once for several of them.
    """

    def __init__(self, max_num_rows: int) -> None:
        self.num_rows = 0
        self.slots = np.full(max_num_rows, NO_SLOT, dtype=np.int32)
        self._rows = np.zeros(max_num_rows, dtype=np.int32)  # those with adapters, by slot
        self._starts = np.zeros(max_num_rows + 1, dtype=np.int32)  # of groups of rows with one slot
        self._group_slots = np.zeros(max_num_rows, dtype=np.int32)
        arrays = self._starts, self._rows, self._group_slots
        self._groups = _Groups(0, *(array.ctypes.data for array in arrays))
        self.address = ctypes.addressof(self._groups)

    def set(self, slots: np.ndarray) -> None:
        """Sets those of the first rows, [T] int32."""
        self.num_rows = len(slots)
        self.slots[: len(slots)] = slots
        rows = np.flatnonzero(slots != NO_SLOT)
        rows = rows[np.argsort(slots[rows], kind="stable")]
        self._groups.count = 0
        if not len(rows):
            return
        # If all have one adapter, every thread has the same number of groups.
        size = cdiv(len(rows), round_up(cdiv(len(rows), _MOST_ROWS), num_threads()))
        of_rows = slots[rows]
        firsts = np.flatnonzero(np.diff(of_rows, prepend=NO_SLOT))  # where another slot begins
        lengths = np.diff(firsts, append=len(rows))
        starts = [
            at for first, length in zip(firsts, lengths, strict=True) for at in range(first, first + length, size)
        ]
        count = len(starts)
        self._rows[: len(rows)] = rows
        self._starts[: count + 1] = [*starts, len(rows)]
        self._group_slots[:count] = of_rows[starts]
        self._groups.count = count


@dataclass(frozen=True, slots=True)
class LowRank:
    """An adapter's addition to one projection."""

    down: torch.Tensor  # [rank, K]
    up: torch.Tensor  # [own outputs, rank]
    scale: float


class LoraLayer:
    """The adapters of one layer, each in a slot. The layer may have several projections, one after another."""

    def __init__(
        self,
        rows: RowSlots,
        num_slots: int,
        num_inputs: int,
        sizes: Sequence[int],
        order: torch.Tensor | None = None,
        library: Callable[[], NativeLibrary | None] = library,
    ) -> None:
        """`sizes` are the outputs of the projections, and `order` the one in which the layer has them, if another.
        `library` is as for `PackedLinear`.
        """
        owner = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
        self._order = torch.arange(len(owner)) if order is None else order.cpu()
        self._owner = owner[self._order].numpy()  # [N]: the projection of an output
        self._sizes = tuple(sizes)
        self._rows = rows
        self._num_inputs = num_inputs
        self._parts: list[Sequence[LowRank | None]] = [()] * num_slots
        native = library()
        self._run = native.function("lora", "pppnni") if native is not None else None
        self._adapters = (_Adapter * num_slots)()
        address = ctypes.addressof(self._adapters)
        self._site = _Site(address, rows.address, num_inputs, len(self._order))
        self._address = ctypes.addressof(self._site)
        # The first and the last projection of each block of outputs. The last block is filled with its own one's.
        num_blocks = cdiv(len(self._order), _LANES)
        padded = np.pad(self._owner, (0, num_blocks * _LANES - len(self._owner)), mode="edge")
        owners = padded.reshape(num_blocks, _LANES)
        self._block_owners = owners.min(1), owners.max(1)
        # What the adapters in the slots point to.
        self._memory: list[tuple[torch.Tensor | np.ndarray, ...]] = [()] * num_slots

    def load(self, slot: int, parts: Sequence[LowRank | None], dtype: torch.dtype) -> None:
        """Replaces a slot's adapter; `parts` are its additions to the projections, None where it has none."""
        assert len(parts) == len(self._sizes), (len(parts), self._sizes)
        self.clear(slot)
        if not any(parts):
            return
        parts = [
            None if part is None else LowRank(part.down.to(dtype), part.up.to(dtype), part.scale) for part in parts
        ]
        if self._run is None:
            self._parts[slot] = parts
        else:
            self._pack(slot, parts, dtype)

    def slot_bytes(self, rank: int, dtype: torch.dtype) -> int:
        """Returns the memory of an adapter that has this rank in all projections."""
        first, last = self._block_owners
        num_ranks = round_up(rank * len(self._sizes), _LANES)
        num_weights = self._num_inputs * num_ranks + _LANES * rank * int((last - first + 1).sum())
        return dtype.itemsize * num_weights + 4 * num_ranks + 8 * _BLOCK_NUMBERS * len(first)

    def clear(self, slot: int) -> None:
        """Leaves a slot without an adapter."""
        self._adapters[slot] = _Adapter()
        self._parts[slot] = self._memory[slot] = ()

    def add(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Adds to `out` [T, N], the layer's output, what the rows' adapters make of `x` [T, K]."""
        assert x.dtype == out.dtype and out.is_contiguous() and x.stride(1) == 1, (x.dtype, out.dtype, out.stride())
        assert len(x) >= self._rows.num_rows, f"{len(x)} rows and slots of {self._rows.num_rows}"
        if self._run is None:
            self._add_reference(x, out)
            return
        self._run(self._address, x.data_ptr(), out.data_ptr(), x.stride(0), num_threads(), DTYPE_CODES[x.dtype])

    def _pack(self, slot: int, parts: Sequence[LowRank | None], dtype: torch.dtype) -> None:
        ranks = [0 if part is None else len(part.down) for part in parts]
        starts = [0, *itertools.accumulate(ranks)]
        total, padded = starts[-1], round_up(starts[-1], _LANES)
        assert padded <= _MOST_RANKS, f"ranks of {ranks}"
        down = torch.zeros((self._num_inputs, padded), dtype=dtype)
        scales = torch.zeros(padded)
        for start, part in zip(starts, parts, strict=False):
            if part is not None:
                end = start + len(part.down)
                down[:, start:end], scales[start:end] = part.down.T, part.scale
        blocks, up = self._pack_up(parts, starts, total, dtype)
        self._memory[slot] = (down, scales, up, blocks)
        self._adapters[slot] = _Adapter(down.data_ptr(), scales.data_ptr(), up.data_ptr(), blocks.ctypes.data, padded)

    def _pack_up(
        self, parts: Sequence[LowRank | None], starts: Sequence[int], total: int, dtype: torch.dtype
    ) -> tuple[np.ndarray, torch.Tensor]:
        """Returns the blocks' first and last ranks and their places, [blocks, 3] int64, and the weights there."""
        up = torch.zeros((sum(self._sizes), total), dtype=dtype)
        first_row = 0
        for size, start, part in zip(self._sizes, starts, parts, strict=False):
            if part is not None:
                up[first_row : first_row + size, start : start + len(part.down)] = part.up
            first_row += size
        num_blocks = cdiv(len(self._order), _LANES)
        whole = torch.zeros((num_blocks * _LANES, total), dtype=dtype)
        whole[: len(self._order)] = up[self._order]
        bounds, (first_owners, last_owners) = np.asarray(starts), self._block_owners
        blocks = np.zeros((num_blocks, _BLOCK_NUMBERS), np.int64)
        blocks[:, 0], blocks[:, 1] = bounds[first_owners], bounds[last_owners + 1]
        sizes = (blocks[:, 1] - blocks[:, 0]) * _LANES
        blocks[1:, 2] = np.cumsum(sizes)[:-1]
        packed: list[torch.Tensor] = []
        tiles, begin = whole.view(num_blocks, _LANES, total), 0
        for (first, end), run in itertools.groupby(map(tuple, blocks[:, :2].tolist())):
            count = len(list(run))
            packed.append(tiles[begin : begin + count, :, first:end].transpose(1, 2).reshape(-1))
            begin += count
        return blocks, torch.cat(packed)

    def _add_reference(self, x: torch.Tensor, out: torch.Tensor) -> None:
        for row, slot in enumerate(self._rows.slots[: self._rows.num_rows].tolist()):
            parts = self._parts[slot] if slot != NO_SLOT else ()
            if not parts:
                continue
            added = torch.cat(
                [
                    torch.zeros(size) if part is None else _apply(part, x[row].float())
                    for size, part in zip(self._sizes, parts, strict=True)
                ]
            )
            out[row] = (out[row].float() + added[self._order]).to(out.dtype)


def _apply(part: LowRank, x: torch.Tensor) -> torch.Tensor:
    """[K] float32 -> [N] float32. Products are summed by row, so that no result depends on another one."""
    inner = (part.down.float() * x).sum(1) * part.scale
    return (part.up.float() * inner).sum(1)
