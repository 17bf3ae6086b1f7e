"""`--kv-transfer-config`: the connector that moves KV into and out of the engine. Most keys are vLLM's."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.utils.errors import ConfigError
from penstock.utils.hosts import is_host
from penstock.utils.names import did_you_mean

ROLES = ("kv_both", "kv_producer", "kv_consumer")
LOAD_FAILURE_POLICIES = ("recompute", "fail")
DEFAULT_BOOTSTRAP_PORT = 8998
"""Where vLLM's proxies ask a MooncakeConnector."""
_DEFAULT_LOAD_SECONDS = 30.0
_MAX_LOAD_SECONDS = 3600.0
_MAX_ID_LENGTH = 128
_MAX_PORT = 65535

_WITHOUT_EFFECT = ("kv_rank", "kv_parallel_size", "kv_buffer_device", "kv_buffer_size", "enable_permute_local_kv")
"""vLLM's keys that do not apply to Penstock: ranks of connectors, and separate buffers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTransferConfig:
    """`kv_role` says whether KV is saved (kv_producer), loaded (kv_consumer) or both; `engine_id` names the engine.

    `kv_load_timeout` is in seconds: a request that has waited so long for KV is computed here instead.

    `kv_ip` and `kv_port` are the address at which other engines reach a connector, and on which it listens: with an IP
    address on that one, with a host name on all interfaces. Port 0 means a free one. A kv_consumer of a P2PConnector
    connects to the others and does not listen.

    `kv_connector_module_path` is the Python module of a connector that is not part of Penstock.
    `kv_connector_extra_config` has the connector's own options; it refuses unknown ones. `keys_without_effect` are the
    given keys that have no meaning here.
    """

    kv_connector: str
    kv_role: str = "kv_both"
    engine_id: str = ""
    kv_load_failure_policy: str = "recompute"
    kv_load_timeout: float = _DEFAULT_LOAD_SECONDS
    kv_ip: str = "127.0.0.1"
    kv_port: int = 0
    kv_connector_module_path: str | None = None
    kv_connector_extra_config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    keys_without_effect: tuple[str, ...] = ()


def parse_kv_transfer_config(value: str | Mapping[str, Any]) -> KVTransferConfig:
    """Reads the object or its JSON text. Raises ConfigError naming the key and its valid values."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ConfigError(f"kv_transfer_config is not JSON: {error}") from None
    if not isinstance(value, Mapping):
        raise ConfigError(f"kv_transfer_config must be an object, got {value!r}")
    given: dict[str, Any] = {"engine_id": uuid.uuid4().hex, **value}
    ignored = tuple(key for key in _WITHOUT_EFFECT if given.pop(key, None) is not None)
    for key, each in given.items():
        if key not in _CHECKS:
            raise ConfigError(f"unknown key {key!r} in kv_transfer_config{did_you_mean(key, tuple(_CHECKS))}")
        is_right, wanted = _CHECKS[key]
        if not is_right(each):
            raise ConfigError(f"{key} in kv_transfer_config must be {wanted}, got {each!r}")
    if "kv_connector" not in given:
        raise ConfigError("kv_transfer_config needs a kv_connector, such as OffloadingConnector")
    return KVTransferConfig(**given, keys_without_effect=ignored)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_id(value: Any) -> bool:
    return _is_text(value) and value.isprintable() and len(value) <= _MAX_ID_LENGTH


def _is_timeout(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= _MAX_LOAD_SECONDS


def _is_port(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_PORT


_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "kv_connector": (_is_text, "the name of a connector"),
    "kv_role": (lambda value: value in ROLES, f"one of {', '.join(ROLES)}"),
    "engine_id": (_is_id, f"printable text of at most {_MAX_ID_LENGTH} characters"),
    "kv_load_failure_policy": (
        lambda value: value in LOAD_FAILURE_POLICIES,
        f"one of {', '.join(LOAD_FAILURE_POLICIES)}",
    ),
    "kv_load_timeout": (_is_timeout, f"seconds above 0 and at most {_MAX_LOAD_SECONDS:.0f}"),
    "kv_ip": (lambda value: isinstance(value, str) and is_host(value), "an IP address or a host name"),
    "kv_port": (_is_port, f"a port from 0 (any free one) to {_MAX_PORT}"),
    "kv_connector_module_path": (_is_text, "the name of a Python module"),
    "kv_connector_extra_config": (lambda value: isinstance(value, Mapping), "an object"),
}
