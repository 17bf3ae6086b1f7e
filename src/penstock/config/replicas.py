"""Data parallelism: the engine cores that share the requests of one front end, each with its own arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.config.engine import EngineArgs, check
from penstock.config.gpus import name_gpus, show_gpus
from penstock.config.kv_transfer import DEFAULT_BOOTSTRAP_PORT
from penstock.utils.errors import ConfigError

_TCP_PORT = re.compile(r"(tcp://.*:)([0-9]+)")


@dataclass(frozen=True, slots=True)
class CorePlan:
    """How to start an engine core: its arguments, and additions to its process's environment."""

    args: EngineArgs
    environment: Mapping[str, str] = field(default_factory=dict[str, str])


def core_plans(args: EngineArgs, visible_gpus: str | None) -> list[CorePlan]:
    """Plans the cores of all data parallel ranks, in order.

    Each has its own GPUs; on a CPU they divide its cores and its memory. Ports in kv_transfer_config, including the
    default one of a MooncakeConnector, and in kv_events_config are those of rank 0; rank r listens r ports above them.
    `visible_gpus` is CUDA_VISIBLE_DEVICES. Raises ConfigError if it has too few.
    """
    check(args)
    size = args.data_parallel_size
    if size == 1:
        return [CorePlan(args)]
    gpus = _gpus_by_rank(args, visible_gpus)
    return [CorePlan(_args_of(args, rank), gpus[rank]) for rank in range(size)]


def _gpus_by_rank(args: EngineArgs, visible: str | None) -> list[dict[str, str]]:
    size, each = args.data_parallel_size, args.num_ranks
    if args.device == "cpu" or visible == "" or args.executor_backend == "ray":
        return [{}] * size
    names = name_gpus(visible, size * each)
    if len(names) < size * each:
        raise ConfigError(
            f"data_parallel_size={size} needs {size * each} GPUs, and CUDA_VISIBLE_DEVICES={visible} lists "
            f"{len(names)}: list more, lower data_parallel_size, or set device=cpu"
        )
    return [show_gpus(names[rank * each : (rank + 1) * each]) for rank in range(size)]


def _args_of(args: EngineArgs, rank: int) -> EngineArgs:
    transfer, events = _as_object(args.kv_transfer_config), _as_object(args.kv_events_config)
    if transfer is not None:
        if transfer.get("engine_id"):
            transfer["engine_id"] = f"{transfer['engine_id']}-{rank}"
        _move_port(transfer, "kv_port", rank)
        extra = _as_object(transfer.get("kv_connector_extra_config", {}))
        if extra is not None and transfer.get("kv_connector") == "MooncakeConnector":
            extra.setdefault("bootstrap_port", DEFAULT_BOOTSTRAP_PORT)
        if extra:
            _move_port(extra, "bootstrap_port", rank)
            transfer["kv_connector_extra_config"] = extra
    if events is not None:
        for name in ("endpoint", "replay_endpoint"):
            if isinstance(events.get(name), str):
                events[name] = _endpoint_of(events[name], rank)
    return replace(args, kv_transfer_config=transfer, kv_events_config=events)


def _as_object(value: str | Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Returns a copy; None also for other types, which the engine refuses later."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return None
    return dict(value) if isinstance(value, Mapping) else None


def _move_port(values: dict[str, Any], name: str, rank: int) -> None:
    """Leaves port 0, which means a free one."""
    if isinstance(values.get(name), int) and values[name]:
        values[name] += rank


def _endpoint_of(endpoint: str, rank: int) -> str:
    match = _TCP_PORT.fullmatch(endpoint)
    if match is None:
        return f"{endpoint}-{rank}"
    return endpoint if match[2] == "0" else f"{match[1]}{int(match[2]) + rank}"
