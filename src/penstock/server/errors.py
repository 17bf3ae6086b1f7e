"""Converts exceptions to error bodies of the OpenAI API."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match

from penstock.utils import logging
from penstock.utils.errors import EngineDeadError, OverloadedError, PenstockError, RequestError

logger = logging.get_logger(__name__)

_RETRY_AFTER_SECONDS = "1"
_UNREADABLE = "the body is unreadable: send JSON in UTF-8, not deeply nested, with numbers of up to 4300 digits"
_MAX_SHOWN_PATH = 200
_METHODS = ("DELETE", "GET", "HEAD", "POST")
# For other statuses see `error_body`.
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    503: "service_unavailable_error",
}

# Paths of other servers, and what to use here.
_ELSEWHERE = {
    "/api/chat": "/v1/chat/completions",
    "/api/embed": "/v1/embeddings",
    "/api/embeddings": "/v1/embeddings",
    "/api/generate": "/v1/completions",
    "/api/tags": "/v1/models",
    "/completion": "/v1/completions",
    "/embed": "/v1/embeddings",
    "/generate": "/v1/completions",
    "/generate_stream": "/v1/completions",
    "/v1/engines": "/v1/models",
    "/v1/classify": "/classify",
    "/v1/pooling": "/pooling",
    "/v1/tokenize": "/tokenize",
    "/v2/embed": "/v1/embeddings",
    "/v1/detokenize": "/detokenize",
    "/v1/health": "/health",
    "/v1/metrics": "/metrics",
    "/v1/responses/compact": "/v1/responses with the items that the model is to see",
    "/v1/responses/input_tokens": "/tokenize, which counts the tokens of messages",
}


class NotFoundError(RequestError):
    """The request names a model, or another object given by `field`, that does not exist here."""

    def __init__(self, message: str, field: str = "model", code: str | None = "model_not_found") -> None:
        super().__init__(message, field, code)


class ConflictError(RequestError):
    """The request is valid, but not for this server."""


class JSONResponse(Response):
    """JSON encoded by msgspec, as in streams."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Returns `{"error": {...}}` in the OpenAI API's shape."""
    # The message may quote text that cannot be encoded.
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
    """Returns the HTTP status for an error."""
    if isinstance(error, NotFoundError):
        return 404
    if isinstance(error, ConflictError):
        return 409
    if isinstance(error, RequestError):
        return 400
    return 503 if isinstance(error, OverloadedError | EngineDeadError) else 500


def no_such_path(request: Request) -> str:
    """Returns the message of a 404, with the path that the client probably meant, if it can be determined."""
    path = request.url.path
    shown = path if len(path) <= _MAX_SHOWN_PATH else f"{path[:_MAX_SHOWN_PATH]}..."
    if _methods(request, f"/v1{path}"):
        return f"there is no {shown} here, but /v1{path}: end the client's base URL in /v1"
    single = re.sub("^(/v1)+/", "/v1/", path)
    if single != path and _methods(request, single):
        return f"there is no {shown} here, but {single}: the client's base URL has a /v1 too many"
    if single in _ELSEWHERE:
        return f"there is no {shown} here: use {_ELSEWHERE[single]}"
    return f"there is no {shown} here; /docs lists all paths"


def _methods(request: Request, path: str) -> list[str]:
    """Returns the methods that this server has for the path."""
    scopes = [{**request.scope, "path": path, "method": method} for method in _METHODS]
    routes = request.app.routes
    return [each["method"] for each in scopes if any(route.matches(each)[0] is Match.FULL for route in routes)]


def penstock_error_body(error: PenstockError) -> dict[str, Any]:
    return error_body(status_of(error), str(error), getattr(error, "field", None), getattr(error, "code", None))


def install(app: FastAPI) -> None:
    """Installs handlers that return every error of the app as an OpenAI error body."""

    @app.exception_handler(PenstockError)
    async def on_penstock_error(_: Request, error: PenstockError) -> Response:
        headers = {"Retry-After": _RETRY_AFTER_SECONDS} if isinstance(error, OverloadedError) else None
        return JSONResponse(penstock_error_body(error), status_code=status_of(error), headers=headers)

    @app.exception_handler(RequestValidationError)
    async def on_invalid_body(_: Request, error: RequestValidationError) -> Response:
        return error_response(400, *_describe(error))

    @app.exception_handler(UnicodeEncodeError)
    async def on_half_a_character(_: Request, __: UnicodeEncodeError) -> Response:
        # JSON may contain half a surrogate pair, in names too, which the parser of requests cannot put into an error.
        return error_response(400, "the body has text that is not Unicode: half of a surrogate pair")

    @app.exception_handler(RecursionError)
    async def on_deep_nesting(_: Request, __: RecursionError) -> Response:
        # JSON may be nested less deeply than its reader allows, but too deeply to be written again.
        return error_response(400, "the body is nested too deeply")

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        path = request.url.path
        if error.status_code == 404 or path in _ELSEWHERE:
            return error_response(404, no_such_path(request))
        if error.status_code == 405:
            # The error names the methods of one route only.
            allowed = _methods(request, path)
            message = f"{request.method} is not allowed on {path}: use {' or '.join(allowed)}"
            return error_response(405, message, headers={"Allow": ", ".join(allowed)})
        message = _UNREADABLE if error.status_code == 400 else error.detail
        return error_response(error.status_code, message, headers=error.headers)

    @app.exception_handler(Exception)
    async def on_bug(_: Request, error: Exception) -> Response:
        # The server's log has the details; clients get no internals.
        logger.error("a request failed", exc_info=error)
        return error_response(500, "the server failed on this request; its log says why")


def _describe(error: RequestValidationError) -> tuple[str, str | None]:
    """Returns the deepest error as `field: message`, and the field. For a field with several types there is an error
    for each; the one that got furthest is reported.
    """
    found = max(error.errors(), key=lambda each: _rank(each, error.body))
    path = _path(found, error.body)
    field = path[0] if path else None
    own = _own(found)
    if own is not None:
        return f"{'.'.join(path)}: {own}" if path else str(own), field or own.field
    if found["type"] == "model_attributes_type" and not path:
        return "the body must be a JSON object, sent with `Content-Type: application/json`", None
    if found["type"] == "json_invalid":
        return f"the body is not JSON: {found.get('ctx', {}).get('error', found['msg'])}", None
    if found["type"] == "extra_forbidden":
        return f"{'.'.join(path)} is not a field of this request", field
    if found["type"] == "too_long":
        return f"{'.'.join(path)}: at most {found['ctx']['max_length']} items are allowed", field
    return f"{'.'.join(path) or 'the body'}: {found['msg']}", field


def _own(error: dict[str, Any]) -> RequestError | None:
    """Returns the message of one of our own validators, which is better than the library's messages."""
    found = error.get("ctx", {}).get("error")
    return found if isinstance(found, RequestError) else None


def _rank(error: dict[str, Any], body: Any) -> tuple[bool, bool, int, bool]:
    """Ranks an error. A list that is too long has the right type, so errors of the field's other types rank below."""
    is_own, is_too_long = _own(error) is not None, error["type"] == "too_long"
    return is_own, is_too_long, len(_path(error, body)), not error["type"].endswith("_type")


def _path(error: dict[str, Any], body: Any) -> list[str]:
    """Returns the location of the error in the body, without the names of the types that were tried."""
    path: list[str] = []
    for part in error["loc"][1:]:
        is_there = (isinstance(body, dict) and part in body) or (isinstance(body, list) and part in range(len(body)))
        if is_there or (error["type"] == "missing" and part == error["loc"][-1]):
            path.append(str(part))
            body = body[part] if is_there else None
    return path
