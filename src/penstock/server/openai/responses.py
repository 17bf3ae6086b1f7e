"""Descriptions of the responses for the OpenAPI document."""

from __future__ import annotations

from typing import Any

from penstock.server.openai.protocol import ErrorBody

_STREAM = {"text/event-stream": {"schema": {"type": "string", "description": "`data: {...}` events, then [DONE]"}}}

ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "The request is invalid; the message names field and bound."},
    "5XX": {"model": ErrorBody, "description": "The engine is full, shutting down or dead."},
}

COMPLETION_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"description": "The completion, or its events with `stream`.", "content": _STREAM},
    **ERRORS,
}
