"""Builds a connector from `--kv-transfer-config`: one of Penstock's, or one from a module that the user names."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Protocol, cast

import msgspec

from penstock.config.kv_transfer import KVTransferConfig
from penstock.kv_transfer.connector import SchedulerConnector, WorkerConnector
from penstock.kv_transfer.forwarding import LoadsOnly, SavesOnly
from penstock.kv_transfer.null import NullSchedulerConnector
from penstock.messages.kv_cache_spec import KVCacheConfig
from penstock.messages.kv_transfer import ConnectorSetup, ShardId
from penstock.utils import logging
from penstock.utils.errors import ConfigError
from penstock.utils.names import did_you_mean

logger = logging.get_logger(__name__)

CONNECTORS = {
    "MooncakeConnector": "penstock.kv_transfer.p2p.connector",
    "MultiConnector": "penstock.kv_transfer.multi",
    "NixlConnector": "penstock.kv_transfer.p2p.connector",
    "OffloadingConnector": "penstock.kv_transfer.offload.connector",
    "P2PConnector": "penstock.kv_transfer.p2p.connector",
}

# Connectors of the repository that are not part of the package, by the module to name in kv_connector_module_path.
_EXAMPLES = {"ExampleConnector": "examples.example_connector"}

_ONE_WAY = {"kv_producer": SavesOnly, "kv_consumer": LoadsOnly}


class ConnectorContext(msgspec.Struct, frozen=True, kw_only=True):
    """The data from which both sides of a connector are built: the same in every process.

    `fingerprint` is a digest of everything that must be equal for KV to have the same meaning: weights, shapes, dtype,
    layout, arithmetic. KV with another fingerprint must not be loaded. `meaning` names its parts except the layout, so
    that a refusal can say which of them differs. `cache` is the whole engine's; `rank_heads` is the interval of KV
    heads that each rank has of each of its layers.
    """

    config: KVTransferConfig
    cache: KVCacheConfig
    fingerprint: bytes
    shards: frozenset[ShardId]
    meaning: dict[str, str] = {}
    rank_heads: dict[ShardId, dict[str, tuple[int, int]]] = {}


class Connector(Protocol):
    """A connector's class: two builders that run in different processes and share no object.

    The scheduler side is built first, in the engine core. It checks `context.config.kv_connector_extra_config` and
    raises ConfigError for unknown options. Then every worker builds its side; `setup` is the return value of the
    scheduler side's `worker_setup`.

    A class whose scheduler side answers requests with `kv_transfer_params` has `answers_requests = True`: an engine
    has at most one such connector.
    """

    @staticmethod
    def make_scheduler_connector(context: ConnectorContext) -> SchedulerConnector: ...

    @staticmethod
    def make_worker_connector(
        context: ConnectorContext, shard: ShardId, setup: ConnectorSetup | None
    ) -> WorkerConnector: ...


def make_scheduler_connector(context: ConnectorContext) -> SchedulerConnector:
    """Builds the side that decides, limited by `kv_role`, or by those of its children if it has any. Raises ConfigError
    if connector or options are invalid.
    """
    if context.config.keys_without_effect:
        logger.info("kv_transfer_config: %s have no effect here", ", ".join(context.config.keys_without_effect))
    part = _find(context.config).make_scheduler_connector(context)
    if not isinstance(part, NullSchedulerConnector):
        raise ConfigError(
            f"{context.config.kv_connector}: its {type(part).__name__} must derive from NullSchedulerConnector of "
            "penstock.kv_transfer.null, which has the defaults of all methods"
        )
    one_way = None if _children(context.config) else _ONE_WAY.get(context.config.kv_role)
    return part if one_way is None else cast(SchedulerConnector, one_way(part))


def make_worker_connector(context: ConnectorContext, shard: ShardId, setup: ConnectorSetup | None) -> WorkerConnector:
    """Builds one rank's side, which moves bytes. Raises ConfigError for an unknown connector."""
    return _find(context.config).make_worker_connector(context, shard, setup)


def import_connector(config: KVTransferConfig) -> None:
    """Imports the connector and its children (`children`, if it has such a function).

    A process must call this before it decodes their kinds of messages. Raises ConfigError for an unknown connector.
    """
    for child in _children(config):
        import_connector(child)


def answers_requests(config: KVTransferConfig) -> bool:
    """Returns whether the connector answers requests with `kv_transfer_params`; a MultiConnector does not do so itself.
    Raises ConfigError for an unknown connector.
    """
    return getattr(_find(config), "answers_requests", False)


def shares_kv(config: KVTransferConfig | None) -> bool:
    """Returns whether other engines can load KV from this one, and this one from them, for requests with
    `kv_transfer_params`. Raises ConfigError for an unknown connector.
    """
    if config is None:
        return False
    return (config.kv_role == "kv_both" and answers_requests(config)) or any(map(shares_kv, _children(config)))


def _children(config: KVTransferConfig) -> Iterable[KVTransferConfig]:
    children = getattr(_find(config), "children", None)
    return () if children is None else children(config).values()


def _find(config: KVTransferConfig) -> Connector:
    name, path = config.kv_connector, config.kv_connector_module_path
    if path is None and name in _EXAMPLES:
        raise ConfigError(
            f"the {name} is in the repository's examples: start in its root folder with PYTHONPATH=., and set "
            f'kv_connector_module_path to "{_EXAMPLES[name]}"'
        )
    if path is None and name not in CONNECTORS:
        raise ConfigError(
            f"unknown kv_connector {name!r}{did_you_mean(name, tuple(CONNECTORS))}; for any other one "
            "kv_connector_module_path must name its module"
        )
    try:
        module = importlib.import_module(path or CONNECTORS[name])
    except (ImportError, TypeError) as error:
        raise ConfigError(f"kv_connector_module_path={path!r} cannot be imported: {error}") from None
    kind = getattr(module, name, None)
    if kind is None:
        raise ConfigError(f"the module {module.__name__} has no {name!r}: kv_connector must name a class in it")
    return kind
