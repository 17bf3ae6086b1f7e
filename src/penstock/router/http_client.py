"""The HTTP requests of the router to its instances, over persistent connections. httptools parses the answers.

The instance may close a connection that has been idle for long just when it is reused. A request whose connection is
closed then, before the first byte of its answer, is sent once more, over a new connection; if that fails too, the
instance has failed, and the request has been sent twice (`AnswerLostError.num_sent`), unless both ends are those of one
process.
"""

from __future__ import annotations

import asyncio
import functools
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from penstock.router.bodies import Headers, decoded, encoded
from penstock.utils.errors import PeerError

_CONNECT_SECONDS = 5.0
# Less than the servers' timeout of idle connections: uvicorn closes them after 5 seconds.
_IDLE_SECONDS = 4.0
# A connection that ends sooner after its last answer was not closed because it was idle.
_MIN_IDLE_SECONDS = 1.0
# A process that dies ends all its connections within less, and another one takes longer to start.
_DEATH_SECONDS = 1.0
_MAX_HEAD_BYTES = 64 << 10
# The limit for an answer that the client does not read; then the instance has to wait.
_MAX_BUFFERED_BYTES = 256 << 10
_MAX_FETCHED_BYTES = 64 << 20
_BODILESS = ("GET", "HEAD", "DELETE", "OPTIONS")


class Call(msgspec.Struct, frozen=True):
    """A request to an instance."""

    method: str
    url: str
    headers: Headers = ()
    body: bytes = b""


class AnswerLostError(PeerError):
    """The request was sent, in all `num_sent` times, but the instance may have died of it: its connection has ended
    before the answer, or it reports that its engine is dead.
    """

    def __init__(self, message: str, num_sent: int = 1) -> None:
        super().__init__(message)
        self.num_sent = num_sent


Take = Callable[[bytes, bool], bool]
"""Takes the next part of an answer's body and whether it is the last one. Returns whether it can take another part."""


@dataclass(frozen=True, slots=True)
class _Origin:
    """The address of a connection. `name` is the Host header."""

    host: str
    port: int
    is_secure: bool
    name: str


class _ClosedError(AnswerLostError):
    """The connection has ended before the first byte of the answer."""


class HttpUpstream:
    """An async context manager, which must be entered before `ask`."""

    async def __aenter__(self) -> Self:
        # By scheme, host and port.
        self._free: dict[str, list[InstanceConnection]] = {}
        self._loop = asyncio.get_running_loop()
        self._sweep: asyncio.TimerHandle | None = None
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._sweep is not None:
            self._sweep.cancel()
        for connections in self._free.values():
            for each in connections:
                each.abort()

    async def ask(self, call: Call) -> InstanceConnection:
        """Returns a connection with the answer's head. Raises PeerError, or AnswerLostError after sending."""
        # The scheme is followed by the host, and then by the path, if there is one.
        slash = call.url.find("/", call.url.index("://") + 3)
        base, target = (call.url, "/") if slash < 0 else (call.url[:slash], call.url[slash:])
        origin = _origin(base)
        data = _head_of(call, origin, target) + call.body
        kept = self._take(base)
        num_sent, ended_at = 0, 0.0
        if kept is not None:
            has_been_idle = self._loop.time() - kept.idle_since >= _MIN_IDLE_SECONDS
            try:
                return await kept.ask(call.method, data, 1)
            except _ClosedError:
                if not has_been_idle:
                    raise
                num_sent, ended_at = 1, self._loop.time()
        try:
            connection = await _connect(origin, functools.partial(self._put_back, base))
        except PeerError as error:
            raise AnswerLostError(str(error), num_sent) if num_sent else error from error.__cause__
        try:
            return await connection.ask(call.method, data, num_sent + 1)
        except _ClosedError as error:
            if self._loop.time() - ended_at < _DEATH_SECONDS:
                error.num_sent = 1
            raise

    def _take(self, base: str) -> InstanceConnection | None:
        """Returns the connection used last."""
        free = self._free.get(base)
        while free:
            connection = free.pop()
            if connection.is_free:
                return connection
        return None

    def _put_back(self, base: str, connection: InstanceConnection) -> None:
        if not connection.is_free:
            connection.abort()
            return
        connection.idle_since = self._loop.time()
        self._free.setdefault(base, []).append(connection)
        if self._sweep is None:
            self._sweep = self._loop.call_later(_IDLE_SECONDS / 2, self._close_idle)

    def _close_idle(self) -> None:
        oldest = self._loop.time() - _IDLE_SECONDS / 2
        for base, connections in list(self._free.items()):
            self._free[base] = [each for each in connections if each.is_free and each.idle_since > oldest]
            for each in set(connections).difference(self._free[base]):
                each.abort()
            if not self._free[base]:
                del self._free[base]
        self._sweep = self._loop.call_later(_IDLE_SECONDS / 2, self._close_idle) if self._free else None


