"""The bodies and headers sent to the instances, and the error bodies if no instance can answer.

Serial style (as for vLLM's NixlConnector): the prefill instance gets the request with one output token, and the KV
parameters in its response are sent with the request to the decode instance. Concurrent style (as for vLLM's
MooncakeConnector): both get the request at once, with a common id by which they find each other.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

COMPLETIONS = ("/v1/completions", "/v1/chat/completions")
"""The requests whose prompt another instance can compute, if they have one."""
_PARAMS = "kv_transfer_params"
_BYTES_PER_TOKEN = 4
# Fields that do not affect the single token of the prefill instance. Tools stay, as they are a part of the prompt.
_NOT_FOR_PREFILL = ("stream_options", "min_tokens", "response_format")
# Headers of one connection (RFC 9110, 7.6.1), or generated for each.
_OF_A_CONNECTION = frozenset(
    {
        "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
        "transfer-encoding", "upgrade", "host", "content-length", "expect",
    }
)  # fmt: skip
# A body that is forwarded unchanged keeps its length.
_NOT_FOR_CLIENTS = _OF_A_CONNECTION - {"content-length"}
_KINDS = {400: "invalid_request_error", 403: "permission_error", 503: "service_unavailable_error"}

Headers = tuple[tuple[str, str], ...]


def header_of(headers: Iterable[tuple[str, str]], name: str) -> str | None:
    """Returns the first value. `name` is in lower case."""
    for each, value in headers:
        if each.lower() == name:
            return value
    return None


def forwarded_headers(headers: Iterable[tuple[str, str]]) -> Headers:
    """Returns a client's headers for an instance: all, including authentication, except those of the connection."""
    return tuple([each for each in headers if each[0].lower() not in _OF_A_CONNECTION])


def answer_headers(headers: Iterable[tuple[str, str]]) -> Headers:
    """Returns an instance's headers for the client."""
    return tuple([each for each in headers if each[0].lower() not in _NOT_FOR_CLIENTS])


def decoded(data: bytes) -> str:
    """Decodes any bytes of a head to a string, from which `encoded` makes the same bytes."""
    return data.decode("utf-8", "surrogateescape")


def encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def headers_for_prefill(headers: Headers) -> Headers:
    """Returns the headers for a body made here, whose response is read here."""
    kept = tuple((name, value) for name, value in headers if name.lower() not in ("content-type", "accept-encoding"))
    return (*kept, ("Content-Type", "application/json"), ("Accept-Encoding", "identity"))


def parse_object(data: bytes) -> dict[str, Any] | None:
    """Returns None for anything but a JSON object: the instance reports the error."""
    try:
        body = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return body if isinstance(body, dict) else None


def only_prompt(body: Mapping[str, Any]) -> str | list[int] | None:
    """Returns the prompt of a completion, also from a list of one; None for several prompts or an invalid one."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    is_prompt = isinstance(prompt, str) or (isinstance(prompt, list) and all(type(each) is int for each in prompt))
    return prompt if is_prompt else None


def estimate_tokens(num_bytes: int) -> int:
    """Estimates a request's prompt tokens from the size of its body."""
    return num_bytes // _BYTES_PER_TOKEN + 1


def is_divisible(body: Mapping[str, Any]) -> bool:
    """Returns whether the request has a single prompt, which a prefill instance can compute."""
    return "messages" in body or not isinstance(body.get("prompt"), list) or only_prompt(body) is not None


def with_params(data: bytes, body: Mapping[str, Any], params: Mapping[str, Any]) -> bytes:
    """Adds `kv_transfer_params` to the client's request, for the decode instance. `body` is `data` parsed."""
    if not body or _PARAMS in body:
        return msgspec.json.encode({**body, _PARAMS: params})
    # Avoids encoding a long prompt again.
    return data.rstrip()[:-1] + b"," + msgspec.json.encode({_PARAMS: params})[1:]


def prefill_serially(body: Mapping[str, Any]) -> bytes:
    return _for_one_token(body, {"do_remote_decode": True, "do_remote_prefill": False})


def prefill_beside(body: Mapping[str, Any], transfer_id: str) -> bytes:
    return _for_one_token(body, {"do_remote_decode": True, "transfer_id": transfer_id})


def decode_beside(transfer_id: str, bootstrap: str, engine_id: Any) -> dict[str, Any]:
    """Returns the decode instance's parameters in the concurrent style."""
    return {
        "do_remote_prefill": True,
        "transfer_id": transfer_id,
        "remote_bootstrap_addr": bootstrap,
        "remote_engine_id": engine_id,
    }


def _for_one_token(body: Mapping[str, Any], params: Mapping[str, Any]) -> bytes:
    """Returns the same request for one token, not streamed."""
    asked = {name: value for name, value in body.items() if name not in _NOT_FOR_PREFILL}
    limits = {name: 1 for name in ("max_tokens", "max_completion_tokens") if name in body} or {"max_tokens": 1}
    return msgspec.json.encode({**asked, **limits, "stream": False, _PARAMS: params})


def error_body(status: int, message: str) -> bytes:
    """Returns `{"error": {...}}` in the format of the OpenAI API."""
    return json.dumps(
        {"error": {"message": message, "type": _KINDS.get(status, "server_error"), "param": None, "code": None}}
    ).encode()
