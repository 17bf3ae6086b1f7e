"""The memory of the CPU tier: one mapping, divided into chunks, which the engine core and its workers share by name.

States lie at its beginning, but their chunk ids follow those of the other chunks.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from penstock.kv_transfer.offload.messages import StateChunks
from penstock.messages.kv_layout import MemoryRegion
from penstock.utils.errors import ConfigError
from penstock.utils.machine import give_way
from penstock.utils.math import round_up
from penstock.utils.shared_memory import SharedMemory, attach_memory, create_memory

_AHEAD_BYTES = 256 << 20
_PIECE_BYTES = 2 << 20
_PAGE = 4096
_NO_STATES = StateChunks(group=-1, num_chunks=0, chunk_bytes=0)


@dataclass(slots=True)
class _Area:
    """The chunks of one kind: `ready` is the end of the bytes whose population has been requested."""

    start: int
    num_chunks: int
    chunk_bytes: int
    ready: int = field(init=False)

    def __post_init__(self) -> None:
        self.ready = self.start

    @property
    def end(self) -> int:
        return self.start + self.num_chunks * self.chunk_bytes


class OffloadRegion:
    """`num_chunks` consecutive chunks of `chunk_bytes` bytes for blocks of tokens, and those of `states`. The engine
    core makes the region, and workers `attach` it.

    A thread populates pages shortly before they are used, a fixed number of bytes beyond the last requested chunk of a
    kind. A copy that has to wait for memory takes many times as long.

    Raises:
        ConfigError: not even one chunk fits, or the system does not provide that much memory.
    """

    def __init__(
        self, num_chunks: int, chunk_bytes: int, states: StateChunks | None = None, memory: SharedMemory | None = None
    ) -> None:
        assert chunk_bytes > 0, chunk_bytes
        if num_chunks < 1:
            raise ConfigError(f"cpu_bytes_to_use must be at least {chunk_bytes}, the bytes of one KV block")
        self.num_chunks = num_chunks
        self.chunk_bytes = chunk_bytes
        self.states = states
        its = states or _NO_STATES
        self.num_chunk_ids = num_chunks + its.num_chunks
        self._states = _Area(0, its.num_chunks, its.chunk_bytes)
        self._blocks = _Area(_blocks_start(states), num_chunks, chunk_bytes)
        num_bytes = self._blocks.end
        try:
            self._memory = memory or create_memory(num_bytes)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"cpu_bytes_to_use is too large: the system cannot provide {num_bytes} bytes") from error
        self.memory = MemoryRegion("offload", num_bytes, address=self._memory.address, path=self._memory.name)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-region", initializer=give_way)
        for area in (self._blocks, self._states):
            self._make_ready(area, area.start)

    @classmethod
    def attach(cls, memory: MemoryRegion, chunk_bytes: int, states: StateChunks | None = None) -> OffloadRegion:
        """Attaches the region of another process. Raises OSError if that process has ended."""
        assert memory.path is not None, memory
        num_chunks = (memory.num_bytes - _blocks_start(states)) // chunk_bytes
        return cls(num_chunks, chunk_bytes, states, attach_memory(memory.path, memory.num_bytes))

    def bytes_of(self, group: int) -> int:
        """Returns the bytes of a chunk for a block of this KV group."""
        return self.states.chunk_bytes if self.states is not None and group == self.states.group else self.chunk_bytes

    def chunk(self, chunk_id: int) -> memoryview:
        """Returns `[bytes of its kind] uint8`, writable; it stays valid as long as it is referenced."""
        assert 0 <= chunk_id < self.num_chunk_ids, (chunk_id, self.num_chunk_ids)
        is_state = chunk_id >= self.num_chunks
        area = self._states if is_state else self._blocks
        start = area.start + (chunk_id - self.num_chunks * is_state) * area.chunk_bytes
        end = start + area.chunk_bytes
        self._make_ready(area, end)
        return self._memory.view[start:end]

    def close(self) -> None:
        """Stops populating, which would delay the end of the process. No chunk may be requested afterwards."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _make_ready(self, area: _Area, used: int) -> None:
        """Requests an area's memory behind the byte `used`, if half of the memory requested earlier is used up."""
        if min(used + _AHEAD_BYTES // 2, area.end) <= area.ready:
            return
        end = min(used + _AHEAD_BYTES, area.end)
        for start in range(max(used, area.ready) // _PIECE_BYTES * _PIECE_BYTES, end, _PIECE_BYTES):
            self._thread.submit(self._memory.populate, start, _PIECE_BYTES)
        area.ready = max(area.ready, end)


def _blocks_start(states: StateChunks | None) -> int:
    """Returns where the chunks for blocks of tokens begin: at a page, so that a disk can bypass the page cache."""
    return 0 if states is None else round_up(states.num_chunks * states.chunk_bytes, _PAGE)
