"""The router's endpoint for clients: the router's own paths, and all others, which are forwarded to instances."""

from __future__ import annotations

import asyncio
import functools
from urllib.parse import unquote

from penstock.router import bodies
from penstock.router.dispatcher import Dispatcher
from penstock.router.exchange import Exchanges
from penstock.router.http_server import Request, Response
from penstock.router.instances import Role
from penstock.router.observer import RouterObserver
from penstock.utils.errors import RequestError
from penstock.utils.hosts import is_local_host

_MODELS = "/v1/models"
# A larger body is parsed on a thread, so that it does not block the event loop.
_LARGE_BYTES = 1 << 20
_is_local = functools.lru_cache(1024)(is_local_host)


class FrontDoor:
    """`/health`, `/ready` and `/metrics` are the router's own; every other path is answered by an instance.

    `is_local`: requests that name another host, and those of foreign web pages, are refused here, because the instances
    see only the router's requests and cannot refuse them.
    """

    def __init__(
        self, exchanges: Exchanges, dispatcher: Dispatcher, observer: RouterObserver, *, is_local: bool
    ) -> None:
        self._exchanges = exchanges
        self._dispatcher = dispatcher
        self._observer = observer
        self._is_local = is_local
        self._is_closing = False
        self._own_routes = {"/health": self._health, "/ready": self._ready, "/metrics": self._metrics}

    def close(self) -> None:
        """Makes `/ready` fail and refuses new requests from now on."""
        self._is_closing = True

    async def handle(self, request: Request, response: Response) -> None:
        if self._is_local and (reason := reason_to_refuse(request.header("host"), request.header("origin"))):
            return await response.refuse(403, reason)
        path, question, query = request.target.partition("?")
        path = unquote(path) if "%" in path else path
        own = self._own_routes.get(path) if request.method in ("GET", "HEAD") else None
        if own is not None:
            return await own(request, response)
        if self._is_closing:
            return await response.refuse(503, "the router is shutting down")
        # The path is forwarded undecoded. One without a slash would become a part of the instance's address, and an
        # instance may end it at a number sign.
        is_path = path.startswith("/") and request.target.isascii() and request.target.isprintable()
        if not is_path or "#" in request.target:
            return await response.refuse(400, "the request's target must be a path, of ASCII and without a fragment")
        headers = bodies.forwarded_headers(request.headers)
        completions = bodies.generation_path(request.method, path)
        if completions is None:
            incoming = bodies.ClientRequest(request.method, path, request.target, headers, request.body)
            groups = self._dispatcher.pool.groups() if (request.method, path) == ("GET", _MODELS) else []
            if groups:
                return await self._exchanges.list_models(incoming, response, groups)
        else:
            try:
                read = functools.partial(bodies.read_completion, headers, request.body)
                body = read() if len(request.body) < _LARGE_BYTES else await asyncio.to_thread(read)
            except RequestError as error:
                return await response.refuse(400, str(error))
            target = completions + question + query
            headers = bodies.headers_for_json(headers)
            incoming = bodies.ClientRequest(request.method, completions, target, headers, bodies.encode(body), body)
        return await self._exchanges.answer(incoming, response)

    async def _health(self, _: Request, response: Response) -> None:
        await response.send_json(200, {"status": "draining" if self._is_closing else "ok", "reason": None})

    async def _ready(self, _: Request, response: Response) -> None:
        """Responds 200 if there is an instance that answers."""
        pool = self._dispatcher.pool
        if self._is_closing:
            reason = "the router is shutting down"
        else:
            reason = None if pool.of(Role.SERVE) or pool.of(Role.DECODE) else "no instance is ready"
        await response.send_json(200 if reason is None else 503, {"ready": reason is None, "reason": reason})

    async def _metrics(self, request: Request, response: Response) -> None:
        body, content_type = self._observer.render(request.header("accept") or "")
        await response.whole(200, (("Content-Type", content_type),), body)


def reason_to_refuse(host: str | None, origin: str | None) -> str | None:
    """Returns why a port without authentication on a loopback address refuses a request with these headers (DNS
    rebinding, simple requests of web pages); None if it does not.
    """
    if origin is not None and not _is_local(origin.partition("://")[2] or "-"):
        return f"pages of {origin} may not use this server"
    if not _is_local(host or ""):
        return "the Host header names another machine: use localhost or 127.0.0.1"
    return None
