"""The memory of the CPU tier: one mapping, cut into chunks."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from concurrent.futures import ThreadPoolExecutor

from penstock.utils.background import give_way
from penstock.utils.errors import ConfigError

# Linux 5.14 and later: gives pages memory without writing to them. Elsewhere it is an error, which means nothing here.
_MADV_POPULATE_WRITE = 23
_AHEAD_BYTES = 256 << 20
_PIECE_BYTES = 2 << 20


class OffloadRegion:
    """`num_chunks` chunks of `chunk_bytes` bytes in a row, in one private mapping that starts at a page.

    Pages get memory shortly before they are used: while a thread of its own has time, so many bytes ahead of the last
    chunk that was asked for are made ready. Memory that a copy has to wait for makes it three times as long.

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
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        self._ready = 0  # bytes from the start that have been asked for
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-region", initializer=give_way)
        self._make_ready(0)

    def chunk(self, chunk_id: int) -> memoryview:
        """`[chunk_bytes] uint8`, writable; it stays valid as long as anyone holds it."""
        assert 0 <= chunk_id < self.num_chunks, (chunk_id, self.num_chunks)
        start = chunk_id * self.chunk_bytes
        self._make_ready(start + self.chunk_bytes)
        return self._view[start : start + self.chunk_bytes]

    def _make_ready(self, used: int) -> None:
        """Asks for memory behind the first `used` bytes, if half of what was asked for before is used up."""
        if used + _AHEAD_BYTES // 2 <= self._ready:
            return
        end = used + _AHEAD_BYTES
        for start in range(max(used, self._ready) // _PIECE_BYTES * _PIECE_BYTES, end, _PIECE_BYTES):
            length = min(_PIECE_BYTES, len(self._view) - start)
            if length > 0:
                self._thread.submit(_populate, self._address + start, length)
        self._ready = max(self._ready, end)


def _populate(address: int, length: int) -> None:
    # ctypes, because it lets other threads run meanwhile.
    ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), _MADV_POPULATE_WRITE)
