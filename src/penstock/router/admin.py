"""Administration of the router, on a loopback port of its own: instances come and go, and a page shows them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from aiohttp import web

from penstock.router.choice import load_of
from penstock.router.dispatcher import Dispatcher
from penstock.router.front_door import error_response, local_hosts
from penstock.router.instances import OPTIONS, Instance, Role, make_instance
from penstock.router.observer import RouterObserver
from penstock.router.page import PAGE
from penstock.utils.errors import ConfigError

_MAX_BODY_BYTES = 64 << 10
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
}


class Admin:
    """`on_change` is called after every change; `on_removed` with an instance's URL when what it has is to be ended."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        observer: RouterObserver,
        on_change: Callable[[], None],
        on_removed: Callable[[str], None],
    ) -> None:
        self._dispatcher = dispatcher
        self._observer = observer
        self._on_change = on_change
        self._on_removed = on_removed
        self.app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[local_hosts])
        self.app.router.add_get("/", self._page)
        self.app.router.add_get("/instances", self._list)
        self.app.router.add_post("/instances", self._add)
        self.app.router.add_post("/drain", self._drain)
        self.app.router.add_post("/resume", self._resume)
        self.app.router.add_post("/remove", self._remove)

    async def _page(self, _: web.Request) -> web.Response:
        return web.Response(text=PAGE, content_type="text/html", headers=_PAGE_HEADERS)

    async def _list(self, _: web.Request) -> web.Response:
        return web.json_response(self._state())

    async def _add(self, request: web.Request) -> web.Response:
        """`{"url", "role", "bootstrap", "events", "replay"}`; the role is serve by default."""
        fields = await _fields(request)
        role = fields.get("role", Role.SERVE.value)
        if role not in tuple(Role):
            return error_response(400, f"role must be one of {', '.join(Role)}")
        try:
            options = {name: fields.get(name, "") for name in OPTIONS}
            instance = make_instance(fields.get("url", ""), Role(role), **options)
        except ConfigError as error:
            return error_response(400, str(error))
        known = self._dispatcher.pool.get(instance.url)
        if known is not None and known.instance != instance:
            return error_response(409, f"{instance.url} is there as a {known.instance.role} instance: remove it first")
        self._dispatcher.pool.add(instance)
        return self._changed()

    async def _drain(self, request: web.Request) -> web.Response:
        url = await self._known(request)
        self._dispatcher.pool.drain(url)
        return self._changed()

    async def _resume(self, request: web.Request) -> web.Response:
        url = await self._known(request)
        self._dispatcher.pool.resume(url)
        return self._changed()

    async def _remove(self, request: web.Request) -> web.Response:
        """Drains, and removes when nothing is left; with `"now": true` what is left fails."""
        url = await self._known(request)
        self._dispatcher.pool.drain(url, remove=True)
        if (await _fields(request)).get("now") is True:
            self._on_removed(url)
        return self._changed()

    async def _known(self, request: web.Request) -> str:
        """The instance that the body names. Raises HTTPNotFound."""
        url = str((await _fields(request)).get("url", "")).rstrip("/")
        if url not in self._dispatcher.pool:
            raise web.HTTPNotFound(text=json.dumps({"error": {"message": f"there is no instance {url!r}"}}))
        return url

    def _changed(self) -> web.Response:
        self._on_change()
        return web.json_response(self._state())

    def _state(self) -> Mapping[str, Any]:
        return {
            "queued": self._dispatcher.num_queued,
            "running": self._dispatcher.num_live - self._dispatcher.num_queued,
            "instances": [
                {
                    **_named(member.instance),
                    "state": member.state.value,
                    "reason": member.reason,
                    "leaving": member.is_leaving,
                    "outstanding": member.num_outstanding,
                    "load": load_of(member),
                    "requests": member.num_chosen,
                    "blocks": self._observer.num_blocks(member.url),
                    "hit_rate": self._observer.hit_rate(member.url),
                }
                for member in self._dispatcher.pool
            ],
        }


def _named(instance: Instance) -> dict[str, str]:
    options = {name: getattr(instance, name) for name in OPTIONS}
    return {"url": instance.url, "role": instance.role.value, **{name: each for name, each in options.items() if each}}


async def _fields(request: web.Request) -> dict[str, Any]:
    """The body, an object whose names of instances are texts. Raises HTTPBadRequest."""
    try:
        fields = json.loads(await request.read())
    except ValueError:
        fields = None
    if not isinstance(fields, dict) or not all(isinstance(fields.get(each, ""), str) for each in ("url", *OPTIONS)):
        raise web.HTTPBadRequest(
            text=json.dumps({"error": {"message": 'send JSON such as {"url": "http://HOST:PORT"}'}})
        )
    return fields
