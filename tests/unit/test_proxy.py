"""The proxy in front of instances that do not answer, or end in the middle of an answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from penstock.router.proxy import Instances, Proxy

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
SECONDS, PREFILL_SECONDS = 10.0, 0.5


@contextlib.asynccontextmanager
async def serving(app: web.Application) -> AsyncIterator[str]:
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def instance(handler: Handler) -> web.Application:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    return app


async def never(request: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def echo(request: web.Request) -> web.StreamResponse:
    return web.json_response({"asked": await request.json()})


async def half(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(b"data: {}\n\n")
    assert request.transport is not None
    request.transport.abort()
    return response


async def abort(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


class OncePerConnection:
    """Answers, and ends a connection that is used again, as an instance does with one that it has kept for long."""

    def __init__(self) -> None:
        self._used: set[object] = set()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.transport in self._used:
            return await abort(request)
        self._used.add(request.transport)
        return await echo(request)


class Gathering:
    """Answers when so many requests are there."""

    def __init__(self, count: int) -> None:
        self._missing = count
        self._all = asyncio.Event()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self._missing -= 1
        if not self._missing:
            self._all.set()
        await self._all.wait()
        return await echo(request)


@contextlib.asynccontextmanager
async def proxied(prefill: Handler, decode: Handler, style: str) -> AsyncIterator[Callable[[], Awaitable[tuple]]]:
    """A call sends a request and returns its status and body."""
    async with (
        serving(instance(prefill)) as p,
        serving(instance(decode)) as d,
        serving(Proxy(Instances(p, d, p), style, prefill_timeout=PREFILL_SECONDS).app) as url,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
    ):

        async def complete() -> tuple[int, bytes]:
            async with session.post(f"{url}/v1/completions", json={"prompt": "a"}) as response:
                return response.status, await response.read()

        yield complete


@pytest.mark.parametrize("style", ["serial", "concurrent"])
def test_a_prefill_instance_that_does_not_answer_delays_a_request_and_no_more(style: str) -> None:
    async def check() -> None:
        async with proxied(never, echo, style) as complete, asyncio.timeout(SECONDS):
            status, body = await complete()
            assert status == 200
            assert b"kv_transfer_params" not in body

    asyncio.run(check())


def test_an_answer_that_ends_too_early_is_cut_for_the_client_too() -> None:
    async def check() -> None:
        async with proxied(echo, half, "serial") as complete, asyncio.timeout(SECONDS):
            with pytest.raises(aiohttp.ClientPayloadError):
                await complete()

    asyncio.run(check())


def test_a_decode_instance_that_ends_before_it_answers_is_an_error_that_says_so() -> None:
    async def check() -> None:
        async with proxied(echo, abort, "serial") as complete, asyncio.timeout(SECONDS):
            status, body = await complete()
            assert status == 503
            assert b"the decode instance does not answer" in body

    asyncio.run(check())


def test_both_instances_get_the_whole_prompt() -> None:
    """Tools are a part of it: a prefill instance without them would compute another prompt."""
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": "auto",
        "max_completion_tokens": 9,
        "min_tokens": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    asked: list[dict[str, Any]] = []

    async def prefill(request: web.Request) -> web.StreamResponse:
        asked.append(await request.json())
        return web.json_response({"kv_transfer_params": {"ticket": "t"}})

    async def check() -> None:
        async with (
            serving(instance(prefill)) as p,
            serving(instance(echo)) as d,
            serving(Proxy(Instances(p, d), "serial").app) as url,
            aiohttp.ClientSession() as session,
            session.post(f"{url}/v1/chat/completions", json=body) as response,
        ):
            asked.append((await response.json())["asked"])

    asyncio.run(check())
    for_prefill, for_decode = asked
    assert for_decode == {**body, "kv_transfer_params": {"ticket": "t"}}
    assert {name: for_prefill[name] for name in ("messages", "tools", "tool_choice")} == {
        name: body[name] for name in ("messages", "tools", "tool_choice")
    }
    assert (for_prefill["max_completion_tokens"], for_prefill["stream"]) == (1, False)
    assert for_prefill["kv_transfer_params"] == {"do_remote_decode": True, "do_remote_prefill": False}
    assert not for_prefill.keys() & {"min_tokens", "stream_options"}


def test_a_connection_that_an_instance_ends_after_an_answer_costs_no_request() -> None:
    async def check() -> None:
        async with proxied(echo, OncePerConnection().answer, "serial") as complete, asyncio.timeout(SECONDS):
            assert [(await complete())[0] for _ in range(3)] == [200] * 3

    asyncio.run(check())


def test_the_proxy_has_room_for_as_many_requests_as_the_instances_take() -> None:
    async def check() -> None:
        count = 150
        async with proxied(echo, Gathering(count).answer, "serial") as complete, asyncio.timeout(4 * SECONDS):
            assert {status for status, _ in await asyncio.gather(*(complete() for _ in range(count)))} == {200}

    asyncio.run(check())
