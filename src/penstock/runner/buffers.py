"""Copies between the CPU and the device: the only place that knows about them.

The CPU publishes snapshots, the device owns results. A `TableWriter` collects what one step changes in tables that live
on the device; `apply()` makes it visible to all that is launched afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
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


@cache
def launch_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which a runner launches its steps. To ask for the current one takes longer than most launches."""
    return torch.cuda.default_stream(device)


class Fence:
    """A place on the runner's stream that the CPU can wait for; a CPU that stands in for a GPU has always passed it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events = [torch.cuda.Event()] if device.type == "cuda" else []

    def record(self, stream: torch.cuda.Stream | None = None) -> None:
        """`stream`: another one."""
        for event in self._events:
            event.record(stream or launch_stream(self._device))

    def wait(self) -> None:
        for event in self._events:
            event.synchronize()

    def hold(self, stream: torch.cuda.Stream) -> None:
        """What is launched there next begins when the fence has been passed."""
        for event in self._events:
            stream.wait_event(event)


@dataclass(frozen=True, slots=True)
class HostCopy:
    """A tensor on its way to the CPU."""

    memory: torch.Tensor
    fence: Fence  # behind the copy

    @classmethod
    def of(cls, tensor: torch.Tensor) -> HostCopy:
        """As it is when this is reached on the device."""
        # Torch's pool of pinned memory gives none away that a copy may still write to.
        memory = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
        memory.copy_(tensor, non_blocking=True)
        fence = Fence(tensor.device)
        fence.record()
        return cls(memory, fence)

    def wait(self) -> np.ndarray:
        self.fence.wait()
        return self.memory.numpy()


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
