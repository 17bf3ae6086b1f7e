"""Allocates memory shortly before it is used for the first time.

The system zeroes a page when it is touched first. On a virtual machine, whose host may have to allocate it too, this
takes several times as long as the copy that waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from penstock.utils.machine import give_way

AHEAD_BYTES = 256 << 20
_PIECE_BYTES = 2 << 20


@dataclass(slots=True)
class Area:
    """Memory that is used from its beginning on. `ahead` bytes of it are allocated before they are used, up to `ready`
    so far."""

    start: int
    num_bytes: int
    ahead: int = AHEAD_BYTES
    ready: int = field(init=False)

    def __post_init__(self) -> None:
        self.ready = self.start


class MemoryAhead:
    """A thread that runs when the processor is otherwise idle, and calls `populate(start, bytes)` for parts of the
    areas. One thread at a time calls `use`."""

    def __init__(self, areas: Sequence[Area], populate: Callable[[int, int], None]) -> None:
        self._areas = areas
        self._populate = populate
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="memory-ahead", initializer=give_way)

    def use(self, number: int, used: int) -> None:
        """Requests the memory that follows the first `used` bytes of an area, if less than half of `ahead` is ready."""
        area = self._areas[number]
        used, limit = area.start + used, area.start + area.num_bytes
        if min(used + area.ahead // 2, limit) <= area.ready:
            return
        end = min(used + area.ahead, limit)
        for piece in range(max(used, area.ready) // _PIECE_BYTES * _PIECE_BYTES, end, _PIECE_BYTES):
            start = max(piece, area.start)
            self._thread.submit(self._populate, start, min(piece + _PIECE_BYTES, limit) - start)
        area.ready = max(area.ready, end)

    def close(self) -> None:
        """Leaves the memory alone from its return on. `use` may not be called afterwards."""
        self._thread.shutdown(cancel_futures=True)
