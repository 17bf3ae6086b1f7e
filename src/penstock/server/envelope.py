"""Handles headers: defaults for those that clients omit, and those of every response."""

from __future__ import annotations

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.server.openai.dialects import ignored_fields
from penstock.server.sse import REQUEST_ID_HEADER, client_request_id

IGNORED_FIELDS_HEADER = "X-Ignored-Fields"
_MAX_SHOWN_NAME = 64
# The default of many clients. All bodies here are JSON; forms are not supported.
_FORGOTTEN_TYPES = ("", "application/x-www-form-urlencoded")


class Envelope:
    """Treats a body without a content type as JSON, returns the client's request id, and forbids framing of pages.

    With `ignores_unknown_fields`, a response header names the request's ignored fields.
    """

    def __init__(self, app: ASGIApp, ignores_unknown_fields: bool) -> None:
        self._app = app
        self._ignores_unknown_fields = ignores_unknown_fields

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if headers.get("content-type", "") in _FORGOTTEN_TYPES:
            others = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
            scope = {**scope, "headers": [*others, (b"content-type", b"application/json")]}
        ignored: list[str] = []
        token = ignored_fields.set(ignored if self._ignores_unknown_fields else None)
        request_id = client_request_id(headers)

        async def sealed_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer = MutableHeaders(scope=message)
                if request_id is not None:
                    answer.setdefault(REQUEST_ID_HEADER, request_id)
                if ignored:
                    answer[IGNORED_FIELDS_HEADER] = ", ".join(dict.fromkeys(map(_shown, ignored)))
                if answer.get("content-type", "").startswith("text/html"):
                    answer["Content-Security-Policy"] = "frame-ancestors 'none'"
                    answer["X-Frame-Options"] = "DENY"
            await send(message)

        try:
            await self._app(scope, receive, sealed_send)
        finally:
            ignored_fields.reset(token)


def _shown(name: str) -> str:
    """Returns a field's name in a form that a header can contain."""
    return "".join(char if char.isascii() and char.isalnum() else "_" for char in name[:_MAX_SHOWN_NAME])
