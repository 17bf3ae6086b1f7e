"""Copies host tensors to a device's memory at the speed of the bus.

A copy from pageable memory is limited by the speed of its one thread, including page faults. Here a tensor is divided
into chunks; each thread copies chunks into its own pinned slots, and while it fills one slot the device reads the
other:

    page cache -> slot -> device
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Protocol

import numpy as np
import torch

from penstock.utils.machine import usable_cores

_CHUNK_BYTES = 4 << 20
_SLOTS = 2  # of a thread
_NUM_THREADS = min(8, usable_cores())  # more threads do not increase the speed


class Passed(Protocol):
    """A position in a queue."""

    def synchronize(self) -> None:
        """Returns when everything before it is done."""
        ...


class CopyQueue(Protocol):
    """The order of a device's copies and of launches between them. Threading: `copy` and `launch` may be called from
    any thread; the others from the thread whose stream they use.
    """

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """[num_bytes] uint8 of the host's memory that queued copies can reach."""
        ...

    def follow(self) -> None:
        """Makes later queued work wait for everything launched before on the caller's stream."""
        ...

    def copy(self, source: torch.Tensor, out: torch.Tensor) -> Passed:
        """Queues `out = source`, in out's dtype. One is on the device; the host's may be changed when the position
        after the copy has been passed.
        """
        ...

    def launch(self, launch: Callable[[], None]) -> Passed:
        """Queues the launches of the function."""
        ...

    def join(self) -> None:
        """Makes later launches on the caller's stream wait for everything queued before."""
        ...


class CudaCopyQueue:
    """A separate stream (`CopyQueue`)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def follow(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, source: torch.Tensor, out: torch.Tensor) -> Passed:
        def convert() -> None:
            # On the device: torch would convert in a copy between the two on the host, into pageable memory.
            arrived = source if source.dtype == out.dtype else source.to(self._device, non_blocking=True)
            out.copy_(arrived, non_blocking=True)

        return self.launch(convert)

    def launch(self, launch: Callable[[], None]) -> Passed:
        # Waiting threads sleep, because copying threads need the processors.
        passed = torch.cuda.Event(blocking=True)
        with torch.cuda.stream(self._stream):
            launch()
            passed.record(self._stream)
        return passed

    def join(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


class NoQueue:
    """For a CPU in place of the device: everything is executed when it is queued (`CopyQueue`)."""

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def follow(self) -> None: ...

    def copy(self, source: torch.Tensor, out: torch.Tensor) -> Passed:
        out.copy_(source)
        return START

    def launch(self, launch: Callable[[], None]) -> Passed:
        launch()
        return START

    def join(self) -> None: ...


class _Start:
    """The position before the first copy."""

    def synchronize(self) -> None: ...


START = _Start()


class Stager:
    """Copies one tensor after the other, each with all threads. Must be closed. Threading: one thread calls it."""

    def __init__(self, queue: CopyQueue, chunk_bytes: int = _CHUNK_BYTES, num_threads: int = _NUM_THREADS) -> None:
        self._queue = queue
        self._chunk_bytes = chunk_bytes
        self._slots = _Slots(queue, chunk_bytes)
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="staging")

    def copy(self, source: torch.Tensor, out: torch.Tensor) -> None:
        """`out = source`, both contiguous and of one shape, `source` in the host's memory.

        When it returns, `source` has been read, and later launches on the current stream see `out` filled.
        """
        assert source.is_contiguous() and out.is_contiguous() and source.shape == out.shape, (source.shape, out.shape)
        size = self._chunk_bytes // source.itemsize
        chunks = zip(source.view(-1).split(size), out.view(-1).split(size), strict=True)
        self._queue.follow()
        jobs = [self._threads.submit(self._stage, *chunk) for chunk in chunks]
        # Wait for all, also if one has failed: they read `source` and write `out`.
        wait(jobs)
        self._queue.join()
        for job in jobs:
            job.result()

    def close(self) -> None:
        self._threads.shutdown()

    @torch.inference_mode()  # of one thread
    def _stage(self, source: torch.Tensor, out: torch.Tensor) -> None:
        slot = next(self._slots.turns)
        slot.passed.synchronize()
        num_bytes = source.nbytes
        # NumPy's copy uses one thread and lets other threads run meanwhile; torch's would wake its own threads.
        np.copyto(slot.memory.numpy()[:num_bytes], source.view(torch.uint8).numpy())
        slot.passed = self._queue.copy(slot.memory[:num_bytes].view(source.dtype), out)


class _Slot:
    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory  # [chunk_bytes] uint8
        self.passed: Passed = START  # after the last copy that read it


class _Slots(threading.local):
    """Slots of each thread."""

    def __init__(self, queue: CopyQueue, chunk_bytes: int) -> None:
        self._queue = queue
        self._chunk_bytes = chunk_bytes

    @functools.cached_property
    def turns(self) -> Iterator[_Slot]:
        """Yields the slots cyclically; creates them on first use."""
        return itertools.cycle([_Slot(self._queue.allocate(self._chunk_bytes)) for _ in range(_SLOTS)])
