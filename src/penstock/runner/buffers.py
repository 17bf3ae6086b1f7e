"""Copies between the CPU and the device.

The CPU publishes snapshots, the device owns results. A `TableWriter` collects what one step changes in tables that live
on the device; `apply()` makes it visible to all that is launched afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A snapshot of a CPU array on the device; the array may change as soon as this returns."""
    return torch.from_numpy(array).to(device, copy=True)


HostCopy = Callable[[], np.ndarray]
"""A tensor on its way to the CPU: waits for it and returns it."""


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
