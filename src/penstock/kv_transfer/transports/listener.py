"""Accepts the connections of a socket, and serves each in a thread, within limits."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Iterator

from penstock.kv_transfer.transports.socket_protocol import PURPOSE, Answer, Hello, SocketLimits, decode, encode
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


def listen_on(host: str, limits: SocketLimits) -> socket.socket:
    """Returns a TCP socket that listens on this host. Raises ConfigError if this is not an address of this machine."""
    try:
        return listen(host, 0, limits.max_connections)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host!r}: {error}: give an address of this host") from error


class Listener:
    """Accepts the connections of a socket, which it owns.

    `serve` runs in a connection's thread when the peer has authenticated itself and has asked for this `epoch`: until
    then, the connection may be closed in favour of a new one. A PeerError that it raises ends the connection.
    """

    def __init__(
        self,
        listening: socket.socket,
        key: bytes,
        epoch: bytes,
        limits: SocketLimits,
        serve: Callable[[Stream], None],
        max_frame_bytes: int,
    ) -> None:
        self._listening = listening
        self._key = key
        self._epoch = epoch
        self._limits = limits
        self._serve = serve
        self._max_frame_bytes = max_frame_bytes
        self._lock = threading.Condition()
        self._streams: set[Stream] = set()
        self._handshakes: dict[Stream, None] = {}
        self._closing = threading.Event()
        self._threads = ThreadGroup("kv-listener", self._closing)
        self._threads.start(self._accept)

    def cut_all(self, how: int = socket.SHUT_RDWR) -> None:
        """Ends all current connections, or one direction of them."""
        with self._lock:
            for stream in self._streams:
                stream.cut(how)

    def close(self, seconds: float, grace_seconds: float = 0.0) -> None:
        """Ends all connections and waits for their threads. Within `grace_seconds` peers can end them themselves."""
        with self._lock:
            self._closing.set()
        with contextlib.suppress(OSError):  # it may have been closed before
            self._listening.shutdown(socket.SHUT_RDWR)
        if grace_seconds:
            self.cut_all(socket.SHUT_WR)
            if not self._threads.has_ended(grace_seconds):
                _logger.error("a peer has not disconnected %s seconds after it was told to", grace_seconds)
        self.cut_all()
        self._threads.join(seconds)
        self._listening.close()

    def _accept(self) -> None:
        for connection in incoming(self._listening, self._closing):
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
            hello = decode(Hello, stream.receive())
            with self._lock:
                self._handshakes.pop(stream, None)
            if hello.epoch == self._epoch:
                self._serve(stream)
            else:
                stream.send(encode(Answer("this endpoint has been restarted since its descriptor was made")))
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
