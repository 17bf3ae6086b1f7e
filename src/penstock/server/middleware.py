"""Checks of every HTTP request before the routes: authentication, origin and body size.

Plain ASGI callables, so that streams pass through them untouched.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import Sequence
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import HTMLResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.metrics.prometheus import PrometheusMetrics
from penstock.server import limits
from penstock.server.errors import error_response
from penstock.utils.hosts import is_local_host
from penstock.utils.machine import release_freed_memory

OPEN_PATHS = ("/health", "/ready")
# After a larger body, freed memory is returned to the system: parsing takes several times the body's size.
_LARGE_BODY_BYTES = 1 << 20
# For how long a refused body is still received and discarded.
_LINGER_SECONDS = 5.0
_STATIC = Path(__file__).parent / "static"
PAGES = {"/dashboard": _STATIC / "dashboard.html", "/docs": _STATIC / "docs.html"}


class Authentication:
    """Denies by default: without one of the keys only the open paths are served.

    A page is served with status 401 and prompts for the key. The given key is stored in the scope as `api_key`, for
    state that is separate for each key.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], open_paths: Sequence[str] = ()) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._keys and scope["path"] not in self._open_paths:
            key = self._given_key(scope)
            if key is None:
                await self._refusal(scope)(scope, receive, send)
                return
            scope["api_key"] = key
        await self._app(scope, receive, send)

    def _given_key(self, scope: Scope) -> bytes | None:
        kind, _, value = Headers(scope=scope).get("authorization", "").partition(" ")
        given = value.strip().encode("utf-8", "replace")
        # All keys are compared, each in constant time, so that timing reveals nothing about a guess.
        matches = [hmac.compare_digest(given, key) for key in self._keys]
        return given if kind.lower() == "bearer" and any(matches) else None

    @staticmethod
    def _refusal(scope: Scope) -> Response:
        headers = {"WWW-Authenticate": "Bearer"}
        if scope["path"] in PAGES and scope["method"] == "GET":
            return HTMLResponse(PAGES[scope["path"]].read_bytes(), status_code=401, headers=headers)
        message = "this server needs an API key: send it as `Authorization: Bearer KEY`"
        return error_response(401, message, code="invalid_api_key", headers=headers)


class LocalHosts:
    """Refuses requests that name a host other than this machine, and requests by foreign web pages.

    For a server without keys on a loopback address: a web page may resolve its own name to 127.0.0.1, and the browser
    would then allow access (DNS rebinding); and browsers send simple requests for any page, with its `Origin`.
    """

    def __init__(self, app: ASGIApp, origins: Sequence[str] = ()) -> None:
        self._app = app
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            origin = headers.get("origin")
            is_own = origin is None or origin in self._origins or is_local_host(origin.partition("://")[2] or "-")
            if not is_own:
                message = f"pages of {origin} may not use this server without --allowed-origin"
                await error_response(403, message)(scope, receive, send)
                return
            if not is_local_host(headers.get("host", "")):
                message = "the Host header names another machine: use localhost or 127.0.0.1, or start with --api-key"
                await error_response(403, message)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class BodyLimit:
    """Reads the body before it is parsed, within limits of bytes and seconds."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal, body = None, b""
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdecimal() and int(declared.lstrip("0") or 0) > self._max_bytes:
            refusal = self._too_large()
        else:
            try:
                async with asyncio.timeout(limits.MAX_BODY_SECONDS):
                    body = await self._read(receive)
            except TimeoutError:
                refusal = error_response(408, f"the body took longer than {limits.MAX_BODY_SECONDS:g} s to arrive")
            if len(body) > self._max_bytes:
                refusal = self._too_large()
        if refusal is not None:
            # The rest of the body may be endless, so the connection cannot be reused.
            refusal.headers["Connection"] = "close"
            await refusal(scope, receive, _lingering(receive, send))
            return
        is_large = len(body) >= _LARGE_BODY_BYTES
        replayed = _replay(body, receive)
        del body
        await self._app(scope, replayed, send)
        if is_large:
            del replayed
            asyncio.get_running_loop().run_in_executor(None, release_freed_memory)

    def _too_large(self) -> Response:
        return error_response(413, f"the body is larger than max_body_bytes={self._max_bytes}")

    async def _read(self, receive: Receive) -> bytes:
        """Reads the body, or slightly more than its bound."""
        pieces: list[bytes] = []
        size = 0
        while size <= self._max_bytes:
            message = await receive()
            if message["type"] == "http.disconnect":
                break
            pieces.append(message.get("body", b""))
            size += len(pieces[-1])
            if not message.get("more_body", False):
                break
        return b"".join(pieces)


def _lingering(receive: Receive, send: Send) -> Send:
    """A `send` that continues to receive for a moment before the connection is closed.

    Closing while the client is still sending would reset the connection, and the client would not receive the response.
    """

    async def lingering(message: Message) -> None:
        if message["type"] != "http.response.body":
            await send(message)
            return
        await send({**message, "more_body": True})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_SECONDS):
                while (await receive()).get("more_body", False):
                    pass
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return lingering


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that returns the body at once, then all later messages."""
    is_given = False

    async def replay() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


class Accounting:
    """Counts responses by route and status, and clients that disconnected before the response was complete."""

    def __init__(self, app: ASGIApp, metrics: PrometheusMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_over = False

        async def watched_receive() -> Message:
            nonlocal is_over
            message = await receive()
            if message["type"] == "http.disconnect" and not is_over:
                is_over = True
                self._metrics.on_disconnect()
            return message

        async def counted_send(message: Message) -> None:
            nonlocal is_over
            if message["type"] == "http.response.start":
                # Unknown paths share one name, so that clients cannot fill the table with invented paths.
                route = getattr(scope.get("route"), "path", "unmatched")
                self._metrics.on_http(route, scope["method"], message["status"])
            elif not message.get("more_body", False):
                is_over = True
            await send(message)

        await self._app(scope, watched_receive, counted_send)
