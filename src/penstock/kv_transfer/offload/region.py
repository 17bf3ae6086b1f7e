"""The memory of the CPU tier: one mapping, divided into chunks, which the engine core and its workers share by name."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from penstock.messages.kv_layout import MemoryRegion
from penstock.utils.errors import ConfigError
from penstock.utils.machine import give_way
from penstock.utils.shared_memory import SharedMemory, attach_memory, create_memory

_AHEAD_BYTES = 256 << 20
_PIECE_BYTES = 2 << 20


class OffloadRegion:
    """`num_chunks` consecutive chunks of `chunk_bytes` bytes. The engine core makes the region, and workers `attach`
    it.

    A thread populates pages shortly before they are used, a fixed number of bytes beyond the last requested chunk. A
    copy that has to wait for memory takes many times as long.

    Raises:
        ConfigError: not even one chunk fits, or the system does not provide that much memory.
    """

    def __init__(self, num_chunks: int, chunk_bytes: int, memory: SharedMemory | None = None) -> None:
        assert chunk_bytes > 0, chunk_bytes
        if num_chunks < 1:
            raise ConfigError(f"cpu_bytes_to_use must be at least {chunk_bytes}, the bytes of one KV block")
        self.num_chunks = num_chunks
        self.chunk_bytes = chunk_bytes
        num_bytes = num_chunks * chunk_bytes
        try:
            self._memory = memory or create_memory(num_bytes)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"cpu_bytes_to_use is too large: the system cannot provide {num_bytes} bytes") from error
        self.memory = MemoryRegion("offload", num_bytes, address=self._memory.address, path=self._memory.name)
        self._ready = 0  # bytes from the start whose population has been requested
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-region", initializer=give_way)
        self._make_ready(0)

    @classmethod
    def attach(cls, memory: MemoryRegion, chunk_bytes: int) -> OffloadRegion:
        """Attaches the region of another process. Raises OSError if that process has ended."""
        assert memory.path is not None, memory
        return cls(memory.num_bytes // chunk_bytes, chunk_bytes, attach_memory(memory.path, memory.num_bytes))

    def chunk(self, chunk_id: int) -> memoryview:
        """Returns `[chunk_bytes] uint8`, writable; it stays valid as long as it is referenced."""
        assert 0 <= chunk_id < self.num_chunks, (chunk_id, self.num_chunks)
        start = chunk_id * self.chunk_bytes
        self._make_ready(start + self.chunk_bytes)
        return self._memory.view[start : start + self.chunk_bytes]

    def close(self) -> None:
        """Stops populating, which would delay the end of the process. No chunk may be requested afterwards."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _make_ready(self, used: int) -> None:
        """Requests memory beyond the first `used` bytes, if half of the memory requested earlier is used up."""
        if used + _AHEAD_BYTES // 2 <= self._ready:
            return
        end = used + _AHEAD_BYTES
        for start in range(max(used, self._ready) // _PIECE_BYTES * _PIECE_BYTES, end, _PIECE_BYTES):
            self._thread.submit(self._memory.populate, start, _PIECE_BYTES)
        self._ready = max(self._ready, end)
