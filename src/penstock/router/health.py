"""Interprets an instance's `/health` and `/ready`, detects missing progress, and queries the instances periodically.

The criterion is progress, not a live process. Penstock's `/health` fails if an engine has work and makes no step; and
any instance is stalled that has requests but for long has neither sent part of an answer nor counted a token.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from penstock.router.http_client import Call, HttpUpstream, fetch
from penstock.router.instances import Signal
from penstock.router.pool import Pool
from penstock.utils.clock import Clock
from penstock.utils.errors import ConfigError, PeerError
from penstock.utils.names import one_line

_MAX_REASON = 200
_MAX_MODELS = 256
_BY_STATUS = {
    "draining": Signal.DRAINING,
    "restarting": Signal.STARTING,
    "unhealthy": Signal.STALLED,
    "dead": Signal.LOST,
}
# A server without this route cannot be checked, and is assumed to be healthy.
_NO_SUCH_ROUTE = (404, 405)
# These grow while an engine computes, also during a long prompt or an answer that is not streamed.
_TOKEN_COUNTERS = (b"vllm:prompt_tokens_total", b"vllm:generation_tokens_total", b"vllm:iteration_tokens_total_sum")


@dataclass(frozen=True, slots=True)
class HealthConfig:
    """Times in seconds. `interval`: between checks; `timeout`: for one answer; `stall_after`: without progress despite
    requests, until an instance counts as unhealthy; `dead_after`: unhealthy, until it counts as dead.
    """

    interval: float = 1.0
    timeout: float = 5.0
    stall_after: float = 60.0
    dead_after: float = 30.0

    def check(self) -> None:
        """Raises ConfigError."""
        for name in ("interval", "timeout", "stall_after"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"health {name} must be above 0, got {getattr(self, name)}")
        if not self.dead_after >= 0:
            raise ConfigError(f"dead_after must not be negative, got {self.dead_after}")


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    body: bytes


def signal_of(health: Reply, ready: Reply) -> tuple[Signal, str]:
    """Returns the meaning of the two answers, and their reason."""
    status, reason = _read(health)
    if status in _BY_STATUS:
        return _BY_STATUS[status], reason
    if health.status != 200 and health.status not in _NO_SUCH_ROUTE:
        return Signal.STALLED, reason or f"/health answers {health.status}"
    if ready.status != 200 and ready.status not in _NO_SUCH_ROUTE:
        return Signal.STARTING, _read(ready)[1] or f"/ready answers {ready.status}"
    return Signal.READY, ""


def reported(ready: Reply) -> tuple[tuple[str, ...], bool]:
    """Returns the names of the models that the instance reports, sorted, and whether it shares KV with others."""
    try:
        found = _decode_ready(ready.body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return (), False
    return tuple(sorted(set(found.models[:_MAX_MODELS]))), found.shares_kv


class _Ready(msgspec.Struct):
    models: list[str] = []
    shares_kv: bool = False


_decode_ready = msgspec.json.Decoder(_Ready).decode


def tokens_counted(metrics: bytes) -> float:
    """Returns the sum of an engine's counters of tokens; 0 if it has none."""
    lines = (line for line in metrics.splitlines() if line.startswith(_TOKEN_COUNTERS))
    try:
        return sum(float(line.rpartition(b" ")[2]) for line in lines)
    except ValueError:
        return 0.0


def _read(reply: Reply) -> tuple[str, str]:
    """Returns `status` and `reason` of a body, which other servers may omit."""
    try:
        body = json.loads(reply.body)
    except (ValueError, RecursionError):
        return "", ""
    if not isinstance(body, dict):
        return "", ""
    status, reason = (text if isinstance(text, str) else "" for text in (body.get("status"), body.get("reason")))
    return status, one_line(reason[:_MAX_REASON])


class HealthChecks:
    """Queries every instance of the pool periodically. `on_change` is called after each answer; `on_death` with the URL
    of an instance that has died.
    """

    def __init__(self, pool: Pool, upstream: HttpUpstream, config: HealthConfig, clock: Clock) -> None:
        config.check()
        self._pool = pool
        self._upstream = upstream
        self._config = config
        self._clock = clock
        self._soon: dict[str, asyncio.Event] = {}
        self._counted: dict[str, float] = {}

    async def run(self, on_change: Callable[[], None], on_death: Callable[[str], None]) -> None:
        """Runs until cancelled. Instances may be added and removed meanwhile."""
        async with asyncio.TaskGroup() as group:
            while True:
                for member in self._pool:
                    if member.url not in self._soon:
                        self._soon[member.url] = asyncio.Event()
                        group.create_task(self._watch(member.url, on_change, on_death))
                on_change()
                await pause(self._config.interval)

    def check_soon(self, url: str) -> None:
        """Called when a request has failed there: the next query is sent without delay."""
        if url in self._soon:
            self._soon[url].set()

    async def check_all(self) -> None:
        """Queries every instance once."""
        await asyncio.gather(*(self._check(member.url) for member in self._pool))

    async def _watch(self, url: str, on_change: Callable[[], None], on_death: Callable[[str], None]) -> None:
        soon = self._soon[url]
        while url in self._pool:
            if await self._check(url):
                on_death(url)
            on_change()
            await pause(self._config.interval, soon)
            soon.clear()
        del self._soon[url]
        self._counted.pop(url, None)

    async def _check(self, url: str) -> bool:
        """Returns True if the instance has died."""
        try:
            health, ready = await self._ask(f"{url}/health"), await self._ask(f"{url}/ready")
            signal, reason = signal_of(health, ready)
            models, shares_kv = reported(ready)
            self._pool.learn(url, models, shares_kv=shares_kv)
            if signal is Signal.READY and await self._is_stalled(url):
                seconds = self._pool.stalled_for(url, self._clock.now())
                signal, reason = Signal.STALLED, f"it has requests and has made no progress for {seconds:.0f} s"
        except PeerError as error:
            if getattr(error.__cause__, "errno", None) in (errno.EMFILE, errno.ENFILE):
                return False  # the router lacks file descriptors, which says nothing about the instance
            signal, reason = Signal.SILENT, one_line(str(error)[:_MAX_REASON])
        return self._pool.observe(url, signal, self._clock.now(), reason)

    async def _is_stalled(self, url: str) -> bool:
        """Reads the metrics only of an instance that has sent nothing for half of the time."""
        half = self._config.stall_after / 2
        if self._pool.stalled_for(url, self._clock.now()) < half:
            self._counted.pop(url, None)
            return False
        counted = tokens_counted((await self._ask(f"{url}/metrics")).body)
        if counted > self._counted.setdefault(url, counted):
            self._counted[url] = counted
            self._pool.progressed(url, self._clock.now())
        return self._pool.stalled_for(url, self._clock.now()) >= self._config.stall_after

    async def _ask(self, url: str) -> Reply:
        status, _, body = await fetch(self._upstream, Call("GET", url), self._config.timeout)
        return Reply(status, body)


async def pause(seconds: float, unless: asyncio.Event | None = None) -> None:
    """Waits for this time, or until the event is set."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await (unless or asyncio.Event()).wait()
