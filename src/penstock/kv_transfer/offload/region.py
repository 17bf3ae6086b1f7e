"""The memory of the CPU tier: one mapping, cut into chunks."""

from __future__ import annotations

import contextlib
import mmap

from penstock.utils.errors import ConfigError


class OffloadRegion:
    """`num_chunks` chunks of `chunk_bytes` bytes in a row, in one private mapping that starts at a page.

    Pages get memory when they are first written, so a region costs nothing before it is used.

    Raises:
        ConfigError: not even one chunk fits, or the system does not give that much memory.
    """

    def __init__(self, num_chunks: int, chunk_bytes: int) -> None:
        assert chunk_bytes > 0, chunk_bytes
        if num_chunks < 1:
            raise ConfigError(f"cpu_bytes_to_use must be at least {chunk_bytes}, the bytes of one KV block")
        self.num_chunks = num_chunks
        self.chunk_bytes = chunk_bytes
        num_bytes = num_chunks * chunk_bytes
        try:
            mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"cpu_bytes_to_use is too much: the system does not give {num_bytes} bytes") from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # A chunk's first use then costs a page fault or two instead of hundreds.
            with contextlib.suppress(OSError):
                mapping.madvise(mmap.MADV_HUGEPAGE)
        self._view = memoryview(mapping)

    def chunk(self, chunk_id: int) -> memoryview:
        """`[chunk_bytes] uint8`, writable; it stays valid as long as anyone holds it."""
        assert 0 <= chunk_id < self.num_chunks, (chunk_id, self.num_chunks)
        start = chunk_id * self.chunk_bytes
        return self._view[start : start + self.chunk_bytes]
