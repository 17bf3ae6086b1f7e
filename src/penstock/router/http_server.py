"""An HTTP/1.1 server with one handler for all requests, which get whole bodies and answer in parts.

httptools parses the requests. The requests of a connection are answered one after the other, in a task each; the task
is cancelled when the client disconnects.
"""

from __future__ import annotations

import asyncio
import contextlib
import http
import json
import math
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, cast

import httptools
import msgspec

from penstock.router.bodies import Headers, decoded, encoded, error_body, header_of
from penstock.utils.errors import ConfigError
from penstock.utils.hosts import in_url
from penstock.utils.logging import get_logger

logger = get_logger(__name__)

RETRY_AFTER_SECONDS = 1
_MAX_HEAD_BYTES = 64 << 10
_MAX_BODY_BYTES = 64 << 20
_BACKLOG = 2048
# The times to complete a head and a body, to close a connection without a request, and to close one whose client
# continues to send a refused request.
_HEAD_SECONDS = 30.0
_BODY_SECONDS = 60.0
_IDLE_SECONDS = 75.0
_LINGER_SECONDS = 5.0
_SWEEP_SECONDS = 1.0
_FLUSH_SECONDS = 1.0
_STATUS_LINES = {each.value: f"HTTP/1.1 {each.value} {each.phrase}\r\n" for each in http.HTTPStatus}
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_LAST_CHUNK = b"0\r\n\r\n"
_WITHOUT_BODY = (204, 304)
_UPGRADE_HEADERS = ("connection", "upgrade")
_JSON = ("Content-Type", "application/json")


class Request(msgspec.Struct, frozen=True):
    """`target` is the undecoded path with its query. `is_kept`: the client wants to reuse the connection."""

    method: str
    target: str
    headers: Headers
    body: bytes
    is_http_1_0: bool
    is_kept: bool

    def header(self, name: str) -> str | None:
        """`name` is in lower case."""
        return header_of(self.headers, name)


class Response:
    """The answer to one request."""

    def __init__(self, connection: Connection, request: Request) -> None:
        self._connection = connection
        self._request = request
        self._head = b""
        self._is_chunked = False
        self.has_begun = self.is_complete = False
        self.is_kept = request.is_kept

    def begin(self, status: int, headers: Headers) -> None:
        """Sets the head, which is sent with the first part. The body must match a Content-Length in `headers`."""
        lines = [_STATUS_LINES.get(status) or f"HTTP/1.1 {status} \r\n"]
        is_measured = False
        for name, value in headers:
            lines.append(f"{name}: {value}\r\n")
            is_measured = is_measured or name.lower() == "content-length"
        if not is_measured and self._request.method != "HEAD" and status not in _WITHOUT_BODY:
            # For clients without chunked encoding, the end of the connection is the end of the body.
            self._is_chunked = not self._request.is_http_1_0
            self.is_kept = self.is_kept and self._is_chunked
            if self._is_chunked:
                lines.append("Transfer-Encoding: chunked\r\n")
        if not self.is_kept:
            lines.append("Connection: close\r\n")
        elif self._request.is_http_1_0:
            lines.append("Connection: keep-alive\r\n")
        self._head = encoded("".join(lines) + "\r\n")
        self.has_begun = True

    def write(self, part: bytes, is_last: bool) -> bool:
        """Sends the next part of the body. Returns False if the client has not read the earlier ones: call `drained`
        before the next part. Raises ClientLeftError.
        """
        if self._is_chunked:
            framed = b"%x\r\n%b\r\n" % (len(part), part) if part else b""
            part = framed + _LAST_CHUNK if is_last else framed
        data, self._head = self._head + part, b""
        self.is_complete = is_last
        return self._connection.send(data)

    async def drained(self) -> None:
        """Waits while the client has not read the earlier parts. Raises ClientLeftError."""
        await self._connection.drained()

    async def whole(self, status: int, headers: Headers, body: bytes) -> None:
        kept = (each for each in headers if each[0].lower() != "content-length")
        self.begin(status, (*kept, ("Content-Length", str(len(body)))))
        self.write(b"" if self._request.method == "HEAD" else body, True)
        await self.drained()

    async def send_json(self, status: int, fields: Mapping[str, Any]) -> None:
        await self.whole(status, (_JSON,), json.dumps(fields).encode())

    async def refuse(self, status: int, message: str) -> None:
        again = (("Retry-After", str(RETRY_AFTER_SECONDS)),) if status == 503 else ()
        await self.whole(status, (_JSON, *again), error_body(status, message))

    def cut(self) -> None:
        """Closes the connection within an answer, which tells the client that it is incomplete."""
        if self._is_chunked:
            self._connection.transport.close()
        else:
            # An orderly end of the connection would look like the end of the answer if the body's end is not marked.
            self._connection.transport.abort()


