"""Connects a rank's transport in the background: a peer that does not answer must not delay a step."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from penstock.kv_transfer.transports.base import DataTransport, PeerId
from penstock.utils.errors import PeerError

_NUM_THREADS = 4

Background = Callable[[Callable[[], PeerId]], "Future[PeerId]"]
"""Runs a function later or at once."""


def threads() -> Background:
    """Returns one that runs functions on threads, which end when it is no longer referenced."""
    return ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="kv-dial").submit


class Dialler:
    """Keeps connections by descriptor. One thread calls it; the transport's `connect` and what follows it run in the
    background.
    """

    def __init__(self, transport: DataTransport, background: Background) -> None:
        self._transport = transport
        self._background = background
        self._peers: dict[bytes, Future[PeerId]] = {}
        self._connected: dict[bytes, PeerId] = {}

    def find(self, descriptor: bytes) -> PeerId | None:
        """Returns the peer, None while it is being connected. Raises PeerError if that fails; the next call retries."""
        try:
            if descriptor not in self._peers:
                self._peers[descriptor] = self._background(lambda: self._transport.connect(descriptor))
            if not self._peers[descriptor].done():
                return None
            self._connected[descriptor] = self._peers[descriptor].result()
        except (PeerError, RuntimeError) as error:  # RuntimeError: the system has no more threads
            self.forget(descriptor)
            raise PeerError(str(error)) from error
        return self._connected[descriptor]

    def forget(self, descriptor: bytes) -> None:
        """Drops an unusable connection; the next `find` makes it again."""
        self._peers.pop(descriptor, None)

    def hang_up(self, peer: PeerId) -> None:
        """Ends a connection; the next `find` makes it again."""
        for descriptor in [each for each, connected in self._connected.items() if connected == peer]:
            if descriptor in self._peers and self._peers[descriptor].done():
                self.forget(descriptor)
        self._transport.disconnect(peer)

    def disconnect(self, descriptor: bytes) -> None:
        """Ends the connection, also one that was forgotten or is still being made."""
        peer, future = self._connected.pop(descriptor, None), self._peers.pop(descriptor, None)
        if peer is not None:
            self._transport.disconnect(peer)
        if future is not None:
            future.add_done_callback(lambda made: self._end(descriptor, made))

    def _end(self, descriptor: bytes, future: Future[PeerId]) -> None:
        """Disconnects unless the connection is needed again by now."""
        if future.exception() is None and descriptor not in self._peers:
            self._transport.disconnect(future.result())
