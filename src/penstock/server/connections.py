"""HTTP connections: uvicorn's, with limits of a request's head in bytes and in time, and with the bodies of requests
that offer another protocol, as clients in Java and `curl --http2` offer HTTP/2.
"""

from __future__ import annotations

import asyncio
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from penstock.server import limits

_OFFER = (b"connection", b"upgrade", b"http2-settings")


class _Parser:
    """Parses a request that offers another protocol as if it did not; no other protocol is supported here.

    httptools treats everything after the head of such a request as data of the other protocol.
    """

    def __init__(self, protocol: HttpToolsProtocol) -> None:
        self._protocol = protocol
        self._begin()

    def _begin(self) -> None:
        self._parser: Any = httptools.HttpRequestParser(self._protocol)
        # As uvicorn's own parser.
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)

    def feed_data(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            method = self._parser.get_method()
            if method == b"CONNECT":
                raise httptools.HttpParserError("this is not a proxy") from None
            kept = [b"%b: %b\r\n" % header for header in self._protocol.headers if header[0] not in _OFFER]
            head = b"%b %b HTTP/1.1\r\n%b\r\n" % (method, self._protocol.url, b"".join(kept))
            self._begin()
            self._parser.feed_data(head + data[offer.args[0] :])


class Connection(HttpToolsProtocol):
    """Also closed if the head of its next request is too large or is not completed in time."""

    parser: Any

    _timer: asyncio.TimerHandle | None = None
    _num_bytes = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.parser = _Parser(self)

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_here()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        self._expect_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._head_is_here()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def on_body(self, body: bytes) -> None:
        self._num_bytes = 0
        super().on_body(body)

    def data_received(self, data: bytes) -> None:
        # The trailer of a chunked body counts as a head too.
        self._num_bytes += len(data)
        super().data_received(data)
        if self._num_bytes > limits.MAX_HEAD_BYTES:
            self.transport.abort()
        elif self._timer is None and self.cycle is not None and self.cycle.response_complete:
            # Any data ends uvicorn's timeout of an idle connection, also an empty line and the rest of a refused body.
            self._expect_head()

    def _expect_head(self) -> None:
        self._head_is_here()
        self._num_bytes = 0
        self._timer = self.loop.call_later(limits.MAX_HEAD_SECONDS, self.transport.abort)

    def _head_is_here(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
