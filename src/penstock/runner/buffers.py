"""Copies between the CPU and the device: the only place that knows about them.

The CPU publishes snapshots, the device owns results. A `StagedWriter` collects what one step changes in tables that
live on the device and applies it with one copy and one scatter, whatever the number of requests.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A snapshot of a CPU array on the device; the array may change as soon as this returns."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor.clone()
    return tensor.pin_memory().to(device, non_blocking=True)


class StagedWriter:
    """Pending writes to a 2D table `[rows, width]` on the device. `apply()` makes them visible."""

    def __init__(self, table: torch.Tensor) -> None:
        assert table.is_contiguous(), table.stride()
        self._flat = table.view(-1)
        self._width = table.shape[1]
        self._device = table.device
        self._offsets: list[np.ndarray] = []
        self._values: list[np.ndarray] = []

    def write(self, row: int, start: int, values: Sequence[int]) -> None:
        """Stages `table[row, start : start + len(values)] = values`."""
        assert 0 <= start <= start + len(values) <= self._width, (start, len(values), self._width)
        first = row * self._width + start
        self._offsets.append(np.arange(first, first + len(values), dtype=np.int64))
        self._values.append(np.asarray(values, dtype=np.int64))

    def apply(self) -> None:
        if not self._offsets:
            return
        offsets = to_device(np.concatenate(self._offsets), self._device)
        values = to_device(np.concatenate(self._values), self._device)
        self._flat[offsets] = values.to(self._flat.dtype)
        self._offsets.clear()
        self._values.clear()
