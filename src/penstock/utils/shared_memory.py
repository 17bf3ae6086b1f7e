"""Named memory that several processes of one user can map.

It is an anonymous file (`memfd_create`), and its name is the path of the creator's file descriptor. It can be attached
while its creator is alive, and the kernel frees it with the last mapping, however the processes end, so it cannot leak.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
import time
import weakref

import numpy as np

# Linux 5.14 and later: allocates pages without writing to them. Elsewhere it fails without other effects.
_MADV_POPULATE_WRITE = 23
_POPULATED_BYTES = 128 << 10  # in one call


class SharedMemory:
    """One process's mapping, `[num_bytes] uint8`; it starts at a page."""

    def __init__(self, name: str, descriptor: int, num_bytes: int, *, writable: bool = True) -> None:
        self.name = name
        mapping = mmap.mmap(descriptor, num_bytes, access=mmap.ACCESS_DEFAULT if writable else mmap.ACCESS_READ)
        # If the system has huge pages for shared memory, the first use of a chunk costs fewer page faults.
        with contextlib.suppress(AttributeError, OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(mapping)
        self.address: int = np.frombuffer(mapping, np.uint8).ctypes.data

    def populate(self, start: int, num_bytes: int) -> None:
        """Allocates the pages of bytes [start, start + num_bytes) in this mapping; other threads continue to run."""
        populate_memory(self.address + start, min(num_bytes, len(self.view) - start))


def populate_memory(address: int, num_bytes: int) -> None:
    """Allocates the pages of memory, which keeps its content; other threads continue to run. It pauses half of the
    time: within a call of the system no other thread can map or unmap memory, and on a busy machine a thread of the
    lowest priority that loses its core there gets it back after seconds.
    """
    start, end = address // mmap.PAGESIZE * mmap.PAGESIZE, address + num_bytes
    madvise = ctypes.CDLL(None).madvise
    for step in range(start, end, _POPULATED_BYTES):
        begun = time.monotonic()
        madvise(ctypes.c_void_p(step), ctypes.c_size_t(min(_POPULATED_BYTES, end - step)), _MADV_POPULATE_WRITE)
        threading.Event().wait(time.monotonic() - begun)


def create_memory(num_bytes: int) -> SharedMemory:
    """Creates zeroed memory whose pages are allocated on first use. Raises OSError or OverflowError if there is too
    little.
    """
    if num_bytes > os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE:
        raise OSError(f"not enough memory: {num_bytes} bytes are more than the machine has")
    descriptor = os.memfd_create("penstock", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, num_bytes)
        memory = SharedMemory(f"/proc/{os.getpid()}/fd/{descriptor}", descriptor, num_bytes)
    except BaseException:
        os.close(descriptor)
        raise
    # The name refers to the descriptor. It stays open as long as the mapping, which views and tensors keep alive.
    weakref.finalize(memory.view.obj, os.close, descriptor)
    return memory


def attach_memory(name: str, num_bytes: int, *, writable: bool = True) -> SharedMemory:
    """Maps memory that another process, or this one, has created. Raises OSError if its creator has ended."""
    descriptor = os.open(name, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
    try:
        return SharedMemory(name, descriptor, num_bytes, writable=writable)
    finally:
        # The mapping has a descriptor of its own.
        os.close(descriptor)
