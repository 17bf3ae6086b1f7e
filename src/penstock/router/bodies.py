"""The bodies and headers sent to the instances, and the error bodies if no instance can answer.

Serial style (as for vLLM's NixlConnector): the prefill instance gets the request with one output token, and the KV
parameters in its response are sent with the request to the decode instance. Concurrent style (as for vLLM's
MooncakeConnector): both get the request at once, with a common id by which they find each other.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from penstock.utils.errors import RequestError
from penstock.utils.stream_reports import STREAM_HEADER

COMPLETIONS = ("/v1/completions", "/v1/chat/completions")
"""The requests whose prompt another instance can compute, if they have one."""
_RESPONSES = "/v1/responses"
_GENERATIONS = (*COMPLETIONS, _RESPONSES, "/v1/messages")
"""The requests for generated text."""
_PARAMS = "kv_transfer_params"
_OUTPUT = "output_token_ids"
_FINISHED = "finished_choices"
# In `kv_transfer_params`: these make an instance hold KV for another one, or fetch KV from an address.
_TRANSFER_PARAMS = ("do_remote_decode", "do_remote_prefill")
_MAX_DEPTH = 128
_BYTES_PER_TOKEN = 4
# Instances that report streams refuse more.
_MAX_COMPLETIONS = 1024
# Fields that do not affect the single token of the prefill instance. Tools stay, as they are a part of the prompt.
_NOT_FOR_PREFILL = ("stream_options", "min_tokens", "response_format", _OUTPUT, _FINISHED)
# Headers of one connection (RFC 9110, 7.6.1), or generated for each.
_CONNECTION_HEADERS = frozenset(
    {
        "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
        "transfer-encoding", "upgrade", "host", "content-length", "expect",
    }
)  # fmt: skip
# A body that is forwarded unchanged keeps its length.
_NOT_FOR_CLIENTS = _CONNECTION_HEADERS - {"content-length"}
# For other statuses see `error_body`.
_KINDS = {403: "permission_error", 404: "not_found_error", 503: "service_unavailable_error"}

Headers = tuple[tuple[str, str], ...]


class ClientRequest(msgspec.Struct, frozen=True):
    """A client's request. `path` is without the query, `target` with it. `completion` is the body of a request for
    generated text, None for others.
    """

    method: str
    path: str
    target: str
    headers: Headers
    body: bytes
    completion: dict[str, Any] | None = None

    @property
    def client(self) -> str:
        """What tells clients apart: the API key, "" without one."""
        return header_of(self.headers, "authorization") or header_of(self.headers, "x-api-key") or ""

    def model(self) -> str:
        """Returns the name of the model in the body, "" if it has none."""
        if self.completion is not None:
            found = self.completion.get("model")
            return found if isinstance(found, str) else ""
        try:
            return _decode_model(self.body).model or ""
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return ""

    @property
    def is_streamed(self) -> bool:
        return self.completion is not None and self.completion.get("stream") is True

    @property
    def is_timed(self) -> bool:
        """Whether the first part of the answer comes with the first token. A response begins with other events."""
        return self.is_streamed and self.path != _RESPONSES

    @property
    def num_completions(self) -> int:
        """The number of completions of each prompt, as far as the number is valid."""
        count = (self.completion or {}).get("n")
        return count if isinstance(count, int) and 0 < count <= _MAX_COMPLETIONS else 1

    @property
    def finished_choices(self) -> set[int]:
        """The completions that the client says have ended before."""
        given = (self.completion or {}).get(_FINISHED)
        return {each for each in given if isinstance(each, int)} if isinstance(given, list) else set()

    def estimate_tokens(self) -> int:
        """Estimates the prompt's tokens, from the body's size unless it has a list of them."""
        given = only_prompt(self.completion or {})
        return len(given) if isinstance(given, list) else estimate_tokens(len(self.body))

    def is_divisible(self) -> bool:
        return self.path in COMPLETIONS and self.completion is not None and is_divisible(self.completion)

    def may_be_reported(self) -> bool:
        """Returns whether the answer is a stream, which the client does not follow itself."""
        return self.is_streamed and header_of(self.headers, STREAM_HEADER.lower()) is None


class _Named(msgspec.Struct):
    model: str | None = None


_decode_model = msgspec.json.Decoder(_Named).decode


def header_of(headers: Iterable[tuple[str, str]], name: str) -> str | None:
    """Returns the first value. `name` is in lower case."""
    for each, value in headers:
        if each.lower() == name:
            return value
    return None


def forwarded_headers(headers: Iterable[tuple[str, str]]) -> Headers:
    """Returns a client's headers for an instance: all, including authentication, except those of the connection."""
    return tuple([each for each in headers if each[0].lower() not in _CONNECTION_HEADERS])


