"""Restarts of the engine core: their limit, the pauses between them, and the errors that requests get meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from penstock.config.engine import EngineArgs, resolve
from penstock.config.replicas import CorePlan
from penstock.frontend import core_restarts
from penstock.frontend.core_restarts import RECOVERED_SECONDS, RestartingCore
from penstock.utils.clock import ManualClock
from penstock.utils.errors import ConfigError, EngineDeadError, OverloadedError


class FakeCore:
    """A core that starts, or fails to start with `failure`, and dies on demand."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.ready: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self.death: EngineDeadError | None = None
        self.is_shut_down = False
        self._handler: Callable[[Any], None] = lambda _: None
        if failure is None:
            self.ready.set_result(["ready"])
        else:
            self.ready.set_exception(failure)

    def set_handler(self, handler: Callable[[Any], None]) -> None:
        self._handler = handler

    def die(self, why: str) -> None:
        self.death = EngineDeadError(why)
        self._handler(self.death)

    async def shutdown(self) -> None:
        self.is_shut_down = True


class World:
    """The clock, the waits, and every core that was started; `failures` are those of the next starts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, max_restarts: int) -> None:
        self.clock = ManualClock()
        self.waits: list[float] = []
        self.failures: list[Exception] = []
        self.cores = [FakeCore()]
        self.heard: list[object] = []
        monkeypatch.setattr(core_restarts.CoreClient, "start", self._start)
        monkeypatch.setattr(RestartingCore, "_pause", self._pause)
        self.owner = RestartingCore(CorePlan(resolve(EngineArgs())), self.cores[0], max_restarts, self.clock)  # pyright: ignore
        self.owner.add_handler(self.heard.append)

    async def _start(self, _: CorePlan) -> FakeCore:
        assert self.cores[-1].is_shut_down, "its memory must be free before another one starts"
        self.cores.append(FakeCore(self.failures.pop(0) if self.failures else None))
        return self.cores[-1]

    async def _pause(self, seconds: float) -> None:
        self.waits.append(seconds)

    async def kill(self, why: str = "it broke") -> None:
        self.cores[-1].die(why)
        await self.settle()

    async def settle(self) -> None:
        for _ in range(200):
            await asyncio.sleep(0)


def scenario(run: Callable[[pytest.MonkeyPatch], Coroutine[Any, Any, None]]) -> Callable[[pytest.MonkeyPatch], None]:
    def test(monkeypatch: pytest.MonkeyPatch) -> None:
        asyncio.run(run(monkeypatch))

    test.__doc__ = run.__doc__
    return test


@scenario
async def test_without_restarts_the_first_death_is_final(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, max_restarts=0)
    await world.kill("it broke")
    assert world.owner.died.is_set()
    assert str(world.owner.death) == "it broke"
    assert len(world.cores) == 1
    with pytest.raises(EngineDeadError, match="it broke"):
        _ = world.owner.client


@scenario
async def test_consecutive_attempts_are_limited_and_wait_increasingly_long(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, max_restarts=7)
    for number in range(7):
        await world.kill()
        assert world.owner.num_restarts == number + 1
        assert world.owner.client is world.cores[-1]
        assert world.owner.outage is None
    assert world.waits == [1, 2, 4, 8, 16, 30, 30]
    await world.kill("for the eighth time")
    assert world.owner.died.is_set()
    assert str(world.owner.death) == "for the eighth time"


@scenario
async def test_a_core_that_has_served_for_a_while_resets_the_count(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, max_restarts=1)
    for _ in range(3):
        await world.kill()
        world.clock.advance(RECOVERED_SECONDS)
    assert world.waits == [1, 1, 1]
    await world.kill()
    world.clock.advance(RECOVERED_SECONDS - 1)
    await world.kill()
    assert world.owner.died.is_set()


@scenario
async def test_a_failed_start_counts_as_an_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """This includes configuration errors, because the configuration has worked before."""
    world = World(monkeypatch, max_restarts=3)
    world.failures = [ConfigError("no memory"), EngineDeadError("it was killed")]
    await world.kill()
    assert world.owner.num_restarts == 1
    assert world.waits == [1, 2, 4]
    world.failures = [ConfigError("no memory")] * 3
    world.clock.advance(RECOVERED_SECONDS)
    await world.kill()
    assert world.owner.died.is_set()
    assert isinstance(world.owner.death, EngineDeadError)
    assert str(world.owner.death) == "no memory"


@scenario
async def test_any_failure_of_a_restart_counts_as_an_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the server would wait forever for an engine that nobody starts."""
    world = World(monkeypatch, max_restarts=2)
    world.failures = [AssertionError("an unexpected message")]
    await world.kill()
    assert world.owner.num_restarts == 1
    assert world.owner.client is world.cores[-1]

    async def fail() -> None:
        raise RuntimeError("can't start new thread")

    world.clock.advance(RECOVERED_SECONDS)
    monkeypatch.setattr(world.cores[-1], "shutdown", fail)
    await world.kill()
    assert world.owner.died.is_set()
    assert str(world.owner.death) == "can't start new thread"


@scenario
async def test_a_core_serves_only_when_all_have_taken_its_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, max_restarts=2)
    failures = [ConfigError("generation_config.json is no JSON")]

    def take(message: object) -> None:
        if message == "ready" and failures:
            raise failures.pop()

    world.owner.add_handler(take)
    await world.kill()
    assert world.owner.num_restarts == 1
    assert len(world.cores) == 3
    await world.kill("it is heard")
    assert str(world.owner.death) == "it is heard"


@scenario
async def test_there_is_no_client_during_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, max_restarts=1)
    world.cores[0].die("it broke")
    with pytest.raises(OverloadedError, match="started again"):
        _ = world.owner.client
    assert world.owner.death is None
    assert str(world.owner.outage) == "it broke"
    await world.settle()
    assert [type(each) for each in world.heard] == [EngineDeadError, str]


@scenario
async def test_shutdown_ends_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, max_restarts=5)
    world.cores[0].die("it broke")
    await world.owner.shutdown()
    assert world.owner.died.is_set()
    assert len(world.cores) == 1
    await world.owner.shutdown()


@scenario
async def test_a_death_before_the_handler_is_set_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, max_restarts=0)
    core = FakeCore()
    core.die("too early")
    owner = RestartingCore(CorePlan(resolve(EngineArgs())), core, 0, world.clock)  # pyright: ignore
    owner.add_handler(world.heard.append)
    assert owner.died.is_set()
    assert str(world.heard[-1]) == "too early"


@scenario
async def test_every_engine_of_a_core_hears_of_its_death_and_of_the_next_core(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, max_restarts=1)
    other: list[object] = []
    world.owner.add_handler(other.append)
    await world.kill()
    assert [type(each) for each in other] == [EngineDeadError, str]
    assert other == world.heard
    await world.kill("for good")
    late: list[object] = []
    world.owner.add_handler(late.append)
    assert [str(each) for each in late] == ["for good"]
    assert len(other) == 3
