"""The instances behind the router: their roles and their states.

Only `Pool` changes a state, and only according to `TRANSITIONS`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from penstock.utils.errors import ConfigError


class Role(enum.StrEnum):
    """A serve instance computes whole requests. The other two divide them: one computes the prompt, one the answer."""

    PREFILL = "prefill"
    DECODE = "decode"
    SERVE = "serve"


class State(enum.StrEnum):
    STARTING = "starting"
    """Has not been ready yet, or restarts its engine. Gets no requests."""
    READY = "ready"
    DRAINING = "draining"
    """Finishes its requests. Gets no new ones."""
    UNHEALTHY = "unhealthy"
    """Does not answer, or has work and makes no step. Gets no requests; its current ones may still be answered."""
    DEAD = "dead"
    """Has been unhealthy for too long, or reports that its engine has died. Its remaining requests have failed."""


class Signal(enum.StrEnum):
    """The result of a health check."""

    READY = "ready"
    STARTING = "starting"
    DRAINING = "draining"
    STALLED = "stalled"
    SILENT = "silent"
    LOST = "lost"


UNHEALTHY_SIGNALS = (Signal.STALLED, Signal.SILENT)
"""An instance that keeps giving these signals eventually becomes dead."""

# The state that a signal alone stands for.
_SIGNALLED_STATES = {
    Signal.READY: State.READY,
    Signal.STARTING: State.STARTING,
    Signal.DRAINING: State.DRAINING,
    Signal.STALLED: State.UNHEALTHY,
    Signal.SILENT: State.UNHEALTHY,
    Signal.LOST: State.DEAD,
}

TRANSITIONS: Mapping[State, Mapping[Signal, State]] = {
    # A process that is starting does not answer until it listens.
    State.STARTING: {**_SIGNALLED_STATES, Signal.SILENT: State.STARTING},
    State.READY: _SIGNALLED_STATES,
    State.DRAINING: _SIGNALLED_STATES,
    State.UNHEALTHY: _SIGNALLED_STATES,
    # An instance that is restarted at the same address becomes usable again.
    State.DEAD: {**_SIGNALLED_STATES, Signal.SILENT: State.DEAD},
}


@dataclass(frozen=True, slots=True)
class Instance:
    """`url` is a base URL without a slash at its end, and is the instance's name. `bootstrap` is the URL at which a
    prefill instance answers `GET /query`; with it, both halves of a request run at once (concurrent style). `events`
    and `replay` are the ZeroMQ endpoints of its KV events, empty if it publishes or replays none.
    """

    url: str
    role: Role
    bootstrap: str = ""
    events: str = ""
    replay: str = ""


OPTIONS = ("bootstrap", "events", "replay")
"""The fields of an instance besides its URL and its role."""


def make_instance(url: str, role: Role, bootstrap: str = "", events: str = "", replay: str = "") -> Instance:
    """Checks and normalises the addresses. Raises ConfigError."""
    if bootstrap and role is not Role.PREFILL:
        raise ConfigError(f"{role} instance {url}: only prefill instances have a bootstrap address")
    for name, endpoint in (("events", events), ("replay", replay)):
        if endpoint and not endpoint.startswith(("tcp://", "ipc://")):
            raise ConfigError(f"{name}={endpoint} is not an endpoint of ZeroMQ: write it as tcp://HOST:PORT")
    if replay and not events:
        raise ConfigError(f"{role} instance {url}: replay={replay} needs events")
    return Instance(_base_url(url), role, _base_url(bootstrap) if bootstrap else "", events, replay)


def parse_instance(text: str, role: Role) -> Instance:
    """Parses `URL[,NAME=VALUE]...` with the names of `OPTIONS`. Raises ConfigError."""
    url, *rest = text.split(",")
    options: dict[str, str] = {}
    for each in rest:
        name, equals, value = each.partition("=")
        if name not in OPTIONS or not equals or name in options:
            raise ConfigError(f"{text}: after the URL, write NAME=VALUE, with the names {', '.join(OPTIONS)}")
        options[name] = value
    return make_instance(url, role, **options)


def _base_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 0) >= 0
    except ValueError:
        is_valid = False
    else:
        is_valid = is_valid and not parts.query and not parts.fragment and url.isprintable() and " " not in url
    if not is_valid:
        raise ConfigError(f"{url!r} is not the URL of an instance: write it as http://HOST:PORT")
    return url.rstrip("/").removesuffix("/v1")
