"""Instances without an engine: they stream numbered tokens, and stop and start on command.

They use the event loop's protocols directly, because one process of them serves every router that is measured: the
less a token costs here, the larger the router's part of a measured time.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import cast

import httptools
import uvloop

_HEALTH = json.dumps({"status": "ok", "reason": None, "ready": True}).encode()
_HEALTH_ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(_HEALTH)
_STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_LAST_CHUNK = b"0\r\n\r\n"


class StubInstance:
    """`POST /v1/completions` answers `{"prompt": NAME, "max_tokens": N}` with N events `{"name": NAME, "token": n}`,
    each sent alone, `token_seconds` after the one before. All other requests answer as a healthy instance.

    `stop` ends the listening socket and all connections at once, and `start` opens it again at the same port.
    """

    def __init__(self, token_seconds: float = 0.0) -> None:
        self.token_seconds = token_seconds
        self.connections: set[_Connection] = set()
        self.is_up = False
        self._server: asyncio.Server | None = None
        self.port = 0
        self.num_deaths = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self.is_up = True
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), "127.0.0.1", self.port, backlog=2048)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Idempotent."""
        self.is_up = False
        server, self._server = self._server, None
        if server is None:
            return
        self.num_deaths += 1
        server.close()
        for each in list(self.connections):
            each.abort()
        await server.wait_closed()


class _Connection(asyncio.Protocol):
    """Answers one request at a time."""

    def __init__(self, stub: StubInstance) -> None:
        self._stub = stub
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._body = b""

    def abort(self) -> None:
        self._transport.abort()

    # ---- Called by the transport ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._stub.connections.add(self)
        if not self._stub.is_up:  # stopped since it accepted the connection
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stub.connections.discard(self)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    # ---- Called by the parser ----

    def on_message_begin(self) -> None:
        self._body = b""

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if self._parser.get_method() != b"POST":
            self._transport.write(_HEALTH_ANSWER + _HEALTH)
            return
        asked = json.loads(self._body)
        self._transport.write(_STREAM_HEAD)
        self._send_token(json.dumps({"name": asked["prompt"]})[:-1], 0, asked["max_tokens"])

    def _send_token(self, opening: str, number: int, num_tokens: int) -> None:
        """`opening` is the beginning of each event's object."""
        if self._transport.is_closing():
            return
        if number == num_tokens:
            self._transport.write(_chunk(b"data: [DONE]\n\n") + _LAST_CHUNK)
            return
        self._transport.write(_chunk(f'data: {opening}, "token": {number}}}\n\n'.encode()))
        self._loop.call_later(self._stub.token_seconds, self._send_token, opening, number + 1, num_tokens)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def serve_on_command(count: int, token_seconds: float) -> None:
    """For a separate process: prints the URLs, and executes lines like `stop 3` and `start 3` until its input ends."""
    stubs = [StubInstance(token_seconds) for _ in range(count)]
    for stub in stubs:
        await stub.start()
    print(*(stub.url for stub in stubs), flush=True)
    commands = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    async for line in commands:
        what, number = line.decode().split()
        await (stubs[int(number)].stop if what == "stop" else stubs[int(number)].start)()
        print("done", flush=True)


if __name__ == "__main__":
    uvloop.run(serve_on_command(int(sys.argv[1]), float(sys.argv[2])))