class ClientLeftError(ConnectionResetError):
    """The client has closed its connection."""


Handler = Callable[[Request, Response], Awaitable[None]]


class Connection(asyncio.Protocol):
    """`deadline`: when it is to be closed, in the loop's time. `is_last`: close it after its next answer. `task` is
    the one that answers the current request.
    """

    def __init__(self, handler: Handler, connections: set[Connection]) -> None:
        self._handler = handler
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._requests: deque[Request] = deque()
        self.task: asyncio.Task[None] | None = None
        self._can_send: asyncio.Future[None] | None = None
        self._is_refused = False
        self.is_last = False
        self.deadline = math.inf

    # ---- Calls from the transport ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._connections.add(self)
        self._wait_for_head(_HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self._requests.clear()
        # It refers to this object: without it, the last reference frees both at once.
        del self._parser
        self.resume_writing()
        if self.task is not None:
            self.task.cancel()

    def pause_writing(self) -> None:
        self._can_send = self._loop.create_future()

    def resume_writing(self) -> None:
        waiting, self._can_send = self._can_send, None
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        num_before = self._num_body_bytes
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            self._decline(data[offer.args[0] :])
        except httptools.HttpParserError as error:
            self._refuse(400, f"this is not a request of HTTP/1.1: {error}")
        else:
            # The trailer of a chunked body counts as a head too.
            if self.deadline < math.inf and (self._is_in_head or self._num_body_bytes == num_before):
                self._num_head_bytes += len(data)
                if self._num_head_bytes > _MAX_HEAD_BYTES:
                    self._refuse(431, f"the request's head is larger than {_MAX_HEAD_BYTES} bytes")

    # ---- Calls from the parser ----

    def on_message_begin(self) -> None:
        self._wait_for_head(_HEAD_SECONDS)

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        # A chunked body may be followed by further headers.
        if self._is_in_head:
            self._headers.append((decoded(name), decoded(value)))

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self.deadline = self._loop.time() + _BODY_SECONDS
        if self.task is None and (header_of(self._headers, "expect") or "").lower() == "100-continue":
            self.transport.write(_CONTINUE)

    def on_body(self, body: bytes) -> None:
        self._num_body_bytes += len(body)
        if self._num_body_bytes <= _MAX_BODY_BYTES:
            self._body.append(body)
        else:
            self._body.clear()
            self._refuse(413, f"the request's body is larger than {_MAX_BODY_BYTES} bytes")

    def on_message_complete(self) -> None:
        if self._is_refused or self._parser.should_upgrade():
            return
        self.deadline = math.inf
        is_kept, is_http_1_0 = self._parser.should_keep_alive(), self._parser.get_http_version() == "1.0"
        line = self._parser.get_method().decode(), decoded(self._target)
        self._requests.append(Request(*line, tuple(self._headers), b"".join(self._body), is_http_1_0, is_kept))
        if self.task is None:
            self._start()
        else:
            self.transport.pause_reading()

    # ---- Answers ----

    def send(self, data: bytes) -> bool:
        """Returns False if the client is slower than its answer. Raises ClientLeftError."""
        if self.transport.is_closing():
            raise ClientLeftError("the client has left")
        self.transport.write(data)
        return self._can_send is None

    async def drained(self) -> None:
        """Waits until the client can take more data. Raises ClientLeftError."""
        if self._can_send is not None:
            await self._can_send
        if self.transport.is_closing():
            raise ClientLeftError("the client has left")

    def close_when_answered(self) -> None:
        self.is_last = True
        if self.task is None:
            self.transport.close()

    def _start(self) -> None:
        self.task = self._loop.create_task(self._answer(self._requests.popleft()))

    async def _answer(self, request: Request) -> None:
        response = Response(self, request)
        response.is_kept = request.is_kept and not self.is_last
        # A client that disconnects is not an error; the connection is closed then.
        with contextlib.suppress(ClientLeftError):
            try:
                await self._handler(request, response)
            except ClientLeftError:
                raise
            except Exception as error:
                logger.exception("%s %s has failed", request.method, request.target)
                if response.has_begun or isinstance(error, OSError):
                    self.transport.abort()
                else:
                    await response.refuse(500, "the router has failed on this request")
        self.task = None
        if not response.is_complete or not response.is_kept or self.is_last:
            self.transport.close()
        elif self._requests:
            self._start()
        else:
            # Unless the next request has begun to arrive.
            if self.deadline == math.inf:
                self.deadline = self._loop.time() + _IDLE_SECONDS
            self.transport.resume_reading()

    def _wait_for_head(self, seconds: float) -> None:
        self._is_in_head = True
        self._target = b""
        self._headers: list[tuple[str, str]] = []
        self._body: list[bytes] = []
        self._num_head_bytes = self._num_body_bytes = 0
        self.deadline = self._loop.time() + seconds

    def _decline(self, rest: bytes) -> None:
        """Ignores the client's offer of another protocol: its request is read as one without the offer."""
        if self._parser.get_method() == b"CONNECT":
            self._refuse(405, "this is not a proxy for other protocols")
            return
        lines = [f"{self._parser.get_method().decode()} {decoded(self._target)} HTTP/1.1\r\n"]
        lines += [f"{name}: {value}\r\n" for name, value in self._headers if name.lower() not in _UPGRADE_HEADERS]
        self._parser = httptools.HttpRequestParser(self)
        self.data_received(encoded("".join(lines)) + b"\r\n" + rest)

    def _refuse(self, status: int, message: str) -> None:
        """Discards further data from the client, which may take a while to finish sending."""
        if self._is_refused:
            return
        self._is_refused = True
        if self.task is not None:
            self.transport.abort()
            return
        body = error_body(status, message)
        head = f"{_STATUS_LINES[status]}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        self.transport.write(head.encode() + b"Connection: close\r\n\r\n" + body)
        self.transport.write_eof()
        self.deadline = self._loop.time() + _LINGER_SECONDS


@contextlib.asynccontextmanager
async def serving(handler: Handler, host: str, port: int) -> AsyncGenerator[str]:
    """Yields the server's URL. Raises ConfigError if the address cannot be bound, or is empty, which would mean all
    interfaces.
    """
    if not host:
        raise ConfigError("host is empty: name the address to listen on, such as 127.0.0.1")
    loop = asyncio.get_running_loop()
    connections: set[Connection] = set()
    try:
        server = await loop.create_server(lambda: Connection(handler, connections), host, port, backlog=_BACKLOG)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.args[-1]}") from None

    def close_overdue() -> None:
        nonlocal sweep
        for each in [each for each in connections if each.deadline < loop.time()]:
            each.transport.abort()
        sweep = loop.call_later(_SWEEP_SECONDS, close_overdue)

    sweep = loop.call_later(_SWEEP_SECONDS, close_overdue)
    try:
        yield f"http://{in_url(host)}:{server.sockets[0].getsockname()[1]}"
    finally:
        sweep.cancel()
        server.close()
        for each in list(connections):
            each.close_when_answered()
        tasks = {each.task for each in connections if each.task is not None}
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=_FLUSH_SECONDS)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        for each in list(connections):
            each.transport.abort()
