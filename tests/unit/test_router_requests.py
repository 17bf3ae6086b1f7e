"""Requests through the router: two halves, retries, streams, and answers that pass unchanged."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from penstock.router import http_client
from penstock.router.dispatcher import Limits
from penstock.router.kv_subscriptions import KVSubscriptions
from tests.unit.router_stubs import (
    IMPATIENT,
    PATH,
    STYLES,
    WATCHFUL,
    Handler,
    OncePerConnection,
    Stub,
    abort,
    decode,
    die,
    echo,
    fail,
    half,
    headers_only,
    never,
    prefill,
    prefilled,
    routed,
    run,
    serve,
    until,
)

# ---- Two halves ----


@pytest.mark.parametrize("style", STYLES)
def test_both_halves_get_the_whole_prompt(style: str) -> None:
    """Tools are a part of the prompt: a prefill instance without them would compute another prompt."""
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": "auto",
        "max_completion_tokens": 9,
        "min_tokens": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
    }

    async def check() -> None:
        p, d = prefill(prefilled, style), decode(echo)
        async with routed(p, d) as client:
            path = "/v1/chat/completions?a=%2F"
            status, answer = await client.ask(path, body, headers={"Authorization": "Bearer k", "x-api-key": "x"})
            assert status == 200
            assert json.loads(answer)["asked"] == d.bodies[0]
            for stub in (p, d):
                assert (stub.headers[0]["Authorization"], stub.headers[0]["x-api-key"]) == ("Bearer k", "x")
            (asked,) = p.bodies
            params = d.bodies[0].pop("kv_transfer_params")
            assert d.bodies[0] == body
            assert {name: asked[name] for name in ("messages", "tools", "tool_choice")} == {
                name: body[name] for name in ("messages", "tools", "tool_choice")
            }
            assert (asked["max_completion_tokens"], asked["stream"]) == (1, False)
            assert not asked.keys() & {"min_tokens", "stream_options"}
            if style == "serial":
                assert asked["kv_transfer_params"] == {"do_remote_decode": True, "do_remote_prefill": False}
                assert params == {"ticket": "t"}
            else:
                name = asked["kv_transfer_params"]["transfer_id"]
                assert asked["kv_transfer_params"] == {"do_remote_decode": True, "transfer_id": name}
                where = {"remote_bootstrap_addr": p.url, "remote_engine_id": "p"}
                assert params == {"do_remote_prefill": True, "transfer_id": name, **where}

    run(check)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("broken", [fail, die, abort, never])
def test_another_prefill_instance_takes_over(style: str, broken: Handler) -> None:
    async def check() -> None:
        first, second = prefill(broken, style), prefill(prefilled, style)

        async def answer(request: web.Request) -> web.StreamResponse:
            # The answer has not begun when the first prefill instance fails.
            await until(lambda: second.num_requests > 0)
            return await echo(request)

        d = decode(answer)
        options = {"timeouts": IMPATIENT} if broken is never else {}
        async with routed(first, second, d, **options) as client:
            status, _ = await client.ask()
            assert status == 200
            assert first.num_requests == second.num_requests == 1
            assert "kv_transfer_params" in d.bodies[-1]
            assert await client.metric(f'vllm_router_pd_prefill_errors_total{{worker="{first.url}"}}') == 1
            assert await client.metric(f'vllm_router_retries_total{{route="{PATH}"}}') == 1

    run(check)


@pytest.mark.parametrize("style", STYLES)
def test_the_decode_instance_prefills_when_no_prefill_instance_can(style: str) -> None:
    async def check() -> None:
        p, d = prefill(never, style), decode(echo)
        if style == "concurrent":
            p.app = web.Application()
            p.app.router.add_route("*", "/{path:.*}", never)
        async with routed(p, d, timeouts=IMPATIENT, health=WATCHFUL) as client:
            status, body = await client.ask()
            assert status == 200
            assert b"kv_transfer_params" not in body
            assert await client.metric("penstock_router_self_prefills_total") == 1

    run(check)


def test_decode_instances_prefill_a_limited_number_of_prompts_at_once() -> None:
    async def check() -> None:
        go = asyncio.Event()
        running_now = most = 0

        async def slow(request: web.Request) -> web.StreamResponse:
            nonlocal running_now, most
            running_now += 1
            most = max(most, running_now)
            await go.wait()
            running_now -= 1
            return await echo(request)

        async with routed(decode(slow), decode(slow), limits=Limits(max_self_prefills=3)) as client:
            asked = [asyncio.create_task(client.ask()) for _ in range(10)]
            await until(lambda: running_now == 3)
            await until(lambda: client.router.dispatcher.num_queued == 7)
            client.router.dispatcher.check_integrity()
            go.set()
            assert {status for status, _ in await asyncio.gather(*asked)} == {200}
            assert most == 3

    run(check)


def test_a_client_error_of_a_prefill_instance_is_the_answer() -> None:
    async def refuse(request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "no"}}, status=400)

    async def check() -> None:
        d = decode(echo)
        async with routed(prefill(refuse), d) as client:
            assert await client.ask() == (400, b'{"error": {"message": "no"}}')
            assert d.num_requests == 0

    run(check)


# ---- Answers ----


@pytest.mark.parametrize("pieces", [[b"data: {}\n\n", b"\xff\x00\r\n", b"data: [DONE]\n\n"], [bytes(300_000)], []])
def test_streams_pass_byte_for_byte(pieces: list[bytes]) -> None:
    async def check() -> None:
        async def stream(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream; x=y", "X-Request-Id": "r"})
            await response.prepare(request)
            for piece in pieces:
                await response.write(piece)
                await asyncio.sleep(0.01)
            return response

        async with (
            routed(serve(stream)) as client,
            client.session.post(client.router.url + PATH, json={}) as response,
        ):
            assert await response.read() == b"".join(pieces)
            assert response.headers["Content-Type"] == "text/event-stream; x=y"
            assert response.headers["X-Request-Id"] == "r"

    run(check)


def test_the_first_event_does_not_wait_for_the_second() -> None:
    async def check() -> None:
        go = asyncio.Event()

        async def stream(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse()
            await response.prepare(request)
            await response.write(b"1")
            await go.wait()
            await response.write(b"2")
            return response

        async with (
            routed(serve(stream)) as client,
            client.session.post(client.router.url + PATH, json={}) as response,
        ):
            assert await response.content.readany() == b"1"
            go.set()
            assert await response.content.readany() == b"2"

    run(check)


@pytest.mark.parametrize("broken", [fail, die, abort, headers_only])
def test_another_instance_answers_when_one_fails_before_the_first_byte(broken: Handler) -> None:
    async def check() -> None:
        first, second = serve(broken), serve(echo)
        async with routed(first, second) as client:
            assert [(await client.ask())[0] for _ in range(4)] == [200] * 4
            assert first.num_requests >= 1
            assert second.num_requests == 4

    run(check)


def test_retries_are_limited() -> None:
    async def check() -> None:
        stubs = [serve(fail) for _ in range(5)]
        async with routed(*stubs, limits=Limits(max_retries=2)) as client:
            async with client.session.post(client.router.url + PATH, json={}) as response:
                assert (response.status, response.headers["Retry-After"]) == (503, "1")
                assert "3 instances have failed" in (await response.json())["error"]["message"]
            assert sum(stub.num_requests for stub in stubs) == 3
            assert await client.metric(f'vllm_router_retries_exhausted_total{{route="{PATH}"}}') == 1

    run(check)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("half_that_dies", ["prefill", "decode", "serve", "tokenizer"])
@pytest.mark.parametrize("broken", [die, abort, headers_only])
def test_a_request_that_may_have_ended_an_instance_is_tried_once_more(
    broken: Handler, half_that_dies: str, style: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise one request could end every instance."""
    if half_that_dies == "tokenizer":
        monkeypatch.setattr(KVSubscriptions, "num_blocks", {"somewhere": 1})

    async def tokenize_and_die(request: web.Request) -> web.StreamResponse:
        return await (abort if request.path == "/tokenize" else broken)(request)

    async def check() -> None:
        others: list[Stub] = []
        if half_that_dies in ("serve", "tokenizer"):
            stubs = [serve(tokenize_and_die) for _ in range(4)]
        elif half_that_dies == "prefill":
            stubs, others = [prefill(broken, style) for _ in range(4)], [decode(never)]
        else:
            stubs, others = [decode(broken) for _ in range(4)], [prefill(prefilled, style)]
        async with routed(*stubs, *others, limits=Limits(max_retries=3)) as client:
            status, answer = await client.ask()
            assert (status, "2 times an instance has failed that had this request" in answer.decode()) == (503, True)
            assert sum(stub.num_requests for stub in stubs) == 2

    run(check)


