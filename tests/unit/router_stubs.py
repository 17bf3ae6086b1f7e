"""The router in front of stub instances over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web

from penstock.router.exchange import Timeouts
from penstock.router.health import HealthConfig
from penstock.router.instances import Instance, Role
from penstock.router.service import Listening, RouterConfig, running

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
SECONDS = 60.0
IMPATIENT = Timeouts(prefill=2, query=2)
"""Timeouts for instances that do not answer."""
WATCHFUL = HealthConfig(interval=0.05, timeout=2, dead_after=1)
STYLES = ("serial", "concurrent")
PATH = "/v1/completions"


class Stub:
    """An instance whose answers a test decides. `health` is the status that it reports; with None, /health
    never answers. `models` are those that it reports, and `shares_kv` is what it reports."""

    def __init__(self, role: Role, handler: Handler, *, has_bootstrap: bool = False) -> None:
        self.role = role
        self.handler = handler
        self.has_bootstrap = has_bootstrap
        self.health: str | None = "ok"
        self.models: list[str] | None = None
        self.shares_kv = False
        self.num_requests = 0
        self.num_cancelled = 0
        self.bodies: list[Any] = []
        self.headers: list[dict[str, str]] = []
        self.app = web.Application()
        self.app.router.add_get("/health", self._health)
        self.app.router.add_get("/ready", self._ready)
        self.app.router.add_get("/metrics", self._metrics)
        if has_bootstrap:
            self.app.router.add_get("/query", self._query)
        self.app.router.add_route("*", "/{path:.*}", self._answer)
        self.url = ""

    @property
    def instance(self) -> Instance:
        return Instance(self.url, self.role, self.url if self.has_bootstrap else "")

    async def _health(self, _: web.Request) -> web.Response:
        if self.health is None:
            await asyncio.Event().wait()
        is_alive = self.health in ("ok", "draining", "restarting")
        return web.json_response({"status": self.health, "reason": None}, status=200 if is_alive else 503)

    async def _ready(self, _: web.Request) -> web.Response:
        if self.health is None:
            await asyncio.Event().wait()
        body = {"models": self.models or [], "shares_kv": self.shares_kv}
        return web.json_response(body, status=200 if self.health == "ok" else 503)

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(status=404)

    async def _query(self, _: web.Request) -> web.Response:
        return web.json_response({"0": {"engine_id": "p"}})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.num_requests += 1
        self.headers.append(dict(request.headers))
        with contextlib.suppress(ValueError):
            self.bodies.append(json.loads(await request.read()))
        try:
            return await self.handler(request)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise


@contextlib.asynccontextmanager
async def serving(stub: Stub) -> AsyncIterator[Stub]:
    runner = web.AppRunner(stub.app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    stub.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield stub
    finally:
        await runner.cleanup()


class Client:
    def __init__(self, session: aiohttp.ClientSession, router: Listening) -> None:
        self.session = session
        self.router = router

    async def ask(self, path: str = PATH, body: Any = None, **options: Any) -> tuple[int, bytes]:
        body = {"prompt": "a"} if body is None else body
        async with self.session.post(self.router.url + path, json=body, **options) as response:
            return response.status, await response.read()

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        place = urlsplit(self.router.url)
        return await asyncio.open_connection(place.hostname, place.port)

    async def admin(self, path: str, **fields: Any) -> Any:
        async with self.session.post(self.router.admin_url + path, json=fields) as response:
            return await response.json(content_type=None)

    async def state_of(self, stub: Stub) -> str:
        async with self.session.get(self.router.admin_url + "/instances") as response:
            states = {each["url"]: each["state"] for each in (await response.json())["instances"]}
        return states.get(stub.url, "removed")

    async def metric(self, line: str) -> float:
        async with self.session.get(self.router.url + "/metrics") as response:
            lines = (await response.text()).splitlines()
        return float(next(each.rpartition(" ")[2] for each in lines if each.startswith(line + " ")))


@contextlib.asynccontextmanager
async def routed(*stubs: Stub, **options: Any) -> AsyncIterator[Client]:
    defaults: dict[str, Any] = {
        "port": 0,
        "admin_port": 0,
        "health": HealthConfig(interval=0.05, timeout=SECONDS),
    }
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(asyncio.timeout(SECONDS))
        for stub in stubs:
            await stack.enter_async_context(serving(stub))
        config = RouterConfig([stub.instance for stub in stubs], **{**defaults, **options})
        router = await stack.enter_async_context(running(config))
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        yield Client(session, router)
        router.dispatcher.check_integrity()


async def until(condition: Callable[[], bool | Awaitable[bool]]) -> None:
    while True:
        found = condition()
        if await found if isinstance(found, Awaitable) else found:
            return
        await asyncio.sleep(0.01)


async def never(request: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def echo(request: web.Request) -> web.StreamResponse:
    return web.json_response({"asked": await request.json()})


async def fail(request: web.Request) -> web.StreamResponse:
    """Refuses the request for now, as a full instance does."""
    return web.Response(status=503, text="full", headers={"Retry-After": "1"})


async def die(request: web.Request) -> web.StreamResponse:
    """Answers as an instance does whose engine has died."""
    return web.Response(status=503, text="the engine has stopped")


async def abort(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def half(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(b"data: {}\n\n")
    await abort(request)
    return response


async def headers_only(request: web.Request) -> web.StreamResponse:
    """Begins a stream that ends before its first event."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await abort(request)
    return response


async def prefilled(request: web.Request) -> web.StreamResponse:
    return web.json_response({"choices": [], "kv_transfer_params": {"ticket": "t"}})


class OncePerConnection:
    """Answers the first request of a connection and aborts the connection at the next one, as an instance does with a
    connection that has been idle for too long."""

    def __init__(self) -> None:
        self._used: set[object] = set()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.transport in self._used:
            return await abort(request)
        self._used.add(request.transport)
        return await echo(request)


class Gathering:
    """Answers when `count` requests have arrived."""

    def __init__(self, count: int) -> None:
        self._missing = count
        self.is_complete = asyncio.Event()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self._missing -= 1
        if not self._missing:
            self.is_complete.set()
        await self.is_complete.wait()
        return await echo(request)


def prefill(handler: Handler, style: str = "serial") -> Stub:
    return Stub(Role.PREFILL, handler, has_bootstrap=style == "concurrent")


def decode(handler: Handler) -> Stub:
    return Stub(Role.DECODE, handler)


def serve(handler: Handler) -> Stub:
    return Stub(Role.SERVE, handler)


def run(check: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(check())  # pyright: ignore[reportArgumentType]
