"""Authenticated connections between engine cores over TCP, on a separate thread.

The same port answers `GET /query` of Mooncake-style proxies that look for an engine. Everything is bounded:
connections, the size of a frame, and unsent data.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from penstock.kv_transfer.authentication import MAX_READ_BYTES, Authentication, Opener, Sealer
from penstock.kv_transfer.p2p.channel import ChannelEvent, ChannelHandler, Connected, Lost, Received
from penstock.kv_transfer.p2p.lookups import Endpoint, Lookups
from penstock.kv_transfer.p2p.messages import CODEC, MAX_MESSAGE_BYTES, Message
from penstock.kv_transfer.p2p.params import Address
from penstock.kv_transfer.p2p.peers import REFRESH_SECONDS, LocalCluster
from penstock.kv_transfer.p2p.queries import query_answer
from penstock.kv_transfer.p2p.session import PeerKey
from penstock.utils.clock import SystemClock
from penstock.utils.errors import ConfigError, PeerError, WireError
from penstock.utils.hosts import is_ip_address, keep_alive, listen
from penstock.utils.logging import get_logger
from penstock.utils.wire import FrameReader

logger = get_logger(__name__)

PURPOSE = b"penstock kv control"
_OPEN_SECONDS = 5.0
_CLOSE_SECONDS = 5.0
_UNACKNOWLEDGED_SECONDS = 60
_BACKLOG = 64
_PAUSE_SECONDS = 0.5
_MAX_EARLY_EVENTS = 4096
_MAX_CONNECTIONS = 256
_MAX_UNSENT_BYTES = 4 * MAX_MESSAGE_BYTES
_MAX_REQUEST_BYTES = 8 << 10


@dataclass(slots=True, eq=False)
class _Connection:
    """Ends at its `deadline` unless by then it is open or, when it `is_closing`, has sent everything.

    `others` are the endpoints to try next if this connection cannot be opened.
    """

    peer: PeerKey
    socket: socket.socket
    is_outgoing: bool
    deadline: float
    authentication: Authentication
    sealer: Sealer | None = None
    opener: Opener | None = None
    reader: FrameReader = field(default_factory=lambda: FrameReader(CODEC, MAX_MESSAGE_BYTES))
    unsent: bytearray = field(default_factory=bytearray)
    request: bytes = b""
    is_first_read: bool = True
    is_closing: bool = False
    others: list[Endpoint] = field(default_factory=list[Endpoint])


class SocketChannel:
    """Listens on `ports` of `host`, by the option that sets each, as soon as it is made; port 0 takes a free one.

    If the host is a name, it listens on all interfaces. Without ports it only dials. It announces the addresses to
    `local`, so that engines of the same user may dial them. Raises ConfigError, and leaves nothing behind, if a port is
    in use or an address cannot be announced.
    """

    def __init__(self, host: str, ports: Mapping[str, int], key: bytes, local: LocalCluster | None = None) -> None:
        self._clock = SystemClock()
        self._key = key
        self._listeners: list[socket.socket] = []
        with contextlib.ExitStack() as undo:
            for option, port in ports.items():
                try:
                    self._listeners.append(undo.enter_context(listen(host, port, _BACKLOG)))
                except OSError as error:
                    problem = f"cannot listen on {host}, {option} {port}: {error}: choose another one"
                    raise ConfigError(problem) from None
            self._addresses: list[Address] = [(host, each.getsockname()[1]) for each in self._listeners]
            if local is not None:
                for each in self._addresses:
                    local.announce(each)
                    undo.callback(local.withdraw, each)
            self._undo = undo.pop_all()
        self.address = self._addresses[0] if self._addresses else (host, 0)
        self._local = local
        self._answer: Mapping[str, Any] | None = None
        self._selector = selectors.DefaultSelector()
        self._alarm, self._alarm_end = socket.socketpair()
        for each in (*self._listeners, self._alarm_end):
            each.setblocking(False)
            self._selector.register(each, selectors.EVENT_READ)
        self._connections: dict[PeerKey, _Connection] = {}
        # Guards what is sent over authenticated connections, and their end.
        self._lock = threading.RLock()
        self._lookups = Lookups()
        self._lookup_deadlines: dict[PeerKey, float] = {}
        self._paused: dict[socket.socket, float] = {}
        # Both threads take numbers from it.
        self._numbers = itertools.count(1)
        self._commands: deque[Callable[[], None]] = deque()
        self._events: deque[ChannelEvent] = deque()
        self._handler: ChannelHandler | None = None
        self._wake_time: float | None = None
        self._failure: Exception | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="kv-control", daemon=True)
        self._thread.start()

    # ---- Any thread ----

    def answer_queries(self, answer: Mapping[str, Any]) -> None:
        self._answer = answer

    def dial(self, address: Address) -> PeerKey:
        peer = f"{address[0]}:{address[1]}#{next(self._numbers)}"
        self._command(lambda: self._connect(peer, address))
        return peer

    def send(self, peer: PeerKey, message: Message) -> None:
        # The caller's thread sends, because the channel's thread might wait for the GIL until the caller's step ends.
        data = CODEC.encode(message)
        with self._lock:
            self._seal(peer, data)

    def hang_up(self, peer: PeerKey) -> None:
        self._command(lambda: self._close_when_sent(peer))

    def wake_at(self, when: float | None) -> None:
        before, self._wake_time = self._wake_time, when
        if when is not None and (before is None or when < before):
            self._command(lambda: None)

    def start(self, handler: ChannelHandler) -> None:
        self._handler = handler
        self._command(lambda: None)

    def check(self) -> None:
        if self._failure is not None:
            raise RuntimeError(f"the control connections have ended because of a bug: {self._failure!r}")

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._command(lambda: None)
            self._thread.join()
            self._alarm.close()
            self._undo.close()

    def _command(self, action: Callable[[], None]) -> None:
        self._commands.append(action)
        with contextlib.suppress(BlockingIOError, OSError):
            self._alarm.send(b"\0", socket.MSG_DONTWAIT)

    # ---- The channel's thread ----

    def _run(self) -> None:
        try:
            self._serve_until_closed()
        except Exception as error:
            logger.exception("the control connections end because of a bug")
            self._failure = error
            if self._handler is not None:
                with contextlib.suppress(Exception):
                    self._handler.on_time()  # wakes the core, which calls `check`
        for connection in list(self._connections.values()):
            self._forget(connection)
        for each in (*self._listeners, self._alarm_end):
            each.close()
        self._selector.close()

    def _serve_until_closed(self) -> None:
        closing_until: float | None = None
        while closing_until is None or (self._has_unsent and self._clock.now() < closing_until):
            for key, mask in self._selector.select(self._patience()):
                self._serve(key, mask)
            while self._commands:
                self._commands.popleft()()
            self._end_late_ones()
            if self._local is not None:
                self._local.refresh(self._clock.now())
            self._tell()
            if self._is_closed and closing_until is None:
                closing_until = self._clock.now() + 0.5

    def _tell(self) -> None:
        """Passes events and the time to the handler. A message that it cannot process costs its connection."""
        if self._handler is None:
            return
        while self._events:
            event = self._events.popleft()
            try:
                self._handler.on_event(event)
            except Exception as error:
                logger.exception("an event of the connection to %s cannot be processed", event.peer)
                if isinstance(event, Lost):
                    raise
                connection = self._connections.get(event.peer)
                if connection is not None:  # else its `Lost` follows
                    self._lose(connection, f"its message cannot be processed: {type(error).__name__}")
        when = self._wake_time
        if when is not None and when <= self._clock.now():
            self._wake_time = None
            self._handler.on_time()

    @property
    def _has_unsent(self) -> bool:
        return any(each.unsent for each in self._connections.values() if each.sealer is not None)

    def _patience(self) -> float | None:
        now = self._clock.now()
        times = [each.deadline for each in self._connections.values()]
        times += self._lookup_deadlines.values()
        times += self._paused.values()
        when = self._wake_time  # the other thread may change it meanwhile
        if when is not None and self._handler is not None:
            times.append(when)
        if self._is_closed:
            times.append(now + 0.05)
        if self._local is not None:
            times.append(now + REFRESH_SECONDS)
        earliest = min(times, default=math.inf)
        return None if earliest == math.inf else max(0.0, earliest - now)

    def _serve(self, key: selectors.SelectorKey, mask: int) -> None:
        if key.fileobj is self._alarm_end:
            with contextlib.suppress(BlockingIOError):
                self._alarm_end.recv(4096)
        elif key.data is None:
            assert isinstance(key.fileobj, socket.socket)
            self._accept(key.fileobj)
        else:
            connection: _Connection = key.data
            try:
                # An earlier event may have ended it.
                if mask & selectors.EVENT_WRITE and self._has(connection):
                    with self._lock:
                        self._flush(connection)
                if mask & selectors.EVENT_READ and self._has(connection):
                    self._read(connection)
            except (OSError, PeerError, WireError) as error:
                self._lose(connection, str(error))

    def _has(self, connection: _Connection) -> bool:
        return self._connections.get(connection.peer) is connection

    def _accept(self, listener: socket.socket) -> None:
        try:
            accepted, address = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            # Usually there are no more file descriptors. The connection stays in the backlog.
            logger.warning("no connection can be accepted for %g seconds: %s", _PAUSE_SECONDS, error)
            self._selector.unregister(listener)
            self._paused[listener] = self._clock.now() + _PAUSE_SECONDS
            return
        if len(self._connections) >= _MAX_CONNECTIONS and not self._end_oldest_stranger():
            accepted.close()
            return
        try:
            self._add(f"{address[0]}:{address[1]}#in{next(self._numbers)}", accepted, is_outgoing=False)
        except OSError as error:
            logger.info("a connection from %s has ended at once: %s", address[0], error)
            accepted.close()

    def _end_oldest_stranger(self) -> bool:
        """Ends the connection that has been unauthenticated for longest; False if all are authenticated."""
        for connection in self._connections.values():
            if connection.opener is None and not connection.is_outgoing:
                self._lose(connection, "a newer connection takes its place")
                return True
        return False

    def _connect(self, peer: PeerKey, address: Address) -> None:
        if is_ip_address(address[0]):
            family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
            self._connect_to_first(peer, [Endpoint(family, address)])
            return
        self._lookup_deadlines[peer] = self._clock.now() + _OPEN_SECONDS

        def found(endpoints: list[Endpoint], reason: str) -> None:
            self._command(lambda: self._on_looked_up(peer, endpoints, reason))

        self._lookups.begin(address, found)

    def _on_looked_up(self, peer: PeerKey, endpoints: list[Endpoint], reason: str) -> None:
        if self._lookup_deadlines.pop(peer, None) is None:
            return  # it took too long
        if endpoints:
            self._connect_to_first(peer, endpoints)
        else:
            self._put(Lost(peer, reason))

    def _connect_to_first(self, peer: PeerKey, endpoints: list[Endpoint]) -> None:
        endpoint, *others = endpoints
        try:
            made = socket.socket(endpoint.family, socket.SOCK_STREAM)
        except OSError as error:  # a host without IPv6 may still find such addresses; or too many files are open
            self._connect_to_next(peer, others, str(error))
            return
        made.setblocking(False)
        with contextlib.suppress(OSError):  # the first attempt to send reports the error
            made.connect(endpoint.address)
        try:
            connection = self._add(peer, made, is_outgoing=True)
        except OSError as error:
            made.close()
            self._connect_to_next(peer, others, str(error))
            return
        connection.others = others
        try:
            self._queue(connection, connection.authentication.greeting())
        except OSError as error:
            self._lose(connection, str(error))

    def _connect_to_next(self, peer: PeerKey, others: list[Endpoint], reason: str) -> None:
        if others:
            self._connect_to_first(peer, others)
        else:
            self._put(Lost(peer, reason))

    def _add(self, peer: PeerKey, made: socket.socket, is_outgoing: bool) -> _Connection:
        made.setblocking(False)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(made)
        # Keepalive probes are not sent while data waits to be acknowledged.
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _UNACKNOWLEDGED_SECONDS)
        authentication = Authentication(self._key, is_outgoing, PURPOSE)
        deadline = self._clock.now() + _OPEN_SECONDS
        connection = _Connection(peer, made, is_outgoing, deadline, authentication)
        self._selector.register(made, selectors.EVENT_READ, connection)
        self._connections[peer] = connection
        return connection

    def _read(self, connection: _Connection) -> None:
        if self._handler is None and len(self._events) > _MAX_EARLY_EVENTS:
            raise PeerError("the engine is starting")
        try:
            data = connection.socket.recv(MAX_READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            raise PeerError("the peer has closed the connection")
        if connection.opener is not None:
            self._open(connection, data)
            return
        if not connection.is_outgoing and self._is_query(connection, data):
            return
        if connection.is_first_read and not connection.is_outgoing:
            self._queue(connection, connection.authentication.greeting())
        connection.is_first_read = False
        self._queue(connection, connection.authentication.receive(data))
        if connection.authentication.is_done:
            connection.sealer = connection.authentication.sealer()
            connection.opener = connection.authentication.opener(MAX_MESSAGE_BYTES)
            connection.deadline = math.inf
            self._put(Connected(connection.peer, connection.is_outgoing))
            self._open(connection, connection.authentication.rest)

    def _open(self, connection: _Connection, data: bytes) -> None:
        assert connection.opener is not None
        for payload in connection.opener.feed(data):
            for message in connection.reader.feed(payload):
                self._put(Received(connection.peer, message))

    def _is_query(self, connection: _Connection, data: bytes) -> bool:
        """Returns whether this is an HTTP request; answers it when it is complete."""
        if not connection.request and not (connection.is_first_read and data.startswith(b"GET ")):
            return False
        connection.request += data
        if len(connection.request) > _MAX_REQUEST_BYTES:
            raise PeerError("the HTTP request is too long")
        if b"\r\n\r\n" in connection.request:
            path = connection.request.split(b" ", 2)[1].partition(b"?")[0]
            connection.is_closing = True
            self._queue(connection, query_answer(path, self._answer))
        return True

    def _seal(self, peer: PeerKey, data: bytes) -> None:
        connection = self._connections.get(peer)
        if connection is None or connection.sealer is None or connection.is_closing:
            return
        try:
            if len(connection.unsent) > _MAX_UNSENT_BYTES:
                raise PeerError("the peer does not read what is sent")
            self._queue(connection, connection.sealer.seal(data))
        except (OSError, PeerError) as error:
            self._command(partial(self._lose, connection, str(error)))

    def _queue(self, connection: _Connection, data: bytes) -> None:
        if data:
            connection.unsent += data
            self._flush(connection)

    def _flush(self, connection: _Connection) -> None:
        try:
            while connection.unsent:
                del connection.unsent[: connection.socket.send(connection.unsent)]
        except (BlockingIOError, InterruptedError):
            pass
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
        self._selector.modify(connection.socket, events, connection)
        if connection.is_closing and not connection.unsent:
            self._forget(connection)

    def _close_when_sent(self, peer: PeerKey) -> None:
        connection = self._connections.get(peer)
        if connection is not None:
            connection.deadline = self._clock.now() + _CLOSE_SECONDS
            with self._lock:
                connection.is_closing = True
                try:
                    self._flush(connection)
                except OSError:
                    self._forget(connection)

    def _end_late_ones(self) -> None:
        now = self._clock.now()
        for connection in list(self._connections.values()):
            if connection.deadline <= now:
                self._lose(connection, f"no connection within {_OPEN_SECONDS:g} seconds")
        for listener in [listener for listener, until in self._paused.items() if until <= now]:
            del self._paused[listener]
            self._selector.register(listener, selectors.EVENT_READ)
        for peer in [peer for peer, deadline in self._lookup_deadlines.items() if deadline <= now]:
            del self._lookup_deadlines[peer]
            self._put(Lost(peer, f"no name server has answered within {_OPEN_SECONDS:g} seconds"))

    def _lose(self, connection: _Connection, reason: str) -> None:
        is_known = self._has(connection)
        self._forget(connection)
        if connection.is_closing or not is_known:
            return
        if connection.is_outgoing and connection.opener is None:
            self._connect_to_next(connection.peer, connection.others, reason)
        elif connection.opener is not None:
            self._put(Lost(connection.peer, reason))
        else:
            logger.info("a connection from %s was refused: %s", connection.peer, reason)

    def _forget(self, connection: _Connection) -> None:
        with self._lock:
            if self._connections.pop(connection.peer, None) is not None:
                self._selector.unregister(connection.socket)
                connection.socket.close()

    def _put(self, event: ChannelEvent) -> None:
        self._events.append(event)
