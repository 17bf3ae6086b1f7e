"""Pinned memory, and the copies between it and the device in each step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import cycle

import numpy as np
import torch

from penstock.kernels.triton.staged_writes import StagedWrites, scatter_staged

# Initial size for a step's changes to tables: 262,144 tokens of new requests before a slot must grow.
_WRITES_BYTES = 4 << 20


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Returns a snapshot of a CPU array on the device, like `to_device`, without waiting for the copy."""
    tensor = torch.from_numpy(array)
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True, copy=True)


@cache
def launch_stream(device: torch.device) -> torch.cuda.Stream:
    """Returns the stream on which a runner launches its steps. Torch's own query is slower than a launch."""
    return torch.cuda.default_stream(device)


class Fence:
    """A point on the runner's stream that the CPU can wait for; on a CPU that emulates a GPU it is always passed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events = [torch.cuda.Event()] if device.type == "cuda" else []

    def record(self, stream: torch.cuda.Stream | None = None) -> None:
        """`stream`: a stream other than the runner's."""
        for event in self._events:
            event.record(stream or launch_stream(self._device))

    def wait(self) -> None:
        for event in self._events:
            event.synchronize()

    def hold(self, stream: torch.cuda.Stream) -> None:
        """Makes later launches on `stream` wait for the fence."""
        for event in self._events:
            stream.wait_event(event)


@dataclass(frozen=True, slots=True)
class FencedCopy:
    """A copy of a tensor to the CPU (`HostCopy`)."""

    memory: torch.Tensor
    fence: Fence  # after the copy

    @classmethod
    def of(cls, tensor: torch.Tensor) -> FencedCopy:
        """Copies the tensor's content at this point of the stream."""
        # Torch's pool of pinned memory does not reuse memory that a copy may still write to.
        memory = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
        memory.copy_(tensor, non_blocking=True)
        fence = Fence(tensor.device)
        fence.record()
        return cls(memory, fence)

    def wait(self) -> np.ndarray:
        self.fence.wait()
        return self.memory.numpy()


@dataclass(frozen=True, slots=True)
class _Slot:
    memory: torch.Tensor  # [size] uint8, pinned
    array: np.ndarray  # the same memory
    fence: Fence  # after the copy from it or to it

    @classmethod
    def of(cls, num_bytes: int, device: torch.device) -> _Slot:
        memory = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        return cls(memory, memory.numpy(), Fence(device))


class PinnedRing:
    """Pinned memory that the CPU writes and a later copy reads. One slot is written at a time.

    With one slot more than there are steps in flight, fences are already passed when the ring wraps around, unless the
    results of some steps were not waited for.
    """

    def __init__(self, num_bytes: int, num_slots: int, device: torch.device) -> None:
        self._device = device
        self._slots = [_Slot.of(num_bytes, device) for _ in range(num_slots)]
        self._index = 0
        self._is_open = False

    def open(self, num_bytes: int) -> np.ndarray:
        """Returns [at least num_bytes] uint8 to be filled, then copied."""
        assert not self._is_open, "a slot was opened before the last one was copied"
        self._is_open = True
        self._index = (self._index + 1) % len(self._slots)
        slot = self._slots[self._index]
        slot.fence.wait()
        if num_bytes > len(slot.array):
            slot = self._slots[self._index] = _Slot.of(2 * num_bytes, self._device)
        return slot.array

    def copy(self, num_bytes: int, out: torch.Tensor) -> None:
        """Copies the beginning of the open slot into `out`, [num_bytes] uint8 on the device."""
        assert self._is_open, "no slot is open"
        self._is_open = False
        slot = self._slots[self._index]
        out.copy_(slot.memory if num_bytes == len(slot.array) else slot.memory[:num_bytes], non_blocking=True)
        slot.fence.record()


class FetchRing:
    """Copies one piece of memory to the CPU in every step, in parallel with the runner's stream.

    With one slot more than there are steps in flight, a copy has been read when the ring wraps around.
    """

    def __init__(self, source: torch.Tensor, num_slots: int) -> None:
        """`source` [num_bytes] uint8."""
        self._source = source
        self._slots = cycle([_Slot.of(len(source), source.device) for _ in range(num_slots)])
        self._beside = torch.cuda.Stream(source.device) if source.is_cuda else None
        self._ready = self._copied = Fence(source.device)

    def fetch(self, num_bytes: int) -> FencedCopy:
        """Copies the first `num_bytes`, as all earlier launches leave them."""
        slot = next(self._slots)
        memory = slot.memory[:num_bytes]
        with self._stream_beside():
            memory.copy_(self._source[:num_bytes], non_blocking=True)
        slot.fence.record(self._beside)
        self._copied = slot.fence
        return FencedCopy(memory, slot.fence)

    def join(self) -> None:
        """Makes later launches wait for the copy, so that they may write to the source."""
        if self._beside is not None:
            self._copied.hold(launch_stream(self._source.device))

    @contextmanager
    def _stream_beside(self) -> Iterator[None]:
        """Does what `torch.cuda.stream` does, which takes many times as long."""
        if self._beside is None:
            yield
            return
        self._ready.record()
        self._ready.hold(self._beside)
        torch.cuda.set_stream(self._beside)
        try:
            yield
        finally:
            torch.cuda.set_stream(launch_stream(self._source.device))


class StagedTableWriter:
    """Uses one copy and one launch for all changes of a step (`TableWriter`)."""

    def __init__(self, device: torch.device, depth: int) -> None:
        self._device = device
        self._staged = StagedWrites()
        self._ring = PinnedRing(_WRITES_BYTES, depth + 1, device)

    def write(self, table: torch.Tensor, row: int, start: int, values: Sequence[int] | Sequence[float]) -> None:
        self._staged.write(table, row, start, values)

    def apply(self) -> None:
        pairs = self._staged.take()
        if not len(pairs):
            return
        self._ring.open(pairs.nbytes)[: pairs.nbytes] = pairs.view(np.uint8).reshape(-1)
        # New memory from torch's own pool: kernels that still read the last step's are earlier on the stream.
        writes = torch.empty(pairs.shape, dtype=torch.int64, device=self._device)
        self._ring.copy(pairs.nbytes, writes.view(torch.uint8).view(-1))
        scatter_staged(writes)