@pytest.mark.parametrize("status", [200, 400, 404, 429, 500])
def test_an_answered_request_is_not_retried(status: int) -> None:
    async def check() -> None:
        async def answer(request: web.Request) -> web.StreamResponse:
            return web.Response(status=status, text="x")

        first, second = serve(answer), serve(answer)
        async with routed(first, second) as client:
            assert await client.ask() == (status, b"x")
            assert first.num_requests + second.num_requests == 1

    run(check)


def test_an_incomplete_answer_is_also_cut_for_the_client() -> None:
    async def check() -> None:
        first, second = serve(half), serve(half)
        async with routed(first, second) as client:
            with pytest.raises(aiohttp.ClientPayloadError):
                await client.ask()
            assert first.num_requests + second.num_requests == 1
            name = f'vllm_router_request_errors_total{{error_type="cut",route="{PATH}"}}'
            assert await client.metric(name) == 1

    run(check)


def test_a_connection_that_an_instance_ends_after_an_answer_fails_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "_MIN_IDLE_SECONDS", 0)

    async def check() -> None:
        async with routed(serve(OncePerConnection().answer)) as client:
            assert [(await client.ask())[0] for _ in range(3)] == [200] * 3

    run(check)


def test_usage_is_counted_once() -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}

    async def both(request: web.Request) -> web.StreamResponse:
        params = {"kv_transfer_params": {"ticket": "t"}}
        return web.json_response({"choices": [{"text": '"usage": {"prompt_tokens": 99}'}], "usage": usage, **params})

    async def check() -> None:
        d = decode(both)
        async with routed(prefill(both), d) as client:
            await client.ask()
            for name, value in (("prompt", 7), ("cached", 4), ("generation", 3)):
                name = f'penstock_router_{name}_tokens_total{{worker="{d.url}"}}'
                assert await client.metric(name) == value
            async with client.session.get(client.router.url + "/metrics") as response:
                assert (await response.text()).count("penstock_router_prompt_tokens_total{") == 1

    run(check)


def test_other_routes_go_to_an_instance_that_answers() -> None:
    async def where(request: web.Request) -> web.StreamResponse:
        return web.Response(text=f"{request.method} {request.raw_path}")

    async def check() -> None:
        async with routed(prefill(never), decode(where)) as client:
            async with client.session.get(URL(client.router.url + "/v1/models?a=%2Fb", encoded=True)) as response:
                assert await response.text() == "GET /v1/models?a=%2Fb"
            assert await client.ask("/tokenize") == (200, b"POST /tokenize")

    run(check)
