"""The complete router: its parts, their lifecycle, and its addresses."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from penstock.router.admin import Admin
from penstock.router.dispatcher import Dispatcher, Limits, Policy
from penstock.router.exchange import Exchanges, Timeouts
from penstock.router.front_door import FrontDoor
from penstock.router.health import HealthChecks, HealthConfig, pause
from penstock.router.http_client import HttpUpstream
from penstock.router.http_server import serving
from penstock.router.instances import Instance
from penstock.router.kv_subscriptions import KVSubscriptions
from penstock.router.observer import RouterObserver
from penstock.router.pool import Pool
from penstock.router.prompts import EstimatedPrompts, TokenizedPrompts
from penstock.utils.clock import Clock, SystemClock
from penstock.utils.hosts import is_local_host

_LOOPBACK = "127.0.0.1"
_IDLE_POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """`host` and `port`: the address for clients. `admin_port` is on loopback, None for no administration; port 0 means
    a free one. `shutdown_timeout`: seconds that running requests have at shutdown.
    """

    instances: Sequence[Instance]
    host: str = _LOOPBACK
    port: int = 8000
    admin_port: int | None = None
    shutdown_timeout: float = 30.0
    policy: Policy = Policy.PREFIX_AWARE
    limits: Limits = field(default_factory=Limits)
    health: HealthConfig = field(default_factory=HealthConfig)
    timeouts: Timeouts = field(default_factory=Timeouts)


@dataclass(frozen=True, slots=True)
class Listening:
    """A running router. `admin_url` is empty without administration."""

    url: str
    admin_url: str
    dispatcher: Dispatcher
    close: Callable[[], None]
    """From now on `/ready` fails and new requests are refused; running ones continue."""


@asynccontextmanager
async def running(config: RouterConfig) -> AsyncGenerator[Listening]:
    """Runs the router while the body runs. Raises ConfigError if an address cannot be bound."""
    clock: Clock = SystemClock()
    pool = Pool(config.health.dead_after)
    for instance in config.instances:
        pool.add(instance)
    dispatcher = Dispatcher(pool, config.limits, config.policy)
    async with HttpUpstream() as upstream, KVSubscriptions(pool) as views:
        checks = HealthChecks(pool, upstream, config.health, clock)
        observer = RouterObserver(dispatcher, checks, views, clock)
        is_aware = config.policy is Policy.PREFIX_AWARE
        prompts = TokenizedPrompts(dispatcher, upstream, views) if is_aware else EstimatedPrompts()
        exchanges = Exchanges(dispatcher, upstream, prompts, observer, clock, config.timeouts)
        door = FrontDoor(exchanges, dispatcher, observer, is_local=is_local_host(config.host))

        def on_change() -> None:
            views.follow()
            exchanges.migrate()
            exchanges.wake()

        def on_death(url: str) -> None:
            views.lost(url)
            exchanges.cut_off(url)

        admin = Admin(dispatcher, observer, on_change, exchanges.cut_off)
        # The first request can then be sent to an instance that is already ready.
        await checks.check_all()
        checking = asyncio.create_task(checks.run(on_change, on_death))
        try:
            async with serving(door.handle, config.host, config.port) as url:
                if config.admin_port is None:
                    yield Listening(url, "", dispatcher, door.close)
                else:
                    async with serving(admin.handle, _LOOPBACK, config.admin_port) as admin_url:
                        yield Listening(url, admin_url, dispatcher, door.close)
        finally:
            checking.cancel()
            await asyncio.gather(checking, return_exceptions=True)


async def route(config: RouterConfig, announce: Callable[[Listening], None]) -> None:
    """Runs until SIGTERM or SIGINT, then lets running requests finish; a second signal ends them."""
    signals: asyncio.Queue[None] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, None)
    async with running(config) as router:
        announce(router)
        await signals.get()
        router.close()
        hurry = asyncio.create_task(signals.get())
        idle = asyncio.create_task(_until_idle(router.dispatcher))
        await asyncio.wait((hurry, idle), timeout=config.shutdown_timeout, return_when=asyncio.FIRST_COMPLETED)
        for task in (hurry, idle):
            task.cancel()


async def _until_idle(dispatcher: Dispatcher) -> None:
    while dispatcher.num_live:
        await pause(_IDLE_POLL_SECONDS)
