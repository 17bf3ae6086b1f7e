"""Data parallelism: the engine cores that share the requests of one front end, each with its own configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, cast

from penstock.config.engine import EngineConfig
from penstock.config.gpus import name_gpus, show_gpus
from penstock.config.kv_events import KVEventsConfig
from penstock.config.kv_transfer import DEFAULT_BOOTSTRAP_PORT, KVTransferConfig
from penstock.config.options import replace_options
from penstock.utils.errors import ConfigError

_TCP_PORT = re.compile(r"(tcp://.*:)([0-9]+)")


@dataclass(frozen=True, slots=True)
class CorePlan:
    """How to start an engine core: its configuration, additions to its process's environment, and the processor's
    cores to which the process is bound; without any it is not bound.

    A core of several engines derives their configurations by `config_of_engine`.
    """

    config: EngineConfig
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    cores: frozenset[int] = frozenset()


def core_plans(config: EngineConfig, visible_gpus: str | None, nodes: Sequence[Set[int]] = ()) -> list[CorePlan]:
    """Plans the cores of all data parallel ranks, in order: one for each, or one for all if they share experts.

    Each has its own GPUs; on a CPU they divide its cores and its memory: each is bound to some of `nodes`, the cores of
    its NUMA nodes, or to a part of one. Ports in kv_transfer_config and kv_events_config are those of rank 0; rank r
    listens r ports above them, and so for those of a MultiConnector's children and a MooncakeConnector's default one.
    `visible_gpus` is CUDA_VISIBLE_DEVICES. Raises ConfigError if it has too few.
    """
    size, events = config.parallel.dp, config.kv_events
    ports = [_TCP_PORT.fullmatch(each or "") for each in (events.endpoint, events.replay_endpoint)]
    numbers = [int(port[2]) for port in ports if port is not None]
    if size > max(numbers, default=0) - min(numbers, default=0) > 0:
        raise ConfigError(
            f"the ports of endpoint and replay_endpoint in kv_events_config must be at least data_parallel_size={size} "
            f"apart, got {' and '.join(map(str, numbers))}: each engine takes the next port of both"
        )
    if size == config.parallel.num_joint_engines:
        return [CorePlan(config)]
    gpus, cores = _gpus_by_rank(config, visible_gpus), _cores_by_rank(size, nodes)
    return [CorePlan(_config_of_rank(config, rank, cores[rank]), gpus[rank], cores[rank]) for rank in range(size)]


def _cores_by_rank(size: int, nodes: Sequence[Set[int]]) -> list[frozenset[int]]:
    """Returns each rank's cores: whole nodes, or an equal part of one that several ranks share. Nothing is bound on a
    machine with one node, whose cores are alike, or if a rank would have no core.
    """
    if len(nodes) <= 1 or size > sum(map(len, nodes)):
        return [frozenset[int]()] * size
    if size <= len(nodes):
        bounds = [len(nodes) * rank // size for rank in range(size + 1)]
        return [frozenset[int]().union(*nodes[first:end]) for first, end in pairwise(bounds)]
    found: list[frozenset[int]] = []
    for number, node in enumerate(nodes):
        sharers, ordered = len(range(number, size, len(nodes))), sorted(node)
        parts = [len(ordered) * part // sharers for part in range(sharers + 1)]
        found += [frozenset(ordered[first:end]) for first, end in pairwise(parts)]
    return found


def _config_of_rank(config: EngineConfig, rank: int, cores: Set[int]) -> EngineConfig:
    own = config_of_engine(config, rank)
    if not cores or own.execution.num_threads is not None:
        return own
    # A bound engine's cores are its own already.
    return replace(own, execution=replace(own.execution, num_threads=max(1, len(cores) // own.parallel.num_ranks)))


def _gpus_by_rank(config: EngineConfig, visible: str | None) -> list[dict[str, str]]:
    size, each = config.parallel.dp, config.parallel.num_ranks
    if config.device == "cpu" or visible == "" or config.parallel.backend == "ray":
        return [{}] * size
    names = name_gpus(visible, size * each)
    if len(names) < size * each:
        raise ConfigError(
            f"data_parallel_size={size} needs {size * each} GPUs, and CUDA_VISIBLE_DEVICES={visible} lists "
            f"{len(names)}: list more, lower data_parallel_size, or set device=cpu"
        )
    return [show_gpus(names[rank * each : (rank + 1) * each]) for rank in range(size)]


def config_of_engine(config: EngineConfig, rank: int) -> EngineConfig:
    """Returns the configuration of one of several engines, with its rank, names and ports."""
    transfer = None if config.kv_transfer is None else _transfer_of(config.kv_transfer, rank)
    return replace(config, dp_rank=rank, kv_transfer=transfer, kv_events=_events_of(config.kv_events, rank))


def _transfer_of(config: KVTransferConfig, rank: int) -> KVTransferConfig:
    names = ("kv_connector", "engine_id", "kv_port", "kv_connector_extra_config")
    changes = _of_rank({name: getattr(config, name) for name in names}, rank)
    return replace_options(config, changes, "in kv_transfer_config")


def _of_rank(value: Any, rank: int, name: str = "") -> Any:
    """Returns a value of a connector's configuration, which may be nested as a MultiConnector's is, with the engine ids
    and ports of the rank. Values of a wrong type are left for the connector to refuse.
    """
    if isinstance(value, list):
        return [_of_rank(each, rank) for each in cast("list[Any]", value)]
    if isinstance(value, Mapping):
        given = dict(cast("Mapping[str, Any]", value))
        extra = given.get("kv_connector_extra_config", {})
        if given.get("kv_connector") == "MooncakeConnector" and isinstance(extra, Mapping):
            given["kv_connector_extra_config"] = {"bootstrap_port": DEFAULT_BOOTSTRAP_PORT, **extra}
        return {key: _of_rank(each, rank, key) for key, each in given.items()}
    if name in ("kv_port", "bootstrap_port") and type(value) is int:
        return value and value + rank  # port 0 means a free one
    return f"{value}-{rank}" if name == "engine_id" and isinstance(value, str) else value


def _events_of(config: KVEventsConfig, rank: int) -> KVEventsConfig:
    changes = {name: _endpoint_of(getattr(config, name), rank) for name in ("endpoint", "replay_endpoint")}
    return replace_options(config, changes, "in kv_events_config")


def _endpoint_of(endpoint: str | None, rank: int) -> str | None:
    match = _TCP_PORT.fullmatch(endpoint or "")
    if match is None:
        return endpoint and f"{endpoint}-{rank}"
    return endpoint if match[2] == "0" else f"{match[1]}{int(match[2]) + rank}"
