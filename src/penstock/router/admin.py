"""Administration of the router, on a separate loopback port: adds, drains and removes instances, and serves a page."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from penstock.router.bodies import parse_object
from penstock.router.dispatcher import Computing, Dispatcher
from penstock.router.front_door import reason_to_refuse
from penstock.router.http_server import Request, Response
from penstock.router.instances import OPTIONS, Instance, Role, make_instance
from penstock.router.observer import RouterObserver
from penstock.router.page import PAGE
from penstock.utils.errors import ConfigError

_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "frame-ancestors 'none'"
)
_PAGE_HEADERS = (
    ("Content-Type", "text/html; charset=utf-8"),
    ("Content-Security-Policy", _POLICY),
    ("Cache-Control", "no-store"),
)


class _RefusedError(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Admin:
    """`on_change` is called after every change; `on_removed` with an instance's URL when its requests must end."""

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
        self._actions: Mapping[str, Callable[[dict[str, Any]], None]] = {
            "/instances": self._add,
            "/drain": self._drain,
            "/resume": self._resume,
            "/remove": self._remove,
        }

    async def handle(self, request: Request, response: Response) -> None:
        if reason := reason_to_refuse(request.header("host"), request.header("origin")):
            return await response.refuse(403, reason)
        path = request.target.partition("?")[0]
        if request.method == "POST" and path in self._actions:
            try:
                self._actions[path](_fields(request.body))
            except _RefusedError as error:
                return await response.refuse(error.status, str(error))
            self._on_change()
        elif request.method != "GET" or path not in ("/", "/instances"):
            return await response.refuse(404, f"there is no {request.method} {path} here")
        if path == "/":
            return await response.whole(200, _PAGE_HEADERS, PAGE.encode())
        return await response.send_json(200, self._state())

    def _add(self, fields: dict[str, Any]) -> None:
        """Takes `{"url", "role", "bootstrap", "events", "replay"}`; the role is serve by default."""
        role = fields.get("role", Role.SERVE.value)
        if role not in tuple(Role):
            raise _RefusedError(400, f"role must be one of {', '.join(Role)}")
        try:
            instance = make_instance(fields["url"], Role(role), **{name: fields.get(name, "") for name in OPTIONS})
        except ConfigError as error:
            raise _RefusedError(400, str(error)) from None
        known = self._dispatcher.pool.get(instance.url)
        if known is not None and known.instance != instance:
            raise _RefusedError(409, f"{instance.url} is there as a {known.instance.role} instance: remove it first")
        self._dispatcher.pool.add(instance)

    def _drain(self, fields: dict[str, Any]) -> None:
        self._dispatcher.pool.drain(self._known(fields))

    def _resume(self, fields: dict[str, Any]) -> None:
        self._dispatcher.pool.resume(self._known(fields))

    def _remove(self, fields: dict[str, Any]) -> None:
        """Drains the instance, and removes it when it has no requests left; with `"now": true` they fail."""
        url = self._known(fields)
        self._dispatcher.pool.drain(url, remove=True)
        if fields.get("now") is True:
            self._on_removed(url)

    def _known(self, fields: dict[str, Any]) -> str:
        """Returns the URL of the named instance."""
        url = fields["url"].rstrip("/").removesuffix("/v1")
        if url not in self._dispatcher.pool:
            raise _RefusedError(404, f"there is no instance {url!r}")
        return url

    def _state(self) -> Mapping[str, Any]:
        views = {each.url: each for each in self._observer.instances()}
        return {
            "prompts": {each.value: self._observer.num_prompts[each] for each in Computing},
            "queued": self._dispatcher.num_queued,
            "running": self._dispatcher.num_live - self._dispatcher.num_queued,
            "instances": [
                {
                    **_describe(member.instance),
                    "state": member.state.value,
                    "reason": member.reason,
                    "leaving": member.is_leaving,
                    "outstanding": member.num_outstanding,
                    "load": member.load,
                    "requests": member.num_chosen,
                    "blocks": views[member.url].num_blocks,
                    "hit_rate": self._observer.hit_rate(member.url),
                    "prefill_rate": _per_second(views[member.url].prompts),
                    "load_rate": _per_second(views[member.url].loads),
                }
                for member in self._dispatcher.pool
            ],
        }


def _per_second(line: tuple[float, float] | None) -> float | None:
    """Returns measured tokens per second, None if they are unknown."""
    return 1 / line[1] if line is not None and line[1] else None


def _describe(instance: Instance) -> dict[str, str]:
    options = {name: getattr(instance, name) for name in OPTIONS}
    return {"url": instance.url, "role": instance.role.value, **{name: each for name, each in options.items() if each}}


def _fields(body: bytes) -> dict[str, Any]:
    """Parses an object whose names of instances are strings."""
    fields = parse_object(body)
    if fields is None or not all(isinstance(fields.get(each, ""), str) for each in ("url", *OPTIONS)):
        raise _RefusedError(400, 'send JSON such as {"url": "http://HOST:PORT"}')
    if not fields.get("url"):
        raise _RefusedError(400, 'url is missing: send JSON such as {"url": "http://HOST:PORT"}')
    return fields
