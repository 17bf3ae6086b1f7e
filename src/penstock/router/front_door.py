"""What clients connect to: aiohttp's server around `Exchanges`."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

from aiohttp import web
from aiohttp.typedefs import Handler

from penstock.router import bodies
from penstock.router.dispatcher import RETRY_AFTER_SECONDS, Dispatcher
from penstock.router.exchange import Asked, Exchanges
from penstock.router.instances import Role
from penstock.router.observer import RouterObserver
from penstock.utils.errors import ConfigError
from penstock.utils.hosts import is_local_host

_MAX_BODY_BYTES = 64 << 20
_BACKLOG = 2048
_FLUSH_SECONDS = 1.0


class FrontDoor:
    """`/health`, `/ready` and `/metrics` are the router's own; every other path is answered by an instance.

    `is_local`: requests that name another host, and those of foreign web pages, are refused: the instances, which would
    refuse them, see the router's requests only.
    """

    def __init__(
        self, exchanges: Exchanges, dispatcher: Dispatcher, observer: RouterObserver, *, is_local: bool
    ) -> None:
        self._exchanges = exchanges
        self._dispatcher = dispatcher
        self._observer = observer
        self._is_closing = False
        self.app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[local_hosts] if is_local else [])
        self.app.router.add_get("/health", self._health)
        self.app.router.add_get("/ready", self._ready)
        self.app.router.add_get("/metrics", self._metrics)
        # The last route: aiohttp takes the first that fits.
        self.app.router.add_route("*", "/{path:.*}", self._carry)

    def close(self) -> None:
        """From here on `/ready` fails and new requests are refused."""
        self._is_closing = True

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "draining" if self._is_closing else "ok", "reason": None})

    async def _ready(self, _: web.Request) -> web.Response:
        """200 when there is an instance that answers."""
        pool = self._dispatcher.pool
        if self._is_closing:
            reason = "the router is shutting down"
        else:
            reason = None if pool.of(Role.SERVE) or pool.of(Role.DECODE) else "no instance is ready"
        return web.json_response({"ready": reason is None, "reason": reason}, status=200 if reason is None else 503)

    async def _metrics(self, request: web.Request) -> web.Response:
        body, content_type = self._observer.render(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _carry(self, request: web.Request) -> web.StreamResponse:
        if self._is_closing:
            return error_response(503, "the router is shutting down")
        # As it came: the instance decodes it. One without a slash would become a part of the instance's address.
        target = request.raw_path
        if not target.startswith("/"):
            return error_response(400, "the request's target must be a path")
        headers = bodies.forwarded_headers(request.headers.items())
        asked = Asked(request.method, request.path, target, headers, await request.read())
        client = _HttpClient(request)
        await self._exchanges.carry(asked, client)
        return client.response


class _HttpClient:
    def __init__(self, request: web.Request) -> None:
        self._request = request
        self.response = web.StreamResponse()

    async def begin(self, status: int, headers: bodies.Headers) -> None:
        self.response = web.StreamResponse(status=status)
        for name, value in headers:
            self.response.headers.add(name, value)
        await self.response.prepare(self._request)

    async def write(self, chunk: bytes) -> None:
        await self.response.write(chunk)

    async def finish(self) -> None:
        await self.response.write_eof()

    def cut(self) -> None:
        if self._request.transport is not None:
            self._request.transport.close()


@web.middleware
async def local_hosts(request: web.Request, handler: Handler) -> web.StreamResponse:
    """For a port without authentication on a loopback address (DNS rebinding, simple requests of web pages)."""
    origin = request.headers.get("Origin")
    if origin is not None and not is_local_host(origin.partition("://")[2] or "-"):
        return error_response(403, f"pages of {origin} may not use this server")
    if not is_local_host(request.headers.get("Host", "")):
        return error_response(403, "the Host header names another machine: use localhost or 127.0.0.1")
    return await handler(request)


def error_response(status: int, message: str) -> web.Response:
    headers = {"Retry-After": str(RETRY_AFTER_SECONDS)} if status == 503 else None
    body = bodies.error_body(status, message)
    return web.Response(status=status, body=body, content_type="application/json", headers=headers)


@contextlib.asynccontextmanager
async def listening(app: web.Application, host: str, port: int) -> AsyncGenerator[str]:
    """The app's URL. Raises ConfigError when the address cannot be bound."""
    # A handler is cancelled when its client leaves, and with it all that runs for the client.
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=_FLUSH_SECONDS)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port, backlog=_BACKLOG).start()
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
        name = f"[{host}]" if ":" in host else host
        yield f"http://{name}:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
