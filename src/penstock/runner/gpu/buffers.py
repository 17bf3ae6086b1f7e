"""Pinned memory, and what is copied from it to the device once a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from penstock.kernels.triton.staged_writes import StagedWrites, scatter_staged
from penstock.runner.buffers import Fence


@dataclass(frozen=True, slots=True)
class _Slot:
    memory: torch.Tensor  # [size] uint8, pinned
    array: np.ndarray  # the same memory
    fence: Fence  # behind the copy that reads it


class PinnedRing:
    """Pinned memory for what the CPU writes and a copy reads some time later. One is written at a time.

    With a slot more than there are steps in flight its fences are passed when it laps, unless steps came whose results
    nobody had to wait for.
    """

    def __init__(self, num_bytes: int, num_slots: int, device: torch.device) -> None:
        self._device = device
        self._slots = [self._make_slot(num_bytes) for _ in range(num_slots)]
        self._index = 0
        self._is_open = False

    def open(self, num_bytes: int) -> np.ndarray:
        """[at least num_bytes] uint8 to be filled, then copied."""
        assert not self._is_open, "a slot was opened before the last one was copied"
        self._is_open = True
        self._index = (self._index + 1) % len(self._slots)
        slot = self._slots[self._index]
        slot.fence.wait()
        if num_bytes > len(slot.memory):
            slot = self._slots[self._index] = self._make_slot(2 * num_bytes)
        return slot.array

    def copy(self, num_bytes: int, out: torch.Tensor) -> None:
        """Copies the open slot's beginning into `out`, [num_bytes] uint8 on the device."""
        assert self._is_open, "no slot is open"
        self._is_open = False
        slot = self._slots[self._index]
        out.copy_(slot.memory[:num_bytes], non_blocking=True)
        slot.fence.record()

    def _make_slot(self, num_bytes: int) -> _Slot:
        memory = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        return _Slot(memory, memory.numpy(), Fence(self._device))


class StagedTableWriter:
    """One copy and one launch for all that a step changes (`TableWriter`)."""

    def __init__(self, device: torch.device, depth: int) -> None:
        self._device = device
        self._staged = StagedWrites()
        self._ring = PinnedRing(1 << 16, depth + 1, device)

    def write(self, table: torch.Tensor, row: int, start: int, values: Sequence[int] | Sequence[float]) -> None:
        self._staged.write(table, row, start, values)

    def apply(self) -> None:
        pairs = self._staged.take()
        if not len(pairs):
            return
        self._ring.open(pairs.nbytes)[: pairs.nbytes] = pairs.view(np.uint8).reshape(-1)
        # Fresh memory of torch's own pool: what still reads that of the last step lies before this on the stream.
        writes = torch.empty(pairs.shape, dtype=torch.int64, device=self._device)
        self._ring.copy(pairs.nbytes, writes.view(torch.uint8).view(-1))
        scatter_staged(writes)