def answer_headers(headers: Iterable[tuple[str, str]]) -> Headers:
    """Returns an instance's headers for the client."""
    return tuple([each for each in headers if each[0].lower() not in _NOT_FOR_CLIENTS])


def decoded(data: bytes) -> str:
    """Decodes any bytes of a head to a string, from which `encoded` makes the same bytes."""
    return data.decode("utf-8", "surrogateescape")


def encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def headers_for_json(headers: Headers) -> Headers:
    """Returns the headers for a body made here."""
    kept = tuple(each for each in headers if each[0].lower() not in ("content-type", "content-encoding"))
    return (*kept, ("Content-Type", "application/json"))


def headers_for_prefill(headers: Headers) -> Headers:
    """Returns the headers for a body made here, whose response is read here."""
    kept = tuple(each for each in headers_for_json(headers) if each[0].lower() != "accept-encoding")
    return (*kept, ("Accept-Encoding", "identity"))


def parse_object(data: bytes) -> dict[str, Any] | None:
    """Returns None for anything but a JSON object (RFC 8259), and for one that is nested too deeply to be processed."""
    try:
        body = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return body if isinstance(body, dict) and not _is_deep(data, body) else None


def _is_deep(data: bytes, body: dict[str, Any]) -> bool:
    if data.count(b"{") + data.count(b"[") <= _MAX_DEPTH:
        return False
    level: list[Any] = [body]
    for _ in range(_MAX_DEPTH):
        inner = itertools.chain.from_iterable(each.values() if isinstance(each, dict) else each for each in level)
        level = [each for each in inner if isinstance(each, dict | list)]
        if not level:
            return False
    return True


def models_of(data: bytes) -> list[tuple[str, dict[str, Any]]]:
    """Returns the names and the descriptions in an answer to `GET /v1/models`."""
    found = (parse_object(data) or {}).get("data")
    listed = [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []
    return [(each["id"], each) for each in listed if isinstance(each.get("id"), str)]


def generation_path(method: str, path: str) -> str | None:
    """Returns the path of a request for generated text as instances know it; None for other requests.

    Instances redirect a path with a slash at its end, to themselves.
    """
    path = path.rstrip("/")
    return path if method == "POST" and path in _GENERATIONS else None


def read_completion(headers: Headers, data: bytes) -> dict[str, Any]:
    """Returns the body of a request for a completion, without what only the router may ask for. Raises RequestError.

    Instances get what is read here, never the client's bytes: a body that means one thing here and another there could
    be a request that this router would not send.
    """
    types = [value for name, value in headers if name.lower() == "content-type"]
    if len(types) > 1 or not all(map(_is_json, types)):
        raise RequestError("the Content-Type of a request for a completion must be application/json")
    if any(name.lower() == "content-encoding" and value.lower() != "identity" for name, value in headers):
        raise RequestError("the body must not be compressed: send it without Content-Encoding")
    body = parse_object(data)
    if body is None:
        raise RequestError(
            f"the body must be a JSON object in UTF-8, without a byte order mark, and nested at most {_MAX_DEPTH} deep"
        )
    params = body.get(_PARAMS)
    if isinstance(params, dict):
        body[_PARAMS] = {name: value for name, value in params.items() if name not in _TRANSFER_PARAMS}
    return body


def _is_json(content_type: str) -> bool:
    """Returns whether instances read a body of this type as JSON, as they do without a type, and with that of curl."""
    kind = content_type.partition(";")[0].strip().lower()
    is_json = kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))
    return is_json or kind in ("", "application/x-www-form-urlencoded")


