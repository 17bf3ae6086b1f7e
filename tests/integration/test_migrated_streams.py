"""Streams that `penstock route` continues at another engine equal the undisturbed ones."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from openai import OpenAI

from penstock.utils.stream_reports import read_event
from tests.integration.server_process import ServerProcess, serve
from tests.integration.test_continued_output import COMPLETION, PROMPT, STREAMS, merged, stream, without_ids
from tests.integration.test_router import route
from tests.integration.test_vllm_router import instance
from tests.unit import router_stubs
from tests.unit.router_stubs import Handler, Stub, routed, run

FLAGS = ("--max-model-len", "512", "--kv-cache-memory", "32MB", "--num-threads", "1")


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    config = json.dumps({"method": "eagle3", "model": "demo/eagle3", "num_speculative_tokens": 2})
    with serve(*FLAGS, "--reasoning-parser", "qwen3", "--speculative-config", config) as server:
        yield server


def passing_on(url: str, num_events: int | None) -> Handler:
    """Forwards requests to a server, and dies after so many events of the answer."""

    async def answer(request: web.Request) -> web.StreamResponse:
        headers = {name: value for name, value in request.headers.items() if name != "Host"}
        async with (
            aiohttp.ClientSession() as session,
            session.post(url + request.path, data=await request.read(), headers=headers) as answer,
        ):
            named = {name: answer.headers[name] for name in ("X-Penstock-Stream", "Content-Type")}
            response = web.StreamResponse(status=answer.status, headers=named)
            await response.prepare(request)
            sent = await answer.read()
            for place, block in enumerate(sent.split(b"\n\n")[:-1]):
                if place == num_events:
                    assert request.transport is not None
                    request.transport.abort()
                    return response
                await response.write(block + b"\n\n")
        return response

    return answer


@pytest.mark.parametrize("case", [*STREAMS, "stop"])
def test_a_migrated_stream_equals_the_undisturbed_one(server: ServerProcess, case: str) -> None:
    penalties = {**COMPLETION, "presence_penalty": 1.0, "frequency_penalty": 0.5, "logit_bias": {"11": 2}}
    path, body = STREAMS.get(case, ("/v1/completions", penalties))
    if case == "stop":
        _, events = stream(server.url, path, {**body, "logprobs": None}, None)
        text = "".join(json.loads(event[6:])["choices"][0]["text"] for event in events[:-2])
        # Its first character ends one token, and its last one begins another.
        body = {**body, "stop": [text[len(text) // 2 : len(text) // 2 + 5]]}
    _, expected = stream(server.url, path, body, None)

    async def check() -> None:
        for cuts in ((0, 1), (3, 2), (6, 4)):
            stubs: list[Stub] = [router_stubs.serve(passing_on(server.url, count)) for count in (*cuts, None)]
            async with routed(*stubs) as client:
                fields = {**body, "stream": True, "stream_options": {"include_usage": True}}
                async with client.session.post(client.router.url + path, json=fields) as answer:
                    found = [block + b"\n\n" for block in (await answer.read()).split(b"\n\n")[:-1]]
            assert [read_event(event)[0] for event in found] == [None] * len(found), "no report reaches the client"
            assert without_names(merged(found)) == without_names(merged(expected)), cuts
            assert usage(found) == usage(expected)
            ids = {json.loads(event[6:])["id"] for event in found[:-1]}
            assert len(ids) == 1
            assert sum(stub.num_requests for stub in stubs) >= 2

    run(check)


def without_names(found: list[Any]) -> list[Any]:
    return found[:-1]


def usage(events: list[bytes]) -> Any:
    return json.loads(without_ids(events[-2]))["usage"]


@pytest.mark.long
@pytest.mark.parametrize("is_divided", [False, True], ids=["colocated", "divided"])
def test_streams_outlive_killed_processes(is_divided: bool) -> None:
    with serve(*FLAGS) as one:
        fields: Any = {"model": "demo", "prompt": PROMPT, "max_tokens": 300, "temperature": 1.0, "seed": 3}
        fields["extra_body"] = {"ignore_eos": True, "repetition_penalty": 1.2}
        with OpenAI(base_url=f"{one.url}/v1", api_key="none", max_retries=0) as client:
            expected = client.completions.create(**fields).choices[0].text
        if is_divided:
            with instance("nixl", "p") as p, instance("nixl", "d1") as first, instance("nixl", "d2") as second:
                kill_within_a_stream([first, second], ("--prefill", p.url), "--decode", fields, expected)
        else:
            with serve(*FLAGS) as first, serve(*FLAGS) as second:
                kill_within_a_stream([first, second], (), "--serve", fields, expected)


def kill_within_a_stream(
    servers: list[ServerProcess], flags: tuple[str, ...], role: str, fields: dict[str, Any], expected: str
) -> None:
    named = [flag for server in servers for flag in (role, server.url)]
    with route(*flags, *named) as router, OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0) as client:
        text, is_killed = "", False
        for chunk in client.completions.create(**fields, stream=True):
            text += chunk.choices[0].text
            if len(text) > 40 and not is_killed:
                found = router.instances()
                (busy,) = [server for server in servers if found[server.url]["outstanding"]]
                os.kill(busy.core_pid if role == "--serve" else busy.pid, signal.SIGKILL)
                is_killed = True
        assert text == expected
        assert router.counter("penstock_router_migrations_total") == 1
