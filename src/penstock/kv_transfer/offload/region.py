"""The memory of the CPU tier: one mapping, divided into chunks, which the engine core and its workers share by name.

States lie at its beginning, but their chunk ids follow those of the other chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.kv_transfer.offload.messages import StateChunks
from penstock.messages.kv_layout import MemoryRegion
from penstock.utils.errors import ConfigError
from penstock.utils.math import round_up
from penstock.utils.memory_ahead import Area, MemoryAhead
from penstock.utils.shared_memory import SharedMemory, attach_memory, create_memory

_PAGE = 4096
_NO_STATES = StateChunks(group=-1, num_chunks=0, chunk_bytes=0)


@dataclass(frozen=True, slots=True)
class _Chunks:
    """The chunks of one kind."""

    start: int
    num_chunks: int
    chunk_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.num_chunks * self.chunk_bytes


class OffloadRegion:
    """`num_chunks` consecutive chunks of `chunk_bytes` bytes for blocks of tokens, and those of `states`. The engine
    core makes the region, and workers `attach` it.

    The memory that follows the last requested chunk of a kind is allocated ahead of its use (`MemoryAhead`).

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
        self._kinds = (
            _Chunks(_blocks_start(states), num_chunks, chunk_bytes),
            _Chunks(0, its.num_chunks, its.chunk_bytes),
        )
        num_bytes = self._kinds[0].start + self._kinds[0].num_bytes
        try:
            self._memory = memory or create_memory(num_bytes)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"cpu_bytes_to_use is too large: the system cannot provide {num_bytes} bytes") from error
        self.memory = MemoryRegion("offload", num_bytes, address=self._memory.address, path=self._memory.name)
        areas = [Area(kind.start, kind.num_bytes) for kind in self._kinds]
        self._ahead = MemoryAhead(areas, self._memory.populate)
        for kind in range(len(areas)):
            self._make_ready(kind, 0)

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
        kind = self._kinds[is_state]
        end = (chunk_id - self.num_chunks * is_state + 1) * kind.chunk_bytes
        self._make_ready(int(is_state), end)
        return self._memory.view[kind.start + end - kind.chunk_bytes : kind.start + end]

    def close(self) -> None:
        """Allocates no more memory. No chunk may be requested afterwards."""
        self._ahead.close()

    def _make_ready(self, kind: int, used: int) -> None:
        self._ahead.use(kind, used)


def _blocks_start(states: StateChunks | None) -> int:
    """Returns where the chunks for blocks of tokens begin: at a page, so that a disk can bypass the page cache."""
    return 0 if states is None else round_up(states.num_chunks * states.chunk_bytes, _PAGE)
