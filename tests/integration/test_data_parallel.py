"""`--data-parallel-size`: several engine cores behind one server give the answers of one."""

from __future__ import annotations

import http.client
import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from penstock import LLM, SamplingParams
from tests.integration.raw_http import Answer, Stream, call, eventually
from tests.integration.server_probes import COMPLETIONS, endless, ends_with_error
from tests.integration.server_process import ServerProcess, serve

PROMPTS = ["Once upon a time", "The river", "In the attic", "A boat", "Ben and Mia", "The orange hat"]
GREEDY: dict[str, Any] = {"max_tokens": 12, "temperature": 0}
FLAGS = ("--data-parallel-size", "2", "--num-threads", "1", "--kv-cache-memory", "64MiB")


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serve(*FLAGS) as server:
        yield server


def complete(server: ServerProcess, prompt: str, rank: str | None = None) -> Answer:
    headers = {} if rank is None else {"X-data-parallel-rank": rank}
    return call(server.url, "POST", COMPLETIONS, {"prompt": prompt, **GREEDY}, headers)


def by_engine(server: ServerProcess, name: str) -> dict[str, float]:
    """Returns a metric's values by the label `engine`."""
    found: dict[str, float] = {}
    for line in call(server.url, "GET", "/metrics").body.decode().splitlines():
        if line.startswith(name + "{"):
            engine = line.split('engine="')[1].split('"')[0]
            found[engine] = found.get(engine, 0.0) + float(line.rpartition(" ")[2])
    return found


def cores(server: ServerProcess) -> list[int]:
    text = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text(encoding="utf-8")
    return sorted(int(child) for child in text.split())


def test_both_engines_give_the_answers_of_a_single_one(server: ServerProcess) -> None:
    before = by_engine(server, "vllm:generation_tokens_total")
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = list(pool.map(lambda prompt: complete(server, prompt), PROMPTS))
    llm = LLM()
    outputs = llm.generate(PROMPTS, SamplingParams(**GREEDY), use_tqdm=False)
    llm.shutdown()
    assert [each.json()["choices"][0]["text"] for each in answers] == [each.outputs[0].text for each in outputs]
    after = by_engine(server, "vllm:generation_tokens_total")
    assert all(after[engine] > before[engine] for engine in ("0", "1")), (before, after)


def test_the_header_chooses_the_engine(server: ServerProcess) -> None:
    for rank in ("1", "0", "1", "1"):
        before = by_engine(server, "vllm:request_success_total")
        assert complete(server, "Once upon a time", rank).status == 200
        after = by_engine(server, "vllm:request_success_total")
        assert {engine: after[engine] - before[engine] for engine in after} == {
            engine: float(engine == rank) for engine in ("0", "1")
        }


@pytest.mark.parametrize("rank", ["2", "-1", "one", ""])
def test_an_invalid_rank_is_refused(server: ServerProcess, rank: str) -> None:
    answer = complete(server, "Once", rank)
    assert answer.status == 400
    assert "rank" in answer.json()["error"]["message"].lower()


def test_each_engine_has_its_dashboard(server: ServerProcess) -> None:
    for rank in (0, 1):
        place = urlsplit(server.url)
        with closing(http.client.HTTPConnection(str(place.hostname), place.port, timeout=60)) as connection:
            connection.request("GET", f"/dashboard/events?rank={rank}")
            event = connection.getresponse().readline()
        assert json.loads(event.removeprefix(b"data: "))["num_replicas"] == 2
    assert call(server.url, "GET", "/dashboard/events?rank=2").status == 404


def test_each_engine_reports_its_configuration(server: ServerProcess) -> None:
    assert by_engine(server, "penstock:engine_info") == {"0": 1.0, "1": 1.0}
    assert by_engine(server, "vllm:cache_config_info") == {"0": 1.0, "1": 1.0}


