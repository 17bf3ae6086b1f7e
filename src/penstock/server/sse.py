"""Streaming responses: run while the client is connected, and stop when it disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.server.errors import error_body, penstock_error_body
from penstock.utils import logging
from penstock.utils.errors import PenstockError

logger = logging.get_logger(__name__)

_T = TypeVar("_T")
DONE = b"data: [DONE]\n\n"
REQUEST_ID_HEADER = "X-Request-Id"
_MAX_REQUEST_ID = 256


class ClientGone(Exception):  # noqa: N818 - nothing is wrong, the client has left
    """The client disconnected before its response was ready."""


def client_request_id(headers: Mapping[str, str]) -> str | None:
    """Returns the client's name for its request; None if there is none, or if a header cannot contain it."""
    given = headers.get(REQUEST_ID_HEADER.lower(), "")
    return given if 0 < len(given) <= _MAX_REQUEST_ID and all("!" <= char <= "~" for char in given) else None


def event(data: Any) -> bytes:
    """One server-sent event with JSON data."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def typed_event(data: dict[str, Any]) -> bytes:
    """One server-sent event named after its data's `type`."""
    return b"event: " + data["type"].encode() + b"\n" + event(data)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """Returns the result of `work`. If the client disconnects, cancels it and raises ClientGone."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        await _cancel(task, watch)


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(Response):
    """Server-sent events from an async generator, which is closed when the client disconnects at any time. `close` is
    always called at the end, because a generator that never started would close nothing.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        close: Callable[[], None] = lambda: None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status_code = 200
        self.background = None
        self._events = events
        self._close = close
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send))
        watch = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((sending, watch), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            await _cancel(sending, watch)
            self._close()

    async def _send(self, send: Send) -> None:
        async with aclosing(self._events):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for data in with_errors(self._events, _report):
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def with_errors(
    events: AsyncGenerator[bytes, None], report: Callable[[dict[str, Any]], bytes]
) -> AsyncGenerator[bytes, None]:
    """Yields the events; an error becomes the last one, because the status has already been sent. `report` formats it,
    from the body that the error would have in the OpenAI API.
    """
    try:
        async with aclosing(events):
            async for data in events:
                yield data
    except PenstockError as error:
        yield report(penstock_error_body(error))
    except Exception as error:
        logger.error("a stream failed", exc_info=error)
        yield report(error_body(500, "the server failed on this request; its log says why"))


def _report(body: dict[str, Any]) -> bytes:
    return event(body) + DONE
