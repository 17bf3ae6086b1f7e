"""Copies between the CPU and the device: the only place that knows about them.

The CPU publishes snapshots, the device owns results. A `TableWriter` collects what one step changes in tables that live
on the device; `apply()` makes it visible to all that is launched afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from penstock.kernels.dispatch import has_gpu_kernels


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A snapshot of a CPU array on the device; the array may change as soon as this returns."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor.clone()
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class TableWriter(Protocol):
    """Lifecycle: one per runner, of all its tables. Threading: the runner's thread. It waits for nothing."""

    def write(self, table: torch.Tensor, row: int, start: int, values: Sequence[int] | Sequence[float]) -> None:
        """Stages `table[row, start : start + len(values)] = values`.

        `table` is [rows, width] int32, int64 or float32, contiguous. No element is written twice before `apply()`.
        """
        ...

    def apply(self) -> None:
        """Makes what was staged visible."""
        ...


class HostTableWriter:
    """Of tables that the CPU can reach: they are written where they are."""

    def write(self, table: torch.Tensor, row: int, start: int, values: Sequence[int] | Sequence[float]) -> None:
        assert 0 <= start <= start + len(values) <= table.shape[1], (start, len(values), table.shape)
        table[row, start : start + len(values)] = torch.as_tensor(values, dtype=table.dtype)

    def apply(self) -> None: ...


def make_table_writer(device: torch.device, depth: int) -> TableWriter:
    """`depth` is how many steps the CPU may have launched whose results it does not know."""
    if not has_gpu_kernels(device):
        return HostTableWriter()
    # Only now: a CPU needs no Triton.
    from penstock.runner.gpu.buffers import StagedTableWriter

    return StagedTableWriter(device, depth)
