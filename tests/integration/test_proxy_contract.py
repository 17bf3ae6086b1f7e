"""The requests that the proxies in vLLM's documentation send, key by key: tokens are those of one engine, and D loads.

They drive NixlConnector serially and MooncakeConnector concurrently. docs/DISAGGREGATION.md has the protocol.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.integration.raw_http import Answer, call
from tests.integration.server_process import ServerProcess
from tests.integration.test_vllm_router import FACT, STYLES, free_ports, instance, metric

BLOCK_SIZE = 16
COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
# Every prompt is another one from its first words on, so that nothing is in D's cache.
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (COMPLETION, {"prompt": "First. " + FACT, "max_tokens": 12, "temperature": 0}),
    (COMPLETION, {"prompt": "Second. " + FACT * 2, "max_tokens": 12, "seed": 7, **STREAMED}),
    (CHAT, {"messages": [{"role": "user", "content": "Third. " + FACT}], "max_completion_tokens": 12, "seed": 7}),
    (CHAT, {"messages": [{"role": "user", "content": "4. " + FACT}], "max_tokens": 12, "temperature": 0, **STREAMED}),
]


def ask(server: ServerProcess, path: str, body: Mapping[str, Any], headers: dict[str, str] | None = None) -> Answer:
    answer = call(server.url, "POST", path, body, headers)
    assert answer.status == 200, answer.body
    return answer


def prefill_body(body: Mapping[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
    changed = {**body, "stream": False, "max_tokens": 1, "min_tokens": 1, "kv_transfer_params": params}
    if "max_completion_tokens" in body:
        changed["max_completion_tokens"] = 1
    changed.pop("stream_options", None)
    return changed


def serial(prefill: ServerProcess, decode: ServerProcess, path: str, body: dict[str, Any], name: str) -> Answer:
    headers = {"X-Request-Id": name}
    unknown = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
    params = {"do_remote_decode": True, "do_remote_prefill": False, **unknown}
    answered = ask(prefill, path, prefill_body(body, params), headers).json()["kv_transfer_params"]
    return ask(decode, path, {**body, "kv_transfer_params": answered}, headers)


def concurrent(
    prefill: ServerProcess, decode: ServerProcess, bootstrap: str, path: str, body: dict[str, Any], name: str
) -> Answer:
    ((rank, engine),) = call(bootstrap, "GET", "/query").json().items()
    headers, common = {"X-Request-Id": name, "X-data-parallel-rank": rank}, {"transfer_id": f"xfer-{name}"}
    for_p = {"do_remote_decode": True, "do_remote_prefill": False, **common}
    for_d = {"do_remote_decode": False, "do_remote_prefill": True, "remote_bootstrap_addr": bootstrap, **common}
    for_d["remote_engine_id"] = engine["engine_id"]
    with ThreadPoolExecutor(1) as beside:
        prefilled = beside.submit(ask, prefill, path, prefill_body(body, for_p), headers)
        answer = ask(decode, path, {**body, "kv_transfer_params": for_d}, headers)
        prefilled.result()
    return answer


def tokens_and_usage(answer: Answer) -> tuple[list[int], Mapping[str, Any]]:
    """Of an answer in one piece or in server-sent events."""
    lines = answer.body.decode().splitlines()
    pieces = [json.loads(line[6:]) for line in lines if line.startswith("data: {")] or [answer.json()]
    tokens = [token for piece in pieces for choice in piece["choices"] for token in choice.get("token_ids") or ()]
    return tokens, pieces[-1]["usage"]


@pytest.mark.parametrize("style", STYLES)
def test_the_requests_of_vllms_proxies_move_the_kv_and_change_no_token(style: str) -> None:
    (port,) = free_ports(1)
    extra = {"bootstrap_port": port} if style == "mooncake" else {}
    with instance(style, "p", **extra) as prefill, instance(style, "d") as decode:
        for number, (path, body) in enumerate(REQUESTS, 1):
            asked, name = {**body, "return_token_ids": True, "ignore_eos": True}, f"request-{number}"
            if style == "nixl":
                answer = serial(prefill, decode, path, asked, name)
            else:
                answer = concurrent(prefill, decode, f"http://127.0.0.1:{port}", path, asked, name)
            assert answer.headers["x-request-id"] == name
            tokens, usage = tokens_and_usage(answer)
            # P computes a request without kv_transfer_params from its first token to its last.
            assert tokens == tokens_and_usage(ask(prefill, path, asked))[0]
            assert len(tokens) == 12
            whole_blocks = (usage["prompt_tokens"] - 1) // BLOCK_SIZE * BLOCK_SIZE
            assert usage["prompt_tokens_details"]["cached_tokens"] == whole_blocks
            assert metric(decode, "p2p_consumer_completed") == number
        assert metric(decode, "p2p_consumer_refused") == metric(decode, "p2p_consumer_cancelled") == 0
        assert metric(prefill, "p2p_held") == 0