async def fetch(upstream: HttpUpstream, call: Call, timeout: float) -> tuple[int, Headers, bytes]:
    """Returns a whole answer: status, headers and body. Raises PeerError, also after `timeout` seconds."""
    body = bytearray()

    def take(part: bytes, _: bool) -> bool:
        body.extend(part)
        if len(body) > _MAX_FETCHED_BYTES:
            raise PeerError(f"its answer is larger than {_MAX_FETCHED_BYTES} bytes")
        return True

    try:
        async with asyncio.timeout(timeout):
            with await upstream.ask(call) as answer:
                await answer.pass_to(take)
                return answer.status, answer.headers, bytes(body)
    except TimeoutError:
        raise PeerError("it has not answered in time") from None


class InstanceConnection(asyncio.Protocol):
    """Handles one request at a time, and is its answer: a context manager that ends the request when it is left."""

    def __init__(self, put_back: Callable[[InstanceConnection], None]) -> None:
        self._put_back = put_back
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._take: Take | None = None
        self._is_due = False
        self._waiting: asyncio.Future[None] | None = None
        self._parts: list[bytes] = []
        self._num_buffered = 0
        self._is_asked = self._is_paused = False
        self._error = ""
        self.idle_since = 0.0

    @property
    def is_free(self) -> bool:
        """Returns whether it can handle another request."""
        return self._is_complete and self._is_kept and not (self._parts or self._error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._put_back(self)

    async def ask(self, method: str, data: bytes, num_sent: int) -> Self:
        """Sends a request, for the `num_sent`th time, and returns when the answer's head has arrived.

        Raises AnswerLostError.
        """
        self._num_sent = num_sent
        self._is_head = method == "HEAD"
        self._is_asked = True
        self._has_begun = self._is_measured = self._is_complete = self._is_passed = self._is_kept = False
        self._num_head_bytes = 0
        self._found: list[tuple[str, str]] = []
        self.status = 0
        self.headers: Headers = ()
        self._transport.write(data)
        try:
            while not self.status:
                if self._error:
                    kind = AnswerLostError if self._has_begun else _ClosedError
                    raise kind(self._error, num_sent)
                await self._more()
        except BaseException:
            self._transport.abort()
            raise
        return self

    async def pass_to(self, take: Take) -> bool:
        """Passes the body on as it arrives, until its end or until `take` returns False. Returns whether the body has
        ended. Raises AnswerLostError if it ends too early, and the errors of `take`: OSErrors and PeerErrors.
        """
        self._take = take
        try:
            while True:
                self._deliver()
                if self._take is None:
                    return self._is_passed
                if self._error:
                    raise AnswerLostError(self._error, self._num_sent)
                await self._more()
        finally:
            self._take = None

    def _deliver(self) -> None:
        """Passes on what has arrived. Sets `_take` to None if it takes no more."""
        if self._take is None or not (self._parts or self._is_complete):
            return
        part = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        self._num_buffered = 0
        if self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()
        take, self._take = self._take, None
        self._is_passed = self._is_complete
        if take(part, self._is_complete) and not self._is_complete:
            self._take = take

    def _deliver_due(self) -> None:
        """Passes on what has arrived without resuming the request's task, which waits in `pass_to`."""
        self._is_due = False
        try:
            self._deliver()
        except (OSError, PeerError) as error:
            self._wake(error)
        if self._take is None:
            self._wake()

    def abort(self) -> None:
        self._transport.abort()

    async def _more(self) -> None:
        self._waiting = self._loop.create_future()
        await self._waiting

    def _wake(self, error: OSError | PeerError | None = None) -> None:
        if self._waiting is None or self._waiting.done():
            return
        if error is None:
            self._waiting.set_result(None)
        else:
            self._waiting.set_exception(error)

    def _fail(self, message: str) -> None:
        self._error = self._error or message
        self._transport.abort()
        self._wake()

    # ---- Calls from the transport ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._is_asked and self.status and not self._is_measured and exc is None and not self._error:
            # The end of the connection is the end of the body.
            self._is_complete = True
        self._fail(str(exc or "it has closed the connection"))

    def data_received(self, data: bytes) -> None:
        if not self._is_asked or self._is_complete:
            self._fail("it has sent data that was not requested")
            return
        self._has_begun = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(f"its answer is not HTTP/1.1: {error}")
            return
        if not self.status:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > _MAX_HEAD_BYTES:
                self._fail(f"the head of its answer is larger than {_MAX_HEAD_BYTES} bytes")
        if self._take is None:
            self._wake()
        elif not self._is_due:
            # The requests that have just arrived come first: they still wait for their first token.
            self._is_due = True
            self._loop.call_soon(self._deliver_due)

    # ---- Calls from the parser ----

    def on_message_begin(self) -> None:
        if self._is_complete:
            self._error = "it has sent data that was not requested"

    def on_header(self, name: bytes, value: bytes) -> None:
        # A chunked body may be followed by further headers.
        if not self.status:
            self._found.append((decoded(name), decoded(value)))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200 or self.status:
            # An interim response, or a message after the answer.
            self._found.clear()
            return
        self.status, self.headers = status, tuple(self._found)
        # Both are False if the body lasts until the connection ends.
        self._is_kept = self._is_measured = self._parser.should_keep_alive()
        if not self._is_kept:
            self._is_measured = any(name.lower() in ("content-length", "transfer-encoding") for name, _ in self._found)
        if self._is_head:
            # The parser does not know the request's method, and would wait for a body.
            self._is_complete, self._is_kept = True, False

    def on_body(self, body: bytes) -> None:
        if self._is_complete:
            return
        self._parts.append(body)
        self._num_buffered += len(body)
        if self._num_buffered > _MAX_BUFFERED_BYTES and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        self._is_complete = self.status != 0


async def _connect(origin: _Origin, put_back: Callable[[InstanceConnection], None]) -> InstanceConnection:
    """Opens a connection. Raises PeerError."""
    make = functools.partial(InstanceConnection, put_back)
    secure = _secure() if origin.is_secure else None
    try:
        async with asyncio.timeout(_CONNECT_SECONDS):
            made = await asyncio.get_running_loop().create_connection(make, origin.host, origin.port, ssl=secure)
            return made[1]
    except TimeoutError:
        raise PeerError(f"it accepts no connection within {_CONNECT_SECONDS:g} seconds") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise PeerError(f"it cannot be reached: {reason or error}") from error


@functools.cache
def _secure() -> ssl.SSLContext:
    return ssl.create_default_context()


@functools.lru_cache(1024)
def _origin(url: str) -> _Origin:
    """Parses a URL without a path."""
    parts = urlsplit(url)
    is_secure = parts.scheme == "https"
    port = parts.port or (443 if is_secure else 80)
    return _Origin(parts.hostname or "", port, is_secure, parts.netloc.rpartition("@")[2])


def _head_of(call: Call, origin: _Origin, target: str) -> bytes:
    lines = [f"{call.method} {target} HTTP/1.1\r\nHost: {origin.name}\r\n"]
    lines += [f"{name}: {value}\r\n" for name, value in call.headers]
    if call.body or call.method not in _BODILESS:
        lines.append(f"Content-Length: {len(call.body)}\r\n")
    lines.append("\r\n")
    return encoded("".join(lines))
