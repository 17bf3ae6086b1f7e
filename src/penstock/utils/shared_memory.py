"""Memory with a name, which several processes of one user can map.

It is an anonymous file (`memfd_create`), and its name is the path of the creator's file descriptor. It can be attached
while its creator lives, and the kernel frees it with the last mapping, however the processes end: nothing can leak.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref

# Linux 5.14 and later: gives pages memory without writing to them. Elsewhere an error, which has no other effect.
_MADV_POPULATE_WRITE = 23


class SharedMemory:
    """One process's mapping, `[num_bytes] uint8`, writable; it starts at a page."""

    def __init__(self, name: str, descriptor: int, num_bytes: int) -> None:
        self.name = name
        mapping = mmap.mmap(descriptor, num_bytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # Where the system has huge pages for shared memory, a chunk's first use costs fewer page faults.
            with contextlib.suppress(OSError):
                mapping.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(mapping)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))

    def populate(self, start: int, num_bytes: int) -> None:
        """Gives bytes [start, start + num_bytes), page by page, memory in this mapping; other threads run meanwhile."""
        length = min(num_bytes, len(self.view) - start)
        if length > 0:
            address = ctypes.c_void_p(self.address + start)
            ctypes.CDLL(None).madvise(address, ctypes.c_size_t(length), _MADV_POPULATE_WRITE)


def create_memory(num_bytes: int) -> SharedMemory:
    """New memory, all zero, which takes room as it is used. Raises OSError or OverflowError if there is too little."""
    if num_bytes > os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE:
        raise OSError(f"not enough memory: {num_bytes} bytes are more than the machine has")
    descriptor = os.memfd_create("penstock", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, num_bytes)
        memory = SharedMemory(f"/proc/{os.getpid()}/fd/{descriptor}", descriptor, num_bytes)
    except BaseException:
        os.close(descriptor)
        raise
    # The descriptor is what the name refers to. It lives as long as the mapping, which views and tensors keep.
    weakref.finalize(memory.view.obj, os.close, descriptor)
    return memory


def attach_memory(name: str, num_bytes: int) -> SharedMemory:
    """The memory that another process, or this one, has created. Raises OSError when its creator has ended."""
    descriptor = os.open(name, os.O_RDWR | os.O_CLOEXEC)
    try:
        return SharedMemory(name, descriptor, num_bytes)
    finally:
        # The mapping has a descriptor of its own.
        os.close(descriptor)
