"""Connections of a rank's transport, made beside the steps: a peer that does not answer must not hold up a step."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from penstock.kv_transfer.transports.base import DataTransport, PeerId
from penstock.utils.errors import PeerError

_NUM_THREADS = 4

Background = Callable[[Callable[[], PeerId]], "Future[PeerId]"]
"""Runs a function later or at once."""


def threads() -> Background:
    """On threads, which end when they are no longer referred to."""
    return ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="kv-dial").submit


class Dialler:
    """By descriptor. One thread calls it; `connect` of the transport, and what follows on it, run in the background."""

    def __init__(self, transport: DataTransport, background: Background) -> None:
        self._transport = transport
        self._background = background
        self._peers: dict[bytes, Future[PeerId]] = {}
        self._connected: dict[bytes, PeerId] = {}

    def find(self, descriptor: bytes) -> PeerId | None:
        """The peer, None while it is being connected. Raises PeerError when it cannot be; the next call tries again."""
        if descriptor not in self._peers:
            self._peers[descriptor] = self._background(lambda: self._transport.connect(descriptor))
        future = self._peers[descriptor]
        if not future.done():
            return None
        try:
            self._connected[descriptor] = future.result()
        except PeerError:
            self.forget(descriptor)
            raise
        return self._connected[descriptor]

    def forget(self, descriptor: bytes) -> None:
        """The connection is of no use any more: it is made anew when it is next needed."""
        self._peers.pop(descriptor, None)

    def disconnect(self, descriptor: bytes) -> None:
        """Ends the connection, also one that is of no use any more, or is still being made."""
        peer, future = self._connected.pop(descriptor, None), self._peers.pop(descriptor, None)
        if peer is not None:
            self._transport.disconnect(peer)
        if future is not None:
            future.add_done_callback(lambda made: self._end(descriptor, made))

    def _end(self, descriptor: bytes, future: Future[PeerId]) -> None:
        """Unless the connection is needed again meanwhile."""
        if future.exception() is None and descriptor not in self._peers:
            self._transport.disconnect(future.result())
