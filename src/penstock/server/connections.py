"""Connections that bring no request: uvicorn bounds a request's head neither in bytes nor in time, so this does."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from penstock.server import limits


class BoundedHeads(HttpToolsProtocol):
    """Closes a connection whose next request's head is too large, or has begun and does not end."""

    _timer: asyncio.TimerHandle | None = None
    _num_bytes = 0

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
        self._head_is_here()
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._timer is not None:
            self._num_bytes += len(data)
            if self._num_bytes > limits.MAX_HEAD_BYTES:
                self.transport.abort()

    def _expect_head(self) -> None:
        self._head_is_here()
        self._num_bytes = 0
        self._timer = self.loop.call_later(limits.MAX_HEAD_SECONDS, self.transport.abort)

    def _head_is_here(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
