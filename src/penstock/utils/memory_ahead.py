"""Allocates memory shortly before it is used for the first time.

The system zeroes a page when it is touched first. On a virtual machine, whose host may have to allocate it too, this
takes several times as long as the copy that waits for it.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
    ready: int = 0


class MemoryAhead:
    """A thread that runs when the processor is otherwise idle, and calls `populate(start, bytes)` for parts of the
    areas. If several threads call `use` at once, memory may be populated twice. On a busy machine the thread may need
    minutes: a program ends without waiting for it. If nothing refers to this object any more, the thread ends after
    what was requested.
    """

    def __init__(self, areas: Sequence[Area], populate: Callable[[int, int], None]) -> None:
        self._areas = areas
        self._pieces = queue.Queue[tuple[int, int] | None]()
        args = self._pieces, populate
        self._thread = threading.Thread(target=_populate_all, args=args, name="memory-ahead", daemon=True)
        self._end = weakref.finalize(self, self._pieces.put, None)
        self._thread.start()

    def use(self, number: int, used: int) -> None:
        """Requests the memory that follows the first `used` bytes of an area, if less than half of `ahead` is ready."""
        area = self._areas[number]
        used, limit = area.start + used, area.start + area.num_bytes
        if min(used + area.ahead // 2, limit) <= area.ready:
            return
        end = min(used + area.ahead, limit)
        for piece in range(max(used, area.ready) // _PIECE_BYTES * _PIECE_BYTES, end, _PIECE_BYTES):
            start = max(piece, area.start)
            self._pieces.put((start, min(piece + _PIECE_BYTES, limit) - start))
        area.ready = max(area.ready, end)

    def close(self) -> None:
        """Leaves the memory alone from its return on. `use` may not be called afterwards."""
        self._pieces.queue.clear()
        self._end()
        self._thread.join()


def _populate_all(pieces: queue.Queue[tuple[int, int] | None], populate: Callable[[int, int], None]) -> None:
    give_way()
    for piece in iter(pieces.get, None):
        populate(*piece)