def encode(body: Mapping[str, Any]) -> bytes:
    return msgspec.json.encode(body)


def only_prompt(body: Mapping[str, Any]) -> str | list[int] | None:
    """Returns the prompt of a completion, also from a list of one; None for several prompts or an invalid one."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    is_prompt = isinstance(prompt, str) or (isinstance(prompt, list) and {int}.issuperset(map(type, prompt)))
    return prompt if is_prompt else None


def estimate_tokens(num_bytes: int) -> int:
    """Estimates a request's prompt tokens from the size of its body."""
    return num_bytes // _BYTES_PER_TOKEN + 1


def is_divisible(body: Mapping[str, Any]) -> bool:
    """Returns whether the request has a single prompt and answer, so that a prefill instance can compute the prompt."""
    if body.get("n") not in (None, 1):
        return False
    return "messages" in body or not isinstance(body.get("prompt"), list) or only_prompt(body) is not None


def with_params(data: bytes, body: Mapping[str, Any], params: Mapping[str, Any]) -> bytes:
    """Adds `kv_transfer_params` to a request, for the decode instance. `data` is `body` encoded."""
    if not body or _PARAMS in body:
        return encode({**body, _PARAMS: params})
    # Avoids encoding a long prompt again.
    return data[:-1] + b"," + msgspec.json.encode({_PARAMS: params})[1:]


def continued(body: Mapping[str, Any], token_ids: Sequence[Sequence[int]], finished: Collection[int]) -> dict[str, Any]:
    """Returns the request for the rest of an answer of whose completions the client has these tokens, and what precedes
    them; it has all of those that are `finished`.
    """
    kept = {name: value for name, value in body.items() if name != "prompt_logprobs"}
    given: Sequence[Any] = body.get(_OUTPUT) or ()
    if len(token_ids) == 1:
        return {**kept, _OUTPUT: [*given, *token_ids[0]]}
    before = given or [()] * len(token_ids)
    ended = {*(body.get(_FINISHED) or ()), *finished}
    return {
        **kept,
        _OUTPUT: [[*one, *other] for one, other in zip(before, token_ids, strict=True)],
        _FINISHED: sorted(ended),
    }


def shared_prefix_body(body: Mapping[str, Any], token_ids: Sequence[int]) -> bytes:
    """Returns the request by which an instance offers its KV of these first tokens of the prompt."""
    kept = {name: body[name] for name in ("model", "cache_salt", "priority") if name in body}
    return prefill_body({**kept, "prompt": token_ids}, {"do_remote_prefill": False})


def concurrent_decode_params(transfer_id: str, bootstrap: str, engine_id: Any) -> dict[str, Any]:
    """Returns the decode instance's parameters in the concurrent style."""
    source = {"remote_bootstrap_addr": bootstrap, "remote_engine_id": engine_id}
    return {"do_remote_prefill": True, "transfer_id": transfer_id, **source}


def prefill_body(body: Mapping[str, Any], params: Mapping[str, Any]) -> bytes:
    """Returns the same request for one token, not streamed, whose KV another instance loads by these parameters."""
    kept = {name: value for name, value in body.items() if name not in _NOT_FOR_PREFILL}
    limits = {name: 1 for name in ("max_tokens", "max_completion_tokens") if name in body} or {"max_tokens": 1}
    return encode({**kept, **limits, "stream": False, _PARAMS: {"do_remote_decode": True, **params}})


def error_body(status: int, message: str) -> bytes:
    """Returns `{"error": {...}}` in the format of the OpenAI API."""
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "internal_server_error")
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": None}}).encode()
