"""`--kv-transfer-config`: the connector that moves KV into and out of the engine. Most keys are vLLM's."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from penstock.config.options import NOT_AN_OPTION, Limits, Must, Text, convert_options, read_object
from penstock.utils.errors import ConfigError
from penstock.utils.hosts import is_host

DEFAULT_BOOTSTRAP_PORT = 8998
"""Where vLLM's proxies ask a MooncakeConnector."""
_MAX_LOAD_SECONDS = 3600
_MAX_ID_LENGTH = 128
_MAX_PORT = 65535

_WITHOUT_EFFECT = ("kv_rank", "kv_parallel_size", "kv_buffer_device", "kv_buffer_size", "enable_permute_local_kv")
"""vLLM's keys that do not apply to Penstock: ranks of connectors, and separate buffers."""

_Id = Annotated[
    str,
    Limits(min_length=1, max_length=_MAX_ID_LENGTH),
    Must(f"printable text of at most {_MAX_ID_LENGTH} characters", str.isprintable),
]
_Timeout = Annotated[
    float, Limits(gt=0, le=_MAX_LOAD_SECONDS), Must(f"seconds above 0 and at most {_MAX_LOAD_SECONDS}")
]
_Port = Annotated[int, Limits(ge=0, le=_MAX_PORT), Must(f"a port from 0 (any free one) to {_MAX_PORT}")]


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

    kv_connector: Annotated[Text, Must("the name of a connector")]
    kv_role: Literal["kv_both", "kv_producer", "kv_consumer"] = "kv_both"
    engine_id: _Id = ""
    kv_load_failure_policy: Literal["recompute", "fail"] = "recompute"
    kv_load_timeout: _Timeout = 30.0
    kv_ip: Annotated[str, Must("an IP address or a host name", is_host)] = "127.0.0.1"
    kv_port: _Port = 0
    kv_connector_module_path: Annotated[Text | None, Must("the name of a Python module")] = None
    kv_connector_extra_config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    keys_without_effect: tuple[str, ...] = field(default=(), metadata=NOT_AN_OPTION)


def parse_kv_transfer_config(value: str | Mapping[str, Any]) -> KVTransferConfig:
    """Reads the object or its JSON text. Raises ConfigError naming the key and its valid values."""
    given: dict[str, Any] = {"engine_id": uuid.uuid4().hex, **read_object("kv_transfer_config", value)}
    ignored = tuple(key for key in _WITHOUT_EFFECT if given.pop(key, None) is not None)
    if "kv_connector" not in given:
        raise ConfigError("kv_transfer_config needs a kv_connector, such as OffloadingConnector")
    return replace(convert_options(KVTransferConfig, given, "in kv_transfer_config"), keys_without_effect=ignored)
