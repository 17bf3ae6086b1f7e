"""Copies between the CPU and the device.

The CPU publishes snapshots, the device owns results. A `TableWriter` collects the changes of one step to tables on the
device; `apply()` makes them visible to everything launched afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Returns a snapshot of a CPU array on the device; the array may change when this returns."""
    return torch.from_numpy(array).to(device, copy=True)


HostCopy = Callable[[], np.ndarray]
"""A copy of a tensor to the CPU: waits for it and returns it."""


class TableWriter(Protocol):
    """Lifecycle: one per runner, for all its tables. Threading: the runner's thread. It never waits."""

    def write(self, table: torch.Tensor, row: int, start: int, values: Sequence[int] | Sequence[float]) -> None:
        """Stages `table[row, start : start + len(values)] = values`.

        `table` is [rows, width] int32, int64 or float32, contiguous. No element is written twice before `apply()`.
        """
        ...

    def apply(self) -> None:
        """Makes the staged changes visible."""
        ...
