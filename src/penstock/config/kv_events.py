"""`--kv-events-config`: where the engine publishes which KV blocks it holds. vLLM's keys, plus `allow_remote`."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from penstock.config.options import Limits, Must, convert_options, read_object
from penstock.utils.errors import ConfigError

_TCP = re.compile(r"tcp://(?:\[(?P<ipv6>[0-9a-fA-F:.]+)\]|(?P<host>[^:\[\]/\s]+)):(?P<port>[0-9]{1,5})")
_IPC = re.compile(r"ipc://\S+")


def _is_endpoint(value: str) -> bool:
    match = _TCP.fullmatch(value)
    return _IPC.fullmatch(value) is not None if match is None else int(match["port"]) <= 65535


_ADDRESS = "tcp://ADDRESS:PORT or ipc://PATH"
_Count = Annotated[int, Limits(ge=1, le=1 << 24)]
_Endpoint = Annotated[str, Must(_ADDRESS, _is_endpoint)]
_OptionalEndpoint = Annotated[
    str | None, Must(f"{_ADDRESS}, or null for no replay", lambda value: value is None or _is_endpoint(value))
]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventsConfig:
    """Both endpoints are bound, never connected to; TCP port 0 means a free one. `buffer_steps` batches are kept for
    replay, at most `max_queue_size` wait to be sent, and `hwm` for each slow subscriber.
    """

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq", "null"] = "zmq"
    endpoint: _Endpoint = "tcp://127.0.0.1:5557"
    replay_endpoint: _OptionalEndpoint = None
    buffer_steps: _Count = 10_000
    hwm: _Count = 100_000
    max_queue_size: _Count = 100_000
    topic: str = ""
    allow_remote: bool = False

    @property
    def is_active(self) -> bool:
        return self.enable_kv_cache_events and self.publisher != "null"


def parse_kv_events_config(value: str | Mapping[str, Any] | None) -> KVEventsConfig:
    """Reads the object or its JSON text; None disables events. Raises ConfigError naming the key."""
    if value is None:
        return KVEventsConfig()
    config = convert_options(KVEventsConfig, read_object("kv_events_config", value), "in kv_events_config")
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
