"""Applies all of a step's changes of tables on the device in one copy and one launch, for any number of tables.

`StagedWrites` packs writes into one int64 array of pairs on the CPU; `scatter_staged` applies a copy of it. A pair is

    key     address of the element, which is a multiple of its size; bit 0 tells 8 bytes from 4. 0: nothing to write
    value   the element's bits, those of a 4-byte one in the lower half

so tables need no registration, their dtypes may be mixed, and a buffer padded with zeros may be copied whole: with a
buffer of a fixed length both steps can live in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

_BLOCK = 256
_WARPS = 2
_IS_WIDE = 1

_PACKED = {  # dtype of a table -> the dtype in which its values are made, and the one as which their bits are read
    torch.int64: (np.int64, np.int64),
    torch.int32: (np.int32, np.int32),
    torch.float32: (np.float32, np.int32),
}


class StagedWrites:
    """The pending writes of one step. Two writes to one element within a step may be applied in either order."""

    def __init__(self, capacity: int = 1024) -> None:
        self._pairs = np.zeros((capacity, 2), dtype=np.int64)
        self._count = 0

    def write(self, table: torch.Tensor, row: int, start: int, values: Sequence[int] | Sequence[float]) -> None:
        """Stages `table[row, start : start + len(values)] = values`.

        `table` is [rows, width] int32, int64 or float32, contiguous, and stays where it is until the writes are
        applied.
        """
        rows, width = table.shape
        assert 0 <= row < rows and 0 <= start <= start + len(values) <= width, (row, start, len(values), table.shape)
        assert table.is_contiguous(), f"table has strides {table.stride()}"
        made, read = _PACKED[table.dtype]
        first, end = self._count, self._count + len(values)
        if end > len(self._pairs):
            grown = np.zeros((max(end, 2 * len(self._pairs)), 2), dtype=np.int64)
            grown[:first] = self._pairs[:first]
            self._pairs = grown
        size = table.itemsize
        address = table.data_ptr() + (row * width + start) * size
        is_wide = _IS_WIDE if size == 8 else 0
        self._pairs[first:end, 0] = np.arange(address, address + len(values) * size, size) | is_wide
        self._pairs[first:end, 1] = np.asarray(values, dtype=made).view(read)
        self._count = end

    def take(self) -> np.ndarray:
        """[n, 2] int64: what was staged since the last call. Copy it before the next write."""
        taken = self._pairs[: self._count]
        self._count = 0
        return taken


def scatter_staged(writes: torch.Tensor) -> None:
    """Applies `StagedWrites.take()`, [n, 2] int64 on the tables' device."""
    assert writes.dim() == 2 and writes.shape[1] == 2 and writes.dtype == torch.int64, f"{writes.shape} {writes.dtype}"
    assert writes.is_contiguous(), f"writes has strides {writes.stride()}"
    _scatter_staged[(triton.cdiv(len(writes), _BLOCK),)](writes, len(writes), _BLOCK, num_warps=_WARPS)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["writes_ptr"])
def _scatter_staged(writes_ptr, count, block: tl.constexpr):
    place = tl.program_id(0) * block + tl.arange(0, block)
    key = tl.load(writes_ptr + 2 * place, mask=place < count, other=0)
    value = tl.load(writes_ptr + 2 * place + 1, mask=place < count, other=0)
    is_wide = (key & 1) == 1
    address = key & -2
    narrow_ptr = address.to(tl.pointer_type(tl.int32))
    wide_ptr = address.to(tl.pointer_type(tl.int64))
    tl.store(narrow_ptr, value.to(tl.int32), mask=(key != 0) & ~is_wide)
    tl.store(wide_ptr, value, mask=is_wide)
