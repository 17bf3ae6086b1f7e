"""From `--kv-transfer-config` to a connector: one of Penstock's, or one from a module that the user names."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Protocol

from penstock.config.kv_transfer import KVTransferConfig
from penstock.kv_transfer.connector import SchedulerConnector, WorkerConnector
from penstock.messages.kv_cache_spec import KVCacheConfig
from penstock.messages.kv_transfer import ShardId
from penstock.utils.errors import ConfigError
from penstock.utils.names import did_you_mean

CONNECTORS = {
    "ExampleConnector": "penstock.kv_transfer.example",
    "MultiConnector": "penstock.kv_transfer.multi",
    "OffloadingConnector": "penstock.kv_transfer.offload.connector",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorContext:
    """What a connector is built from.

    `fingerprint` stands for everything that must be equal for KV to mean the same: weights, shapes, dtype, layout,
    arithmetic. KV of another fingerprint must not be loaded.
    """

    config: KVTransferConfig
    cache: KVCacheConfig
    fingerprint: bytes
    shards: frozenset[ShardId]


class Connector(Protocol):
    """A connector of one engine, before it is split into its parts. Built as `Connector(context)`.

    The constructor checks `context.config.kv_connector_extra_config` and raises ConfigError for what it does not know.
    """

    def make_scheduler_connector(self) -> SchedulerConnector: ...

    def make_worker_connector(self, shard: ShardId) -> WorkerConnector: ...


def make_connector(context: ConnectorContext) -> Connector:
    """Raises ConfigError when there is no such connector, or when it refuses its configuration."""
    name, path = context.config.kv_connector, context.config.kv_connector_module_path
    if path is None and name not in CONNECTORS:
        raise ConfigError(
            f"unknown kv_connector {name!r}{did_you_mean(name, tuple(CONNECTORS))}; there are {', '.join(CONNECTORS)}, "
            "and others with kv_connector_module_path"
        )
    try:
        module = importlib.import_module(path or CONNECTORS[name])
    except ImportError as error:
        raise ConfigError(f"kv_connector_module_path={path!r} cannot be imported: {error}") from None
    kind = getattr(module, name, None)
    if kind is None:
        raise ConfigError(f"the module {module.__name__} has no {name!r}: kv_connector must name a class in it")
    return kind(context)


_SHIM: dict[bytes, Connector] = {}


def make_scheduler_connector(context: ConnectorContext) -> SchedulerConnector:
    _SHIM[context.fingerprint] = make_connector(context)
    return _SHIM[context.fingerprint].make_scheduler_connector()


def make_worker_connector(context: ConnectorContext, shard: ShardId, setup: object) -> WorkerConnector:
    return (_SHIM.get(context.fingerprint) or make_connector(context)).make_worker_connector(shard)
