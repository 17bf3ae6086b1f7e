"""Which parts of an endpoint's memory its peers may write, and the end of that."""

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
    """Those of one endpoint; `lock` is the endpoint's."""

    def __init__(self, lock: threading.Condition) -> None:
        self._lock = lock
        self._windows: dict[bytes, _Window] = {}

    def open(self, ranges: np.ndarray) -> bytes:
        """Over [n, 2] int64 of offset and bytes. Returns its name."""
        name = os.urandom(_NAME_BYTES)
        with self._lock:
            self._windows[name] = _Window(RangeSet(ranges))
        return name

    def close(self, name: bytes) -> None:
        """Takes no further writer, and cuts those that are in it off."""
        with self._lock:
            window = self._windows.get(name)
            if window is None:
                return
            window.is_closing = True
            for stream in window.writers:
                stream.cut()
            self._forget(name, window)

    def is_closed(self, name: bytes) -> bool:
        """Whether nothing lands in it any more."""
        with self._lock:
            return name not in self._windows

    def enter(self, name: bytes, ranges: np.ndarray, stream: Stream) -> None:
        """A thread is about to receive these ranges, [n, 2] int64. Raises PeerError unless they lie in the window."""
        with self._lock:
            window = self._windows.get(name)
            if window is None or window.is_closing:
                raise PeerError("a write names no window that is open: it comes too late, or was never asked for")
            if not window.ranges.covers(ranges):
                raise PeerError("a write reaches beyond the memory that was offered for it")
            window.writers.add(stream)

    def leave(self, name: bytes, stream: Stream) -> None:
        """The thread receives no more."""
        with self._lock:
            window = self._windows[name]
            window.writers.discard(stream)
            self._forget(name, window)

    def _forget(self, name: bytes, window: _Window) -> None:
        if window.is_closing and not window.writers:
            del self._windows[name]
