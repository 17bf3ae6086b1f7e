"""`--kv-events-config`: where the engine publishes which KV blocks it holds. vLLM's keys, plus `allow_remote`."""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.utils.errors import ConfigError
from penstock.utils.names import did_you_mean

PUBLISHERS = ("zmq", "null")
_MOST = 1 << 24
_TCP = re.compile(r"tcp://(?:\[(?P<ipv6>[0-9a-fA-F:.]+)\]|(?P<host>[^:\[\]/\s]+)):(?P<port>[0-9]{1,5})")
_IPC = re.compile(r"ipc://\S+")


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventsConfig:
    """Both endpoints are bound, never connected to; TCP port 0 means a free one. `buffer_steps` batches are kept for
    replay, at most `max_queue_size` wait to be sent, and `hwm` for each slow subscriber.
    """

    enable_kv_cache_events: bool = False
    publisher: str = "zmq"
    endpoint: str = "tcp://127.0.0.1:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""
    allow_remote: bool = False

    @property
    def is_active(self) -> bool:
        return self.enable_kv_cache_events and self.publisher != "null"


def parse_kv_events_config(value: str | Mapping[str, Any] | None) -> KVEventsConfig:
    """Reads the object or its JSON text; None disables events. Raises ConfigError naming the key."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ConfigError(f"kv_events_config is not JSON: {error}") from None
    if not isinstance(value, Mapping | None):
        raise ConfigError(f"kv_events_config must be an object, got {value!r}")
    given: Mapping[str, Any] = value or {}
    for key, each in given.items():
        if key not in _CHECKS:
            raise ConfigError(f"unknown key {key!r} in kv_events_config{did_you_mean(key, tuple(_CHECKS))}")
        is_right, wanted = _CHECKS[key]
        if not is_right(each):
            raise ConfigError(f"{key} in kv_events_config must be {wanted}, got {each!r}")
    config = KVEventsConfig(**given)
    for key in ("endpoint", "replay_endpoint"):
        endpoint = getattr(config, key)
        if endpoint is not None and not config.allow_remote and not _is_local(endpoint):
            raise ConfigError(
                f"{key}={endpoint} in kv_events_config would show the tokens of all prompts to anyone on the network: "
                'use tcp://127.0.0.1:PORT, or set "allow_remote": true if only routers can reach it'
            )
    return config


def _is_local(endpoint: str) -> bool:
    """Returns whether only this machine can connect."""
    match = _TCP.fullmatch(endpoint)
    if match is None:
        return True
    host = match["ipv6"] or match["host"]
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _MOST


def _is_endpoint(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    match = _TCP.fullmatch(value)
    return _IPC.fullmatch(value) is not None if match is None else int(match["port"]) <= 65535


_FLAG = (_is_flag, "true or false")
_COUNT = (_is_count, f"an integer from 1 to {_MOST}")
_ADDRESS = "tcp://ADDRESS:PORT or ipc://PATH"
_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "enable_kv_cache_events": _FLAG,
    "publisher": (lambda value: value in PUBLISHERS, f"one of {', '.join(PUBLISHERS)}"),
    "endpoint": (_is_endpoint, _ADDRESS),
    "replay_endpoint": (lambda value: value is None or _is_endpoint(value), f"{_ADDRESS}, or null for no replay"),
    "buffer_steps": _COUNT,
    "hwm": _COUNT,
    "max_queue_size": _COUNT,
    "topic": (lambda value: isinstance(value, str), "text"),
    "allow_remote": _FLAG,
}