def test_the_administration_reaches_all_engines(server: ServerProcess) -> None:
    prompt = "A long walk beside the river and over the hill to the mill. " * 3
    assert [complete(server, prompt, rank).status for rank in ("0", "1")] == [200, 200]
    hits = by_engine(server, "vllm:prefix_cache_hits_total")
    assert call(server.admin_url, "POST", "/reset_prefix_cache").status == 200
    assert [complete(server, prompt, rank).status for rank in ("0", "1")] == [200, 200]
    assert by_engine(server, "vllm:prefix_cache_hits_total") == hits
    assert call(server.admin_url, "POST", "/check_integrity").status == 200


def cached(server: ServerProcess, prompt: str, rank: str | None = None) -> int:
    """Completes the prompt; returns how many of its tokens were cached."""
    usage = complete(server, prompt, rank).json()["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.long
def test_a_second_turn_goes_to_the_engine_of_the_first() -> None:
    first = "A long walk beside the river and over the hill to the mill. " * 3
    with serve(*FLAGS, "--data-parallel-policy", "prefix-aware") as aware, serve(*FLAGS) as unaware:
        # Without the policy the other engine is the next one.
        for server, is_found in ((aware, True), (unaware, False)):
            assert cached(server, first) == 0
            assert (cached(server, f"{first} And then?") > 0) is is_found
        assert call(aware.admin_url, "POST", "/reset_prefix_cache").status == 200
        before = by_engine(aware, "vllm:request_success_total")
        assert cached(aware, first, "1") == 0
        assert [cached(aware, f"{first} {number}") > 0 for number in range(4)] == [True] * 4
        after = by_engine(aware, "vllm:request_success_total")
        assert {engine: after[engine] - before[engine] for engine in after} == {"0": 0.0, "1": 5.0}


def test_completions_of_one_prompt_must_fit_into_one_engine() -> None:
    with serve(*FLAGS, "--max-num-queued-requests", "4") as server:
        body = {"prompt": "a", "max_tokens": 1, "n": 5}
        assert call(server.url, "POST", COMPLETIONS, body).status == 400, "waiting would not help"
        assert call(server.url, "POST", COMPLETIONS, {**body, "prompt": ["a"] * 5, "n": 1}).status == 200
        assert call(server.url, "POST", "/reset_prefix_cache", {}).status == 404
        assert call(server.admin_url, "POST", "/check_integrity", {}).status == 200


@pytest.mark.alone
def test_the_other_engine_continues_when_one_dies() -> None:
    with serve(*FLAGS) as server, ExitStack() as stack:
        streams = [stack.enter_context(closing(Stream(server.url, COMPLETIONS, endless()))) for _ in range(2)]
        # One after the other: each goes to the engine with less work.
        assert [stream.begin() for stream in streams] == [200, 200]
        eventually(lambda: list(by_engine(server, "vllm:num_requests_running").values()) == [1, 1], 30)
        os.kill(cores(server)[0], signal.SIGKILL)
        eventually(lambda: 0.0 in by_engine(server, "penstock:engine_up").values(), 30)
        up = by_engine(server, "penstock:engine_up")
        dead = next(engine for engine, value in up.items() if value == 0)
        assert ends_with_error(streams[int(dead)].events())
        assert call(server.url, "GET", "/ready").status == 200
        assert [complete(server, prompt).status for prompt in PROMPTS] == [200] * len(PROMPTS)
        answer = complete(server, "Once", dead)
        assert (answer.status, "killed by signal 9" in answer.json()["error"]["message"]) == (503, True)
        streams[1 - int(dead)].close()
        assert call(server.admin_url, "POST", "/check_integrity", {}).status == 200, "a dead engine is left out"
        assert server.terminate() == 0


@pytest.mark.long
@pytest.mark.alone
def test_the_server_ends_when_all_engines_have_died() -> None:
    with serve(*FLAGS) as server:
        for core in cores(server):
            os.kill(core, signal.SIGKILL)
        assert server.process.wait(60) == 1
