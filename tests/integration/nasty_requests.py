"""Requests that no client should send, derived at random from valid ones: a seed determines them all."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
_DIGITS = "9" * 4301
"""More than Python converts to an integer."""
# JSON that no Python value is encoded to.
_LITERALS = (
    "1e400",
    "-1e400",
    "-0",
    "NaN",
    "-Infinity",
    _DIGITS,
    "-" + _DIGITS,
    "1" + "0" * 400,
    "0.1e-999",
    "[" * 5000,
)
_MARK = "literal-in-place-of-this-"
_NUMBERS: tuple[Any, ...] = (
    *(f"{_MARK}{number}-" for number in range(len(_LITERALS))),
    *(None, True, False, 0, 1, -1, 1.0, -0.0, 0.5, 1e308, 80, 65535, 65536),
    *(1 << 31, 1 << 53, 1 << 63, 1 << 64, -(1 << 63)),
    *("0", "1", "080", "+80", "٨٠", "８０", "1_0", "0x50", "80\n", _DIGITS, "-1", "1e3"),
)
_TEXTS: tuple[Any, ...] = (
    *("", " ", "true", "null", "\0", "a\0b", "\n", "\r\nX: y", "\x7f", "\x85", "\u202e", "\ufeff", "\ufffe"),
    *("\ud800", "\udfff\ud800", "é" * 4097, "x" * 70_000, "a" * 300, "%00", "%s%n", "../../etc/passwd", "/", "*"),
    *("{{7*7}}", "<|endoftext|>"),
)
_HOSTS: tuple[Any, ...] = (
    *("localhost", "127.0.0.1", "::1", "::1%\0", "::1%lo", "::1%" + "z" * 300, "::1%a/b", "fe80::1%eth0"),
    *("127.0.0.1\0", "127.1", "2130706433", "0x7f000001", "[::1]", "a..b", "-a", "xn--", "a" * 64 + ".com", "u@::1"),
    *("::ffff:127.0.0.1", "١٢٧.0.0.1", "::1%\ud800"),
)
_ADDRESSES: tuple[Any, ...] = (
    *("http://127.0.0.1:1", "http://[::1%\0]:80", "http://a:b@127.0.0.1:80", "http://127.0.0.1:80/x", "http://[::1"),
    *("http://127.0.0.1:0", "http://127.0.0.1:80#x", "http://127.0.0.1:" + _DIGITS, "file:///etc/passwd", "//x"),
)
_CONTAINERS: tuple[Any, ...] = (
    *([], {}, [[]], [None], {"": None}, {"\0": 1}, {"\ud800": 1}, {"a": {"b": {"c": {}}}}, [[1, 2], [3]], ["a"] * 300),
    *([0] * 5000, {str(number): number for number in range(300)}, {"__proto__": 1, "type": "object"}),
)
_NASTY = (*_NUMBERS, *_TEXTS, *_HOSTS, *_ADDRESSES, *_CONTAINERS)
# Values that look right for a key of `kv_transfer_params`: each of them is sent.
_LIKELY: Mapping[str, Sequence[Any]] = {
    "remote_host": _HOSTS + _TEXTS,
    "remote_port": _NUMBERS,
    "remote_num_tokens": _NUMBERS,
    "remote_engine_id": _TEXTS,
    "ticket": _TEXTS,
    "transfer_id": _TEXTS,
    "remote_bootstrap_addr": _ADDRESSES + _HOSTS,
}
_ENCODINGS = ("utf-8-sig", "utf-16", "utf-16-le", "utf-32", "latin-1", "cp037")
_HEADERS: Mapping[str, Sequence[str]] = {
    "Content-Type": ("", "text/plain", "application/json; charset=utf-16", "application/x-www-form-urlencoded", "*/*"),
    "Content-Encoding": ("identity", "gzip", "br", "x" * 1000),
    "X-Request-Id": ("", "a", "a", "\xe9\xff", "x" * 5000, "a b", "____prefill_addr_1:2"),
    "X-data-parallel-rank": ("0", "-1", "1", "080", "\xb2", _DIGITS, "0.0", ""),
    "Authorization": ("Bearer", "Bearer \xff", "Basic a", "Bearer " + "x" * 5000),
    "traceparent": ("00-0-0-0", "\xff", "00-" + "f" * 32 + "-" + "f" * 16 + "-01", "x" * 5000),
    "Accept": ("text/event-stream", "\xff", ""),
    "Expect": ("100-continue",),
    "Connection": ("close", "upgrade", "x-request-id"),
}
_HANDOVERS: tuple[Any, ...] = (
    {"do_remote_decode": True},
    {"do_remote_decode": True, "transfer_id": "t"},
    {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None},
    {"do_remote_prefill": True, "transfer_id": "t", "remote_engine_id": "p"},
    {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "p",
        "remote_request_id": "r",
        "remote_block_ids": [[1, 2]],
        "remote_host": "127.0.0.1",
        "remote_port": 80,
        "remote_num_tokens": 30,
        "tp_size": 1,
        "pp_size": 1,
        "ticket": "t",
    },
)
_FIELDS = (
    "model", "user", "request_id", "priority", "cache_salt", "truncate_prompt_tokens", "stream", "stream_options", "n",
    "temperature", "top_p", "top_k", "min_p", "seed", "stop", "logit_bias", "min_tokens", "max_tokens", "ignore_eos",
    "stop_token_ids", "allowed_token_ids", "bad_words", "prompt_logprobs", "logprobs", "echo", "suffix", "best_of",
    "response_format", "structured_outputs", "guided_regex", "guided_json", "guided_choice", "guided_grammar", "tools",
    "tool_choice", "kv_transfer_params", "chat_template_kwargs", "add_special_tokens", "num_speculative_tokens",
    "return_token_ids", "truncation_side", "max_completion_tokens", "messages", "prompt", "documents", "input",
)  # fmt: skip
PROMPT = "Remember this. The key of Anna is in the red box. The key of Ben is under the old bridge. "
_BODIES: Mapping[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": PROMPT, "max_tokens": 2},
    CHAT: {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 2},
    "/v1/responses": {"input": PROMPT, "max_output_tokens": 2},
    "/v1/messages": {"model": "demo", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 2},
    "/v1/messages/count_tokens": {"model": "demo", "messages": [{"role": "user", "content": PROMPT}]},
    "/v1/embeddings": {"input": PROMPT},
    "/tokenize": {"prompt": PROMPT},
    "/detokenize": {"tokens": [1, 2, 3]},
}
_SUFFIXES = ("/", "//", "?", "?a=%00", "%00", "%2F", ";a", "/..", "%20", "%ff")


@dataclass(frozen=True, slots=True)
class NastyRequest:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class NastyRequests:
    """`known` is valid values for keys of `kv_transfer_params`, such as the address of a living engine."""

    def __init__(self, seed: int, known: Mapping[str, Any]) -> None:
        self._rng = random.Random(seed)
        self._known = known

    def likely(self) -> Iterator[NastyRequest]:
        """Yields a handover with one wrong value for each that is likely to be read."""
        for name, values in _LIKELY.items():
            at_once = name in ("transfer_id", "remote_bootstrap_addr")
            params = {**_HANDOVERS[-2], "remote_bootstrap_addr": "http://127.0.0.1:1"} if at_once else _HANDOVERS[-1]
            for value in values:
                body = {**self._body(COMPLETIONS), "kv_transfer_params": {**params, name: value}}
                yield NastyRequest("POST", COMPLETIONS, {"Content-Type": "application/json"}, self._encode(body))

    def random(self) -> Iterator[NastyRequest]:
        while True:
            yield self._request()

    def _request(self) -> NastyRequest:
        rng = self._rng
        path = rng.choice((COMPLETIONS, CHAT)) if rng.random() < 0.8 else rng.choice(tuple(_BODIES))
        body = self._body(path)
        if path in (COMPLETIONS, CHAT) and rng.random() < 0.8:
            body["kv_transfer_params"] = self._handover()
        for _ in range(rng.choice((0, 0, 1, 1, 1, 2))):
            body[rng.choice((*body, *_FIELDS))] = self._value()
        data = self._disfigure(body)
        headers = {"Content-Type": "application/json"}
        if rng.random() < 0.2:
            name = rng.choice(tuple(_HEADERS))
            headers[name] = rng.choice(_HEADERS[name])
        if rng.random() < 0.1:
            path += rng.choice(_SUFFIXES)
        method = rng.choice(("GET", "PUT", "HEAD", "OPTIONS", "DELETE")) if rng.random() < 0.03 else "POST"
        return NastyRequest(method, path, headers, data)

    def _body(self, path: str) -> dict[str, Any]:
        """Returns a valid body whose prompt no engine has cached."""
        body = deepcopy(_BODIES[path])
        prompt = f"{self._rng.randrange(1 << 30)}. {PROMPT}"
        if "messages" in body:
            body["messages"][0]["content"] = prompt
        else:
            body |= {name: prompt for name in ("prompt", "input") if name in body}
        return body

    def _handover(self) -> Any:
        """Returns the parameters of a handover, with some wrong values."""
        rng = self._rng
        if rng.random() < 0.05:
            return self._value()
        params = deepcopy(rng.choice(_HANDOVERS))
        params |= {name: value for name, value in self._known.items() if rng.random() < 0.7}
        if params.get("transfer_id") is not None and rng.random() < 0.7:
            params["transfer_id"] = f"t{rng.randrange(1 << 30)}"
        names = (*params, "remote_bootstrap_addr", "transfer_id", "unknown", "offload_policy", "max_load_tokens")
        for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
            name = rng.choice(names)
            params[name] = rng.choice(_LIKELY[name]) if name in _LIKELY and rng.random() < 0.5 else self._value()
        return params

    def _value(self) -> Any:
        value = self._rng.choice(_NASTY)
        return [value] * self._rng.randrange(4) if self._rng.random() < 0.05 else value

    def _encode(self, body: dict[str, Any]) -> bytes:
        text = json.dumps(body, ensure_ascii=self._rng.random() < 0.7)
        for number, literal in enumerate(_LITERALS):
            text = text.replace(f'"{_MARK}{number}-"', literal)
        return text.encode("utf-8", "surrogatepass")

    def _disfigure(self, body: dict[str, Any]) -> bytes:
        rng = self._rng
        text = self._encode(body).decode("utf-8", "surrogatepass")
        if rng.random() < 0.05:
            name = rng.choice(tuple(body))
            text = text[:-1] + f', "{name}": {json.dumps(self._known)}}}'
        changes: tuple[Callable[[], bytes], ...] = (
            lambda: text.encode(rng.choice(_ENCODINGS), "replace"),
            lambda: text.encode("utf-8", "surrogatepass")[: rng.randrange(len(text))],
            lambda: text.encode("utf-8", "surrogatepass") + b"\0",
            lambda: b"\xff".join(text.encode("utf-8", "surrogatepass").split(b" ", 1)),
            lambda: b"",
            lambda: b'{"a":' * 100_000,
        )
        return rng.choice(changes)() if rng.random() < 0.08 else text.encode("utf-8", "surrogatepass")
