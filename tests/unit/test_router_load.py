"""The router's queue, and clients that disconnect."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from penstock.router import service
from penstock.router.dispatcher import Limits
from penstock.router.exchange import Exchanges, Timeouts
from tests.unit.router_stubs import (
    PATH,
    SECONDS,
    STYLES,
    Gathering,
    decode,
    echo,
    never,
    prefill,
    prefilled,
    routed,
    run,
    serve,
    until,
)

# ---- Load ----


def test_requests_go_to_the_instance_with_the_least_work() -> None:
    async def check() -> None:
        waits = Gathering(9)
        stubs = [serve(waits.answer) for _ in range(3)]
        async with routed(*stubs) as client:
            await asyncio.gather(*(client.ask() for _ in range(9)))
            assert [stub.num_requests for stub in stubs] == [3, 3, 3]
            waits._missing, _ = 3, waits.is_complete.clear()
            long = asyncio.create_task(client.ask(body={"prompt": "a" * 40_000}))
            await until(lambda: sum(stub.num_requests for stub in stubs) == 10)
            await asyncio.gather(long, *(client.ask() for _ in range(2)))
            assert [stub.num_requests for stub in stubs] == [4, 4, 4]

    run(check)


def test_requests_are_queued_and_refused_when_the_queue_is_full() -> None:
    async def check() -> None:
        waits = Gathering(4)
        async with routed(serve(waits.answer), limits=Limits(max_outstanding=1, max_queued=3)) as client:
            # They are admitted one by one, so that the first is answered only when the test allows it.
            asked = [asyncio.create_task(client.ask()) for _ in range(4)]
            await until(lambda: client.router.dispatcher.num_queued == 3)
            async with client.session.post(client.router.url + PATH, json={}) as response:
                assert (response.status, response.headers["Retry-After"]) == (503, "1")
                assert "3 requests are waiting already" in (await response.json())["error"]["message"]
            assert await client.metric("penstock_router_queued_requests") == 3
            waits.is_complete.set()
            assert {status for status, _ in await asyncio.gather(*asked)} == {200}

    run(check)


def test_nothing_is_kept_for_the_address_of_an_instance_without_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instances come and go, and each may have an address of its own."""
    made: list[Exchanges] = []

    def make(*arguments: Any) -> Exchanges:
        made.append(Exchanges(*arguments))
        return made[0]

    async def check() -> None:
        waits = Gathering(4)
        stub = serve(waits.answer)
        async with routed(stub) as client:
            asked = [asyncio.create_task(client.ask()) for _ in range(3)]
            await until(lambda: stub.num_requests == 3)
            assert sum(map(len, made[0]._scopes.values())) == 3
            waits.is_complete.set()
            await asyncio.gather(*asked)
            await until(lambda: client.router.dispatcher.num_live == 0)
            assert not made[0]._scopes

    monkeypatch.setattr(service, "Exchanges", make)
    run(check)


def test_a_request_does_not_wait_for_ever() -> None:
    async def check() -> None:
        waits = Gathering(9)
        async with routed(serve(waits.answer), limits=Limits(max_outstanding=1, queue_timeout=0.2)) as client:
            first = asyncio.create_task(client.ask())
            await until(lambda: client.router.dispatcher.num_live == 1)
            status, body = await client.ask()
            assert (status, b"no instance was free within 0.2 seconds" in body) == (503, True)
            waits.is_complete.set()
            assert (await first)[0] == 200

    run(check)


def test_clients_with_keys_take_turns() -> None:
    """A full queue of one client's requests: another one's gets a place in it at once, and the next turn."""

    async def check() -> None:
        gate, order = asyncio.Semaphore(0), list[str]()

        async def answer(request: web.Request) -> web.StreamResponse:
            order.append(request.headers["Authorization"][-4:])
            await gate.acquire()
            return await echo(request)

        async with routed(serve(answer), limits=Limits(max_outstanding=1, max_queued=3)) as client:

            def ask(key: str) -> asyncio.Task[tuple[int, bytes]]:
                return asyncio.create_task(client.ask(headers={"Authorization": f"Bearer {key}"}))

            asked = [ask("many") for _ in range(4)]
            await until(lambda: client.router.dispatcher.num_queued == 3)
            other = ask("once")
            (refused,), _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            assert (await refused)[0] == 503
            for _ in range(4):
                gate.release()
            assert (await other)[0] == 200
            assert sorted(status for status, _ in await asyncio.gather(*asked)) == [200, 200, 200, 503]
            assert order == ["many", "many", "once", "many"]

    run(check)


def test_the_router_admits_as_many_requests_as_the_instances_accept() -> None:
    async def check() -> None:
        count = 150
        async with routed(prefill(prefilled), decode(Gathering(count).answer)) as client:
            assert {status for status, _ in await asyncio.gather(*(client.ask() for _ in range(count)))} == {200}

    run(check)


# ---- Clients that disconnect ----


@pytest.mark.parametrize("style", STYLES)
def test_both_halves_end_when_the_client_disconnects(style: str) -> None:
    async def check() -> None:
        p, d = prefill(never, style), decode(never)
        options = {"timeouts": Timeouts(prefill=SECONDS)}
        async with routed(p, d, **options) as client:
            asked = asyncio.create_task(client.ask())
            await until(lambda: p.num_requests == 1 and d.num_requests == (style == "concurrent"))
            asked.cancel()
            await until(lambda: p.num_cancelled == 1 and d.num_cancelled == (style == "concurrent"))
            await until(lambda: not client.router.dispatcher.num_live)
            name = f'vllm_router_request_errors_total{{error_type="client_left",route="{PATH}"}}'
            assert await client.metric(name) == 1

    run(check)


def test_a_stream_ends_when_the_client_disconnects() -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"data: {}\n\n")
            await asyncio.sleep(0.01)

    async def check() -> None:
        stub = serve(endless)
        async with routed(stub) as client:
            async with client.session.post(client.router.url + PATH, json={}) as response:
                await response.content.readany()
            await until(lambda: stub.num_cancelled == 1 and not client.router.dispatcher.num_live)

    run(check)


def test_a_waiting_client_that_disconnects_leaves_the_queue() -> None:
    async def check() -> None:
        waits = Gathering(9)
        async with routed(serve(waits.answer), limits=Limits(max_outstanding=1)) as client:
            asked = [asyncio.create_task(client.ask()) for _ in range(2)]
            await until(lambda: client.router.dispatcher.num_queued == 1)
            for each in asked:
                each.cancel()
            await until(lambda: not client.router.dispatcher.num_live)
            assert client.router.dispatcher.num_queued == 0

    run(check)


def test_a_client_that_closes_at_the_last_event_counts_as_answered() -> None:
    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        usage = {"usage": {"prompt_tokens": 3, "completion_tokens": 2}}
        await response.write(f"data: {json.dumps(usage)}\n\ndata: [DONE]\n\n".encode())
        await asyncio.Event().wait()
        return response

    async def check() -> None:
        stub = serve(stream)
        async with routed(stub) as client:
            async with client.session.post(client.router.url + PATH, json={}) as response:
                while b"[DONE]" not in await response.content.readline():
                    pass
            await until(lambda: not client.router.dispatcher.num_live)
            assert await client.metric(f'penstock_router_prompt_tokens_total{{worker="{stub.url}"}}') == 3
            name = f'vllm_router_request_errors_total{{error_type="client_left",route="{PATH}"}}'
            assert await client.metric(name) == 0

    run(check)
