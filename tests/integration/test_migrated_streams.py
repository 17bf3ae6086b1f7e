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
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI, OpenAI

from penstock.utils.stream_reports import read_event
from tests.integration.server_process import ServerProcess, serve
from tests.integration.test_continued_output import (
    COMPLETION,
    MESSAGES,
    PROMPT,
    STREAMS,
    TYPED_STREAMS,
    merged,
    merged_typed,
    stream,
    streamed,
)
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


@pytest.mark.parametrize("case", [*STREAMS, *TYPED_STREAMS, "stop"])
def test_a_migrated_stream_equals_the_undisturbed_one(server: ServerProcess, case: str) -> None:
    penalties = {**COMPLETION, "presence_penalty": 1.0, "frequency_penalty": 0.5, "logit_bias": {"11": 2}}
    path, body = {**STREAMS, **TYPED_STREAMS}.get(case, ("/v1/completions", penalties))
    if case in TYPED_STREAMS:
        body = {**body, "seed": 9}
    compared = merged_typed if case in TYPED_STREAMS else merged_chunks
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
                status, sent = await client.ask(path, streamed(path, body))
            assert status == 200
            found = [block + b"\n\n" for block in sent.split(b"\n\n")[:-1]]
            assert not any(read_event(event)[0] for event in found), "no report reaches the client"
            assert compared(found) == compared(expected), cuts
            # A busy server sends fewer events, of more tokens each.
            assert sum(stub.num_requests for stub in stubs) >= 2 or len(found) <= cuts[0]

    run(check)


@pytest.mark.parametrize("api", ["responses", "messages", "chat"])
def test_official_clients_see_one_stream(server: ServerProcess, api: str) -> None:
    """They check the order of events, and add up their parts."""
    fields: dict[str, Any] = {"model": "demo", "extra_body": {"seed": 5, "temperature": 0.8}}
    options: dict[str, Any] = {"api_key": "none", "max_retries": 0}

    async def answer(url: str) -> Any:
        if api == "messages":
            async with AsyncAnthropic(base_url=url, **options) as client:
                arguments: dict[str, Any] = {**fields, "max_tokens": 40, "messages": MESSAGES}
                async with client.messages.stream(**arguments) as events:
                    message = await events.get_final_message()
                return message.content[0].model_dump(), message.stop_reason, message.usage.output_tokens
        async with AsyncOpenAI(base_url=f"{url}/v1", **options) as opened:
            client: Any = opened
            if api == "responses":
                events = [each async for each in await client.responses.create(**fields, input="Rain?", stream=True)]
                assert [each.sequence_number for each in events] == list(range(len(events)))
                assert [each.type for each in events].count("response.created") == 1
                texts = [each.delta for each in events if each.type == "response.output_text.delta"]
                assert "".join(texts) == events[-1].response.output_text
                return "".join(texts), events[-1].type
            chat = await client.chat.completions.create(**fields, messages=MESSAGES, n=3, max_tokens=40, stream=True)
            chunks = [chunk async for chunk in chat]
            assert len({chunk.id for chunk in chunks}) == 1
            texts = ["", "", ""]
            for choice in (choice for chunk in chunks for choice in chunk.choices):
                texts[choice.index] += choice.delta.content or ""
            return texts

    async def check() -> None:
        expected = await answer(server.url)
        stubs: list[Stub] = [router_stubs.serve(passing_on(server.url, count)) for count in (7, 3, None)]
        async with routed(*stubs) as client:
            assert await answer(client.router.url) == expected
        assert sum(stub.num_requests for stub in stubs) >= 2

    run(check)


def merged_chunks(events: list[bytes]) -> list[Any]:
    *choices, names = merged(events)
    assert len(names) == 1, "all have one id and one time"
    return choices


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
