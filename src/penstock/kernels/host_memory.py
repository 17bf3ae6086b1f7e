"""Large CPU memory for kernels that stream through it."""

from __future__ import annotations

import mmap

import torch

_HUGE_PAGE = 2 << 20


def aligned_bytes(count: int) -> torch.Tensor:
    """Returns [count] uint8, aligned for vector loads, in huge pages if it fills some and the system has them.

    Large memory is newly mapped: an allocator would return memory that was touched before, whose pages stay small.
    """
    if count < _HUGE_PAGE:
        memory = torch.empty(count + 64, dtype=torch.uint8)
        return memory.narrow(0, -memory.data_ptr() % 64, count)
    mapping = mmap.mmap(-1, count + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    return memory.narrow(0, -memory.data_ptr() % _HUGE_PAGE, count)
