"""Two disaggregated engines and a router that get what no client should send: each request ends, and no engine does."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.integration.nasty_requests import COMPLETIONS, PROMPT, NastyRequest, NastyRequests
from tests.integration.raw_http import Answer, call
from tests.integration.server_process import ServerProcess, serve
from tests.integration.test_router import route
from tests.integration.test_vllm_router import free_ports, metric

# The engine that prefills and the one that decodes, by connector.
ROLES = {
    "P2PConnector": ("kv_both", "kv_both"),
    "NixlConnector": ("kv_producer", "kv_consumer"),
    "MooncakeConnector": ("kv_producer", "kv_consumer"),
}
SECONDS = 8.0
"""How long each group of engines gets requests."""
MOST_SECONDS = 10.0
"""How long a request may take on a busy machine; alone, one takes less than a second."""
LOAD_SECONDS = 1.0
NUM_CLIENTS = 4
PLAIN = {"prompt": "Once upon a time there was", "max_tokens": 8, "temperature": 0, "return_token_ids": True}


@contextlib.contextmanager
def engines(connector: str) -> Iterator[tuple[ServerProcess, ServerProcess, str]]:
    """Starts two engines; yields them and the bootstrap address, empty if the connector has none."""
    (port,) = free_ports(1)
    has_bootstrap = connector == "MooncakeConnector"
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(2) as pool:

        def start(name: str, role: str) -> Any:
            config: dict[str, Any] = {"kv_connector": connector, "kv_role": role, "engine_id": name}
            config["kv_load_timeout"] = LOAD_SECONDS
            if has_bootstrap:
                config["kv_connector_extra_config"] = {"bootstrap_port": port if name == "p" else 0}
            server = serve("--kv-cache-memory", "32MB", "--kv-transfer-config", json.dumps(config))
            return server, server.__enter__()

        started = list(pool.map(start, "pd", ROLES[connector]))
        for manager, _ in started:
            stack.push(manager)
        (_, prefill), (_, decode) = started
        yield prefill, decode, f"http://127.0.0.1:{port}" if has_bootstrap else ""


def tokens(url: str) -> list[int]:
    answer = call(url, "POST", COMPLETIONS, PLAIN)
    assert answer.status == 200, answer.body
    return answer.json()["choices"][0]["token_ids"]


def send(url: str, request: NastyRequest) -> tuple[Answer, float]:
    began = time.monotonic()
    answer = call(url, request.method, request.path, request.body, request.headers)
    return answer, time.monotonic() - began


def describe(request: NastyRequest, answer: Answer) -> str:
    sent = f"{request.method} {request.path} {request.headers} {request.body[:3000]!r}"
    return f"{sent}\n-> {answer.status} {answer.body[:1000]!r}"


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, pytest.param(None, marks=pytest.mark.exhaustive, id="fresh")])
@pytest.mark.parametrize("connector", ROLES)
def test_no_request_ends_an_engine(connector: str, seed: int | None) -> None:
    seed = random.SystemRandom().randrange(1 << 32) if seed is None else seed
    sys.stdout.write(f"seed {seed}\n")
    with contextlib.ExitStack() as stack:
        prefill, decode, bootstrap = stack.enter_context(engines(connector))
        flag = f"{prefill.url},bootstrap={bootstrap}" if bootstrap else prefill.url
        router = stack.enter_context(route("--prefill", flag, "--decode", decode.url, "--max-local-prefill", "0"))
        urls = (prefill.url, decode.url, router.url)
        expected = tokens(router.url)
        asked = {**PLAIN, "prompt": PROMPT, "kv_transfer_params": {"do_remote_decode": True}}
        known = call(prefill.url, "POST", COMPLETIONS, asked).json()["kv_transfer_params"]
        if bootstrap:
            known["remote_bootstrap_addr"] = bootstrap
        deadline = time.monotonic() + SECONDS
        nasty = NastyRequests(seed, known)
        likely = list(itertools.product(nasty.likely(), urls))
        requests = itertools.chain(likely, zip(nasty.random(), itertools.cycle(urls), strict=False))
        statuses: Counter[int] = Counter()
        turn = threading.Lock()

        def run(_: int) -> None:
            while time.monotonic() < deadline or statuses.total() < len(likely):
                with turn:
                    request, url = next(requests)
                answer, seconds = send(url, request)
                statuses[answer.status] += 1
                assert answer.status < 500, describe(request, answer)
                assert seconds < MOST_SECONDS, f"{seconds:.1f} s: {describe(request, answer)}"

        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            list(pool.map(run, range(NUM_CLIENTS)))
        assert statuses[200] > 20, statuses
        assert statuses[400] > 20, statuses
        assert metric(decode, "p2p_consumer_loads") > 0, "no request has come as far as a load"
        for server in (prefill, decode):
            assert call(server.url, "GET", "/health").json()["status"] == "ok"
            assert call(server.admin_url, "POST", "/check_integrity").status == 200
            assert "Traceback" not in "".join(server.log), "".join(server.log)
        assert [each["state"] for each in router.instances().values()] == ["ready", "ready"]
        assert [tokens(url) for url in urls] == [expected] * 3
