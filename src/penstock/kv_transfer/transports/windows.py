"""The parts of an endpoint's memory that its peers may write, and for how long."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field

import numpy as np

from penstock.kv_transfer.transports.flat_memory import RangeSet
from penstock.kv_transfer.transports.stream import Stream
from penstock.utils.errors import PeerError

_NAME_BYTES = 16


@dataclass(slots=True)
class _Window:
    """`writers` are the connections whose threads receive into it."""

    ranges: RangeSet
    writers: set[Stream] = field(default_factory=set[Stream])
    is_closing: bool = False


class Windows:
    """The windows of one endpoint; `lock` is the endpoint's."""

    def __init__(self, lock: threading.Condition) -> None:
        self._lock = lock
        self._windows: dict[bytes, _Window] = {}

    def open(self, ranges: np.ndarray) -> bytes:
        """Opens a window over [n, 2] int64 of offset and bytes. Returns its name."""
        name = os.urandom(_NAME_BYTES)
        with self._lock:
            self._windows[name] = _Window(RangeSet(ranges))
        return name

    def close(self, name: bytes) -> None:
        """Accepts no further writers, and cuts the connections of those that are writing."""
        with self._lock:
            window = self._windows.get(name)
            if window is None:
                return
            window.is_closing = True
            for stream in window.writers:
                stream.cut()
            self._forget(name, window)

    def is_closed(self, name: bytes) -> bool:
        """Returns whether nothing lands in the window any more."""
        with self._lock:
            return name not in self._windows

    def enter(self, name: bytes, ranges: np.ndarray, stream: Stream) -> None:
        """Called before a thread receives these ranges, [n, 2] int64. Raises PeerError unless the window has them."""
        with self._lock:
            window = self._windows.get(name)
            if window is None or window.is_closing:
                raise PeerError("the write names no open window: it is late or was not requested")
            if not window.ranges.covers(ranges):
                raise PeerError("the write exceeds the memory of its window")
            window.writers.add(stream)

    def leave(self, name: bytes, stream: Stream) -> None:
        """Called when the thread receives no more."""
        with self._lock:
            window = self._windows[name]
            window.writers.discard(stream)
            self._forget(name, window)

    def _forget(self, name: bytes, window: _Window) -> None:
        if window.is_closing and not window.writers:
            del self._windows[name]
