"""A client for one streamed completion that takes little of the machine that it shares with the measured router."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from typing import Any

import httptools

_EVENT = b"data: {"


async def stream(url: str, body: Mapping[str, Any], key: str = "none") -> tuple[list[float], float]:
    """Sends one request over a new connection to `http://HOST:PORT`, with an API key.

    Returns when each token of the answer arrived, and when the answer was complete, by `time.perf_counter`.
    Raises ConnectionError if the answer is an error or incomplete.
    """
    address, data = url.removeprefix("http://"), json.dumps(body).encode()
    host, _, port = address.partition(":")
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n"
    head += f"Authorization: Bearer {key}\r\n"
    head += f"Accept: */*\r\nUser-Agent: bench\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
    loop = asyncio.get_running_loop()
    transport, answer = await loop.create_connection(_Stream, host, int(port))
    try:
        transport.write(head.encode() + data)
        return answer.arrived, await answer.complete
    finally:
        transport.close()


class _Stream(asyncio.Protocol):
    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._now = 0.0
        self._rest = b""
        self.arrived: list[float] = []
        self.complete: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        self._parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail("the connection has ended within the answer")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status != 200:
            self._fail(f"status {status}")

    def on_body(self, body: bytes) -> None:
        text = self._rest + body
        self.arrived += [self._now] * text.count(_EVENT)
        self._rest = text[1 - len(_EVENT) :]

    def on_message_complete(self) -> None:
        if not self.complete.done():
            self.complete.set_result(self._now)

    def _fail(self, message: str) -> None:
        if not self.complete.done():
            self.complete.set_exception(ConnectionError(message))
