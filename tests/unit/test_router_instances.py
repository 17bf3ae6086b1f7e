"""Instances that are added, removed, unhealthy or dead behind the router, and its administration."""

from __future__ import annotations

import asyncio

import pytest

from penstock.router.health import HealthConfig
from tests.unit.router_stubs import (
    PATH,
    SECONDS,
    WATCHFUL,
    Client,
    Gathering,
    Stub,
    echo,
    never,
    routed,
    run,
    serve,
    serving,
    until,
)

# ---- States of instances ----


@pytest.mark.parametrize(
    ("health", "state"),
    [
        ("draining", "draining"), ("restarting", "starting"), ("unhealthy", "unhealthy"), ("dead", "dead"),
        (None, "unhealthy"),
    ],
)  # fmt: skip
def test_an_instance_gets_requests_only_while_it_is_ready(health: str | None, state: str) -> None:
    async def check() -> None:
        first, second = serve(echo), serve(echo)
        async with routed(first, second, health=WATCHFUL) as client:
            first.health = health
            await until(lambda: _is(client, first, state))
            assert [(await client.ask())[0] for _ in range(4)] == [200] * 4
            assert (first.num_requests, second.num_requests) == (0, 4)
            first.health = "ok"
            await until(lambda: _is(client, first, "ready"))
            await asyncio.gather(*(client.ask() for _ in range(4)))
            assert first.num_requests > 0

    run(check)


async def _is(client: Client, stub: Stub, state: str) -> bool:
    return await client.state_of(stub) == state


def test_requests_of_a_dead_instance_go_to_another_one() -> None:
    """The instance neither answers nor closes its connections."""

    async def check() -> None:
        first, second = serve(never), serve(echo)
        async with routed(first, second, health=WATCHFUL) as client:
            asked = [asyncio.create_task(client.ask()) for _ in range(2)]
            await until(lambda: first.num_requests == 1)
            first.health = None
            assert {status for status, _ in await asyncio.gather(*asked)} == {200}
            assert second.num_requests == 2
            assert await client.state_of(first) == "dead"

    run(check)


def test_requests_of_an_instance_without_progress_go_to_another_one() -> None:
    """The instance reports good health, and answers nothing."""

    async def check() -> None:
        first, second = serve(never), serve(echo)
        async with routed(first, second, health=HealthConfig(0.05, SECONDS, stall_after=1, dead_after=0.5)) as client:
            asked = [asyncio.create_task(client.ask()) for _ in range(2)]
            assert {status for status, _ in await asyncio.gather(*asked)} == {200}
            assert (first.num_cancelled, second.num_requests) == (1, 2)

    run(check)


def test_requests_without_an_instance_get_status_503() -> None:
    async def check() -> None:
        stub = serve(echo)
        async with routed(stub) as client:
            stub.health = "dead"
            await until(lambda: _is(client, stub, "dead"))
            async with client.session.post(client.router.url + PATH, json={}) as response:
                assert (response.status, response.headers["Retry-After"]) == (503, "1")
                assert "no instance is left" in (await response.json())["error"]["message"]
            async with client.session.get(client.router.url + "/ready") as response:
                assert response.status == 503
            async with client.session.get(client.router.url + "/health") as response:
                assert response.status == 200

    run(check)


def test_instances_are_added_drained_and_removed() -> None:
    async def check() -> None:
        waits = Gathering(9)
        first, second = serve(waits.answer), serve(echo)
        async with routed(first) as client, serving(second):
            asked = asyncio.create_task(client.ask())
            await until(lambda: first.num_requests == 1)
            await client.admin("/instances", url=second.url + "/v1/")
            await until(lambda: _is(client, second, "ready"))
            await client.admin("/drain", url=first.url + "/v1/")
            assert await client.state_of(first) == "draining"
            assert [(await client.ask())[0] for _ in range(3)] == [200] * 3
            assert (first.num_requests, second.num_requests) == (1, 3)
            await client.admin("/resume", url=first.url + "/v1")
            await until(lambda: _is(client, first, "ready"))
            await client.admin("/remove", url=first.url)
            assert await client.state_of(first) == "draining", "it still has a request"
            waits.is_complete.set()
            assert (await asked)[0] == 200
            assert await client.state_of(first) == "removed"

    run(check)


def test_immediate_removal_moves_unanswered_requests() -> None:
    async def check() -> None:
        first, second = serve(never), serve(echo)
        async with routed(first) as client, serving(second):
            asked = asyncio.create_task(client.ask())
            await until(lambda: first.num_requests == 1)
            await client.admin("/instances", url=second.url)
            await until(lambda: _is(client, second, "ready"))
            await client.admin("/remove", url=first.url, now=True)
            assert (await asked)[0] == 200
            assert await client.state_of(first) == "removed"
            assert first.num_cancelled == 1

    run(check)


def test_administration_refuses_invalid_requests() -> None:
    async def check() -> None:
        stub = serve(echo)
        async with routed(stub) as client:
            assert "is not the URL" in (await client.admin("/instances", url="nonsense"))["error"]["message"]
            assert "role must be" in (await client.admin("/instances", url=stub.url, role="x"))["error"]["message"]
            message = (await client.admin("/instances", url=stub.url, role="decode"))["error"]["message"]
            assert "is there as a serve instance" in message
            for path, message in (("/drain", "there is no instance 'http://x'"), ("/nothing", "there is no POST")):
                error = (await client.admin(path, url="http://x"))["error"]
                assert error["type"] == "not_found_error"
                assert error["message"].startswith(message)
            for fields, message in (({"url": 3}, "send JSON such as"), ({}, "url is missing"), ({"url": ""}, "url is")):
                for path in ("/drain", "/instances"):
                    assert (await client.admin(path, **fields))["error"]["message"].startswith(message)
            async with client.session.get(client.router.admin_url) as response:
                assert "Penstock router" in await response.text()

    run(check)


@pytest.mark.parametrize("headers", [{"Host": "evil.example"}, {"Origin": "http://evil.example"}])
def test_requests_of_foreign_web_pages_are_refused_on_both_ports(headers: dict[str, str]) -> None:
    async def check() -> None:
        stub = serve(echo)
        async with routed(stub) as client:
            assert (await client.ask(headers=headers))[0] == 403
            url = client.router.admin_url + "/drain"
            async with client.session.post(url, json={"url": stub.url}, headers=headers) as response:
                assert response.status == 403
            assert stub.num_requests == 0

    run(check)


def test_a_request_target_cannot_name_another_host() -> None:
    async def check() -> None:
        async with routed(serve(echo)) as client:
            host, port = client.router.url.removeprefix("http://").split(":")
            for target in ("@127.0.0.1:1/", "http://127.0.0.1:1/v1/models"):
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(f"GET {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
                assert b" 400 " in await reader.readline()
                writer.close()
                await writer.wait_closed()

    run(check)
