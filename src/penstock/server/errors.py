"""From exceptions to the OpenAI API's error bodies: one table of kinds, one shape."""

from __future__ import annotations

import http
from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from penstock.utils import logging
from penstock.utils.errors import EngineDeadError, OverloadedError, PenstockError, RequestError

logger = logging.get_logger(__name__)

_RETRY_AFTER_SECONDS = "1"
_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    500: "internal_server_error",
    503: "service_unavailable_error",
}


class NotFoundError(RequestError):
    """The request names a model, or what `field` says, that is not here."""

    def __init__(self, message: str, field: str = "model", code: str | None = "model_not_found") -> None:
        super().__init__(message, field, code)


class JSONResponse(Response):
    """JSON through msgspec, which is what streams use too."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """`{"error": {...}}` as the OpenAI API has it."""
    # What is wrong with a text may be that it cannot be sent.
    text = message.encode("utf-8", "replace").decode()
    name = None if param is None else param.encode("utf-8", "replace").decode()
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "internal_server_error")
    return {"error": {"message": text, "type": kind, "param": name, "code": code}}


def error_response(
    status: int,
    message: str,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    return JSONResponse(error_body(status, message, param, code), status_code=status, headers=headers)


def status_of(error: PenstockError) -> int:
    """The HTTP status that says whose fault it was."""
    if isinstance(error, NotFoundError):
        return 404
    if isinstance(error, RequestError):
        return 400
    return 503 if isinstance(error, OverloadedError | EngineDeadError) else 500


def penstock_error_body(error: PenstockError) -> dict[str, Any]:
    field, code = getattr(error, "field", None), getattr(error, "code", None)
    return error_body(status_of(error), str(error), field, code)


def install(app: FastAPI) -> None:
    """Makes every error of the app an OpenAI error body."""

    @app.exception_handler(PenstockError)
    async def on_penstock_error(_: Request, error: PenstockError) -> Response:
        status = status_of(error)
        headers = {"Retry-After": _RETRY_AFTER_SECONDS} if isinstance(error, OverloadedError) else None
        return JSONResponse(penstock_error_body(error), status_code=status, headers=headers)

    @app.exception_handler(RequestValidationError)
    async def on_invalid_body(_: Request, error: RequestValidationError) -> Response:
        return error_response(400, *_describe(error))

    @app.exception_handler(HTTPException)
    async def on_http_error(_: Request, error: HTTPException) -> Response:
        message = error.detail if isinstance(error.detail, str) else http.HTTPStatus(error.status_code).phrase
        return error_response(error.status_code, message, headers=error.headers)

    @app.exception_handler(Exception)
    async def on_bug(_: Request, error: Exception) -> Response:
        # The server's own log tells the rest; a client gets no internals.
        logger.error("a request failed", exc_info=error)
        return error_response(500, "the server failed on this request; its log says why")


def _describe(error: RequestValidationError) -> tuple[str, str | None]:
    """The deepest thing that is wrong, as `field: what`, and the field.

    Where a field may have several types there is an error for each, and the one that got furthest is the one meant.
    """
    found = max(error.errors(), key=lambda each: (len(_path(each, error.body)), not each["type"].endswith("_type")))
    path = _path(found, error.body)
    field = path[0] if path else None
    if found["type"] == "json_invalid":
        return f"the body is not JSON: {found.get('ctx', {}).get('error', found['msg'])}", None
    if found["type"] == "extra_forbidden":
        return f"{'.'.join(path)} is not a field of this request", field
    return f"{'.'.join(path) or 'the body'}: {found['msg']}", field


def _path(error: dict[str, Any], body: Any) -> list[str]:
    """Where in the body the error is, without the names of types that were tried on the way."""
    path: list[str] = []
    for part in error["loc"][1:]:
        is_there = (isinstance(body, dict) and part in body) or (isinstance(body, list) and isinstance(part, int))
        if is_there or (error["type"] == "missing" and part == error["loc"][-1]):
            path.append(str(part))
            body = body[part] if is_there else None
    return path
