"""Accepts connections, and serves each connection of a TCP socket in a thread, within limits."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Iterator

from penstock.kv_transfer.transports.socket_protocol import PURPOSE, SocketLimits
from penstock.kv_transfer.transports.stream import Stream
from penstock.kv_transfer.transports.threads import ThreadGroup
from penstock.utils.errors import ConfigError, PeerError
from penstock.utils.hosts import listen
from penstock.utils.logging import get_logger

_logger = get_logger(__name__)

_RETRY_SECONDS = 0.1


def incoming(listener: socket.socket, closing: threading.Event) -> Iterator[socket.socket]:
    """Yields the connections that arrive, until `closing` is set and the listener is shut down.

    While the process has no file descriptor for them, they wait in the kernel's queue, and each is tried again.
    """
    is_failing = False
    while not closing.is_set():
        try:
            connection, _ = listener.accept()
        except OSError as error:
            if not closing.is_set():
                _logger.log(logging.DEBUG if is_failing else logging.WARNING, "cannot accept connections: %s", error)
                is_failing = True
                closing.wait(_RETRY_SECONDS)
            continue
        is_failing = False
        yield connection


class Listener:
    """Listens as soon as it is made, and accepts after `start`. `serve` runs in a connection's thread when the peer has
    authenticated itself.

    `serve` calls `has_introduced_itself` when it knows the peer: until then, the connection may be closed in favour of
    a new one. A PeerError that it raises ends the connection.
    """

    def __init__(
        self,
        host: str,
        key: bytes,
        max_frame_bytes: int,
        limits: SocketLimits,
        lock: threading.Condition,
        serve: Callable[[Stream], None],
    ) -> None:
        self._key = key
        self._max_frame_bytes = max_frame_bytes
        self._limits = limits
        self._lock = lock
        self._serve = serve
        self._streams: set[Stream] = set()
        self._handshakes: dict[Stream, None] = {}
        self._closing = threading.Event()
        try:
            self._listener = listen(host, 0, limits.max_connections)
        except OSError as error:
            raise ConfigError(f"cannot listen on {host!r}: {error}: give an address of this host") from error
        self.port: int = self._listener.getsockname()[1]
        self._threads = ThreadGroup(f"kv-data-{self.port}")

    def start(self) -> None:
        self._threads.start(self._accept)

    def has_introduced_itself(self, stream: Stream) -> None:
        with self._lock:
            self._handshakes.pop(stream, None)

    def cut_all(self) -> None:
        """Ends all current connections."""
        with self._lock:
            for stream in self._streams:
                stream.cut()

    def close(self, seconds: float) -> None:
        """Ends all connections and waits for their threads."""
        with self._lock:
            self._closing.set()
        self.cut_all()
        with contextlib.suppress(OSError):  # it may have been closed before
            self._listener.shutdown(socket.SHUT_RDWR)
        assert self._threads.join(seconds), f"a thread has not ended within {seconds} seconds"
        self._listener.close()

    def _accept(self) -> None:
        for connection in incoming(self._listener, self._closing):
            self._begin(connection)

    def _begin(self, connection: socket.socket) -> None:
        """Gives the connection a thread, if there is room for one more."""
        try:
            stream = Stream(connection, self._limits.connect_seconds)
        except OSError:
            connection.close()
            return
        with self._lock:
            if len(self._handshakes) >= self._limits.max_handshakes:
                self._end_handshake(next(iter(self._handshakes)))
            if self._closing.is_set() or len(self._streams) >= self._limits.max_connections:
                stream.close()
                return
            try:
                self._threads.start(self._run, stream)
            except PeerError as error:
                _logger.warning("a connection is closed: %s", error)
                stream.close()
                return
            self._streams.add(stream)
            self._handshakes[stream] = None

    def _end_handshake(self, stream: Stream) -> None:
        """Ends a connection; returns when its thread has ended, as it counts until then. Called with the lock held."""
        stream.cut()
        self._lock.wait_for(lambda: stream not in self._streams, self._limits.connect_seconds)

    def _run(self, stream: Stream) -> None:
        try:
            seconds = self._limits.connect_seconds
            stream.authenticate(
                self._key, is_client=False, purpose=PURPOSE, seconds=seconds, max_frame_bytes=self._max_frame_bytes
            )
            self._serve(stream)
        except PeerError as error:
            _logger.debug("a connection has ended: %s", error)
        except Exception:
            _logger.exception("a connection has ended because of a bug")
        finally:
            stream.close()
            with self._lock:
                self._streams.remove(stream)
                self._handshakes.pop(stream, None)
                self._lock.notify_all()
