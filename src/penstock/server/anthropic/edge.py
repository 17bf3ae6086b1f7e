"""Client conventions of the Messages API's paths: the header for the key, and the shape of errors.

One ASGI callable wraps everything that may refuse a request, so that all errors have this shape.
"""

from __future__ import annotations

import json
import secrets
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_PATH = "/v1/messages"
_KEY_HEADER = "x-api-key"
_REQUEST_ID_HEADER = "request-id"
# OpenAI's error types whose names differ from Anthropic's.
_KINDS = {"internal_server_error": "api_error", "service_unavailable_error": "overloaded_error"}
_TOO_LARGE = 413


def error_of(body: dict[str, Any], status: int = 0, request_id: str | None = None) -> dict[str, Any]:
    """Converts an OpenAI error body to Anthropic's shape."""
    error = body["error"]
    kind = "request_too_large" if status == _TOO_LARGE else _KINDS.get(error["type"], error["type"])
    identity = {} if request_id is None else {"request_id": request_id}
    return {"type": "error", "error": {"type": kind, "message": error["message"]}, **identity}


class MessagesEdge:
    """On the paths of the Messages API, accepts `x-api-key` as a bearer token and converts errors to Anthropic's."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not (scope["path"] == _PATH or scope["path"].startswith(f"{_PATH}/")):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        key = headers.get(_KEY_HEADER)
        if key is not None and "authorization" not in headers:
            # In place: other middleware reads what the router stores in the scope.
            scope["headers"] = [*scope["headers"], (b"authorization", b"Bearer " + key.encode("latin-1"))]
        await self._app(scope, receive, _Translated(send))


class _Translated:
    """A `send` that holds back an error's head until its body, a single message, has arrived."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._held: Message | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(raw=list(message["headers"]))
            headers[_REQUEST_ID_HEADER] = headers.get("x-request-id") or f"req_{secrets.token_hex(12)}"
            message = {**message, "headers": headers.raw}
            if message["status"] >= 400:
                self._held = message
                return
        elif self._held is not None:
            start, self._held = self._held, None
            headers = MutableHeaders(raw=start["headers"])
            body = _translated(message.get("body", b""), start["status"], headers[_REQUEST_ID_HEADER])
            headers["content-length"] = str(len(body))
            await self._send({**start, "headers": headers.raw})
            message = {**message, "body": body}
        await self._send(message)


def _translated(body: bytes, status: int, request_id: str) -> bytes:
    try:
        return json.dumps(error_of(json.loads(body), status, request_id), ensure_ascii=False).encode()
    except (ValueError, KeyError, TypeError):
        return body
