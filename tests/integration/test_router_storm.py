"""Hundreds of requests while instances die, drain, leave and join: each is answered once, or with an error."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path

import pytest

from penstock.router.health import HealthConfig
from penstock.router.instances import Instance, Role
from penstock.router.service import RouterConfig, running

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from route_parts.storm import Tally, storm
from route_parts.stub import StubInstance


class InThisProcess:
    def __init__(self, stubs: list[StubInstance]) -> None:
        self.stubs = stubs
        self.urls = [stub.url for stub in stubs]

    async def stop(self, number: int) -> None:
        await self.stubs[number].stop()

    async def start(self, number: int) -> None:
        await self.stubs[number].start()


@pytest.mark.parametrize("seed", [1, 2])
def test_every_request_is_answered_once_or_with_an_error(seed: int) -> None:
    async def check() -> tuple[Tally, list[StubInstance]]:
        async with contextlib.AsyncExitStack() as stack:
            stubs = [StubInstance() for _ in range(4)]
            for stub in stubs:
                await stub.start()
                stack.push_async_callback(stub.stop)
            health = HealthConfig(interval=0.05, timeout=60, dead_after=5)
            config = RouterConfig([Instance(stub.url, Role.SERVE) for stub in stubs], "127.0.0.1", 0, 0, health=health)
            async with running(config) as router:
                tally = await storm(
                    router.url, router.admin_url, InThisProcess(stubs), num_requests=400, concurrency=16, seed=seed
                )
                router.dispatcher.check_integrity()
                assert (router.dispatcher.num_live, router.dispatcher.num_queued) == (0, 0)
            return tally, stubs

    tally, stubs = asyncio.run(check())
    assert not tally.wrong
    assert tally.total == 400
    assert tally.answered > 200, tally
    assert any(stub.num_deaths for stub in stubs), "no instance has died"
