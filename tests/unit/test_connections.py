"""What the server receives besides requests: it ends a connection sooner or later, and is not kept."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import uvicorn

from penstock.server import limits
from penstock.server.connections import Connection
from penstock.server.middleware import Authentication

SECONDS = 10.0
HEAD = b"POST /a HTTP/1.1\r\nHost: localhost\r\n"


async def answer(_: Any, __: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body"})


async def talk(first: bytes, *parts: bytes) -> bytes:
    """Sends a request without a key, and after its answer the parts; returns the answer when the connection ends."""
    app = Authentication(answer, ["key"], ["/open"])
    config = uvicorn.Config(app, port=0, lifespan="off", ws="none", http=Connection, log_config=None)
    server = uvicorn.Server(config)
    async with asyncio.timeout(SECONDS):
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        reader, writer = await asyncio.open_connection(*server.servers[0].sockets[0].getsockname())
        writer.write(first)
        received = await reader.readuntil(b"\r\n\r\n")
        try:
            for part in parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0)
            received += await reader.read()
        except ConnectionError:
            pass
        finally:
            writer.close()
            server.should_exit = True
            await serving
    return received


@pytest.mark.parametrize(
    ("first", "rest"),
    [
        (b"GET /open HTTP/1.1\r\nHost: localhost\r\n\r\n", b"\r\n"),
        (HEAD + b"Content-Length: 9\r\n\r\nb", b"o"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\nb\r\n", b"1\r\n"),
    ],
    ids=["empty line", "part of a refused body", "part of a refused chunk"],
)
def test_a_connection_ends_although_something_has_followed_the_answer(
    monkeypatch: pytest.MonkeyPatch, first: bytes, rest: bytes
) -> None:
    monkeypatch.setattr(limits, "MAX_HEAD_SECONDS", 0.2)
    assert asyncio.run(talk(first, rest)).startswith(b"HTTP/1.1 200 " if b"/open" in first else b"HTTP/1.1 401 ")


@pytest.mark.parametrize("part", [b"X: y\r\n", b"\r\n", b"y"], ids=["trailers", "empty lines", "an endless trailer"])
def test_what_follows_a_body_is_limited(part: bytes) -> None:
    """A client without a key must not fill the memory."""
    first = HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\nb\r\n0\r\n" + (b"X: " if part == b"y" else b"")
    assert asyncio.run(talk(first, *[part * (1 << 14)] * 48)).startswith(b"HTTP/1.1 401 ")


def test_a_refused_body_may_be_large() -> None:
    """The client may read the refusal only after it has sent everything."""
    size = 4 << 20
    first = HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % size
    assert asyncio.run(talk(first + b"b" * size)).startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize("before", [b"", b"GET /open HTTP/1.1\r\nHost: localhost\r\n\r\n"], ids=["first", "second"])
def test_a_request_without_a_path_is_refused(before: bytes, caplog: pytest.LogCaptureFixture) -> None:
    request = b"GET http://localhost HTTP/1.1\r\nHost: localhost\r\n\r\n"
    received = asyncio.run(talk(before, request) if before else talk(request))
    assert b"HTTP/1.1 400 " in received
    assert not [each for each in caplog.records if each.exc_info], "a failure of the connection"
