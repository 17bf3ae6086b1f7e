"""`MultiConnector`: several connectors on one engine. The first that has a prompt's KV loads it, and all of them save.

Option: `connectors`, a list of objects such as `{"name": "disk", "kv_connector": "OffloadingConnector",
"kv_connector_extra_config": {...}}`; the name defaults to the connector's own, and must be unique.

All transfer ids are prefixed with the child's name towards the engine, so no child ever sees another's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from penstock.config.kv_transfer import KVTransferConfig, parse_kv_transfer_config
from penstock.config.options import Limits, Must, convert_options
from penstock.kv_transfer.connector import (
    FREED,
    NO_MATCH,
    ConnectorEvent,
    FinishAction,
    FinishResult,
    LoadEnded,
    Match,
    RequestView,
    SchedulerConnector,
    WorkerConnector,
)
from penstock.kv_transfer.factory import (
    ConnectorContext,
    answers_requests,
    make_scheduler_connector,
    make_worker_connector,
)
from penstock.kv_transfer.null import NullSchedulerConnector
from penstock.kv_transfer.view import KVCacheView
from penstock.messages.kv_events import KVEvent
from penstock.messages.kv_transfer import (
    ConnectorSetup,
    HandshakePayload,
    KVConnectorMetadata,
    KVConnectorOutput,
    ShardId,
    TransferId,
    TransferReport,
)
from penstock.messages.outputs import FinishReason
from penstock.messages.scheduler_output import BlockIds, BlockTable, SchedulerOutput
from penstock.utils.errors import ConfigError
from penstock.utils.layer_hooks import LayerHooks
from penstock.utils.wire import register_kind


@register_kind
class MultiMetadata(KVConnectorMetadata, msgspec.Struct, frozen=True, tag=True):
    children: dict[str, KVConnectorMetadata | None]

    @property
    def has_sync_loads(self) -> bool:
        return any(child is not None and child.has_sync_loads for child in self.children.values())


@register_kind
class MultiHandshake(HandshakePayload, msgspec.Struct, frozen=True, tag=True):
    children: dict[str, HandshakePayload | None]


@register_kind
class MultiSetup(ConnectorSetup, msgspec.Struct, frozen=True, tag=True):
    children: dict[str, ConnectorSetup | None]


@dataclass(frozen=True, slots=True)
class MultiOptions:
    connectors: Annotated[list[dict[str, Any]], Limits(min_length=1), Must("a list of objects")]


class MultiConnector:
    """See the module's docstring."""

    @staticmethod
    def children(config: KVTransferConfig) -> dict[str, KVTransferConfig]:
        """Returns their configurations by name. Raises ConfigError if one is invalid or has children itself, a name is
        repeated, or several children answer requests.
        """
        shared = {key: getattr(config, key) for key in ("engine_id", "kv_role", "kv_load_timeout", "kv_ip", "kv_port")}
        configs: dict[str, KVTransferConfig] = {}
        for child in convert_options(MultiOptions, config.kv_connector_extra_config, "of MultiConnector").connectors:
            parsed = parse_kv_transfer_config({**shared, **{key: child[key] for key in child if key != "name"}})
            if parsed.kv_connector == "MultiConnector":  # a report names one child only
                raise ConfigError("connectors of MultiConnector cannot be one: list its connectors in the outer one")
            name = child.get("name", parsed.kv_connector)
            if not isinstance(name, str) or not name or not name.isprintable() or name in configs:
                raise ConfigError(f"connectors of MultiConnector need unique names, got {name!r}")
            configs[name] = parsed
        if len(answering := [name for name, child in configs.items() if answers_requests(child)]) > 1:
            raise ConfigError(
                f"{' and '.join(answering)} in MultiConnector would each answer requests with kv_transfer_params: keep "
                "one of them, the one whose style your proxy speaks"
            )
        return configs

    @staticmethod
    def make_scheduler_connector(context: ConnectorContext) -> MultiScheduler:
        """Builds the children's parts, or none of them if one cannot be built. Raises ConfigError as `children`."""
        made: dict[str, SchedulerConnector] = {}
        try:
            for name, child in _contexts_of_children(context).items():
                made[name] = make_scheduler_connector(child)
        except Exception:
            MultiScheduler(made).shutdown()
            raise
        return MultiScheduler(made)

    @staticmethod
    def make_worker_connector(context: ConnectorContext, shard: ShardId, setup: ConnectorSetup | None) -> MultiWorker:
        assert isinstance(setup, MultiSetup), setup
        contexts = _contexts_of_children(context)
        return MultiWorker(
            {name: make_worker_connector(child, shard, setup.children[name]) for name, child in contexts.items()}
        )


def _contexts_of_children(context: ConnectorContext) -> dict[str, ConnectorContext]:
    configs = MultiConnector.children(context.config)
    return {name: msgspec.structs.replace(context, config=config) for name, config in configs.items()}


class MultiScheduler(NullSchedulerConnector):
    """Asks the children in order."""

    def __init__(self, children: Mapping[str, SchedulerConnector]) -> None:
        self._children = children
        self._chosen: dict[str, str] = {}
        self._holders: dict[TransferId, set[str]] = {}

    def on_new_request(self, request: RequestView) -> None:
        told: list[SchedulerConnector] = []
        for child in self._children.values():
            try:
                child.on_new_request(request)
            except Exception:
                for other in told:
                    other.request_finished(request, (), FinishReason.ERROR)
                raise
            told.append(child)

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> Match:
        self._chosen.pop(request.request_id, None)
        for name, child in self._children.items():
            match = child.get_num_new_matched_tokens(request, num_computed_tokens)
            if match.is_pending or match.num_tokens:
                self._chosen[request.request_id] = name
                return match
        return NO_MATCH

    def update_state_after_alloc(
        self, request: RequestView, transfer_id: TransferId, block_ids: BlockIds, num_computed_tokens: int, end: int
    ) -> None:
        # The connector chosen earlier loads now, because another connector's match would refer to other KV.
        child = self._children[self._chosen.pop(request.request_id)]
        child.update_state_after_alloc(request, transfer_id, block_ids, num_computed_tokens, end)

    def cancel_load(self, request: RequestView) -> None:
        for child in self._children.values():
            child.cancel_load(request)

    def on_blocks_complete(self, request: RequestView, block_ids: BlockTable, first: int, end: int) -> None:
        for child in self._children.values():
            child.on_blocks_complete(request, block_ids, first, end)

    def build_connector_meta(self, plan: SchedulerOutput) -> MultiMetadata:
        return MultiMetadata({name: child.build_connector_meta(plan) for name, child in self._children.items()})

    def poll(self) -> list[ConnectorEvent]:
        return [event for name, child in self._children.items() for event in child.poll() if self._is_last(name, event)]

    def update_connector_output(self, output: KVConnectorOutput) -> Sequence[ConnectorEvent]:
        reports: dict[str, list[TransferReport]] = {name: [] for name in self._children}
        for report in output.reports:
            # A report that names no child is about an unknown transfer and is dropped.
            reports.get(report.transfer_id.child, []).append(_of_child(report, ""))
        outputs = {name: KVConnectorOutput(tuple(of_child)) for name, of_child in reports.items()}
        ended = {name: child.update_connector_output(outputs[name]) for name, child in self._children.items()}
        return [event for name, events in ended.items() for event in events if self._is_last(name, event)]

    def _is_last(self, name: str, event: ConnectorEvent) -> bool:
        """Returns whether an event of a child is one of all: a hold ends when the last of its holders has ended it."""
        if isinstance(event, LoadEnded):
            return True
        holders = self._holders.get(event.transfer_id, set())
        holders.discard(name)
        if holders or event.transfer_id not in self._holders:
            return False
        del self._holders[event.transfer_id]
        return True

    def request_finished(self, request: RequestView, block_ids: BlockIds, reason: FinishReason) -> FinishResult:
        self._chosen.pop(request.request_id, None)
        results = {name: child.request_finished(request, block_ids, reason) for name, child in self._children.items()}
        params = _merged(results)
        if holders := {name for name, result in results.items() if result.action is FinishAction.HOLD}:
            self._holders[request.hold_id] = holders
            return FinishResult(FinishAction.HOLD, params)
        return FREED if params is None else FinishResult(FinishAction.FREE, params)

    def set_xfer_handshake_metadata_pp_aware(self, payloads: Mapping[ShardId, HandshakePayload | None]) -> None:
        for name, child in self._children.items():
            of_child: dict[ShardId, HandshakePayload | None] = {}
            for shard, payload in payloads.items():
                assert isinstance(payload, MultiHandshake), payload
                of_child[shard] = payload.children[name]
            child.set_xfer_handshake_metadata_pp_aware(of_child)

    def worker_setup(self) -> MultiSetup:
        return MultiSetup({name: child.worker_setup() for name, child in self._children.items()})

    @property
    def has_pending_work(self) -> bool:
        return any(child.has_pending_work for child in self._children.values())

    @property
    def takes_waker(self) -> bool:
        return any(child.takes_waker for child in self._children.values())

    def set_waker(self, callback: Callable[[], None]) -> None:
        for child in self._children.values():
            child.set_waker(callback)

    def wait(self, seconds: float) -> None:
        # If no transfer is in flight, a request waits for a lookup by any of them.
        waiting = [child for child in self._children.values() if child.has_pending_work] or [*self._children.values()]
        for child in waiting:
            child.wait(seconds / len(waiting))

    def take_events(self) -> Sequence[KVEvent]:
        return [event for child in self._children.values() for event in child.take_events()]

    def counters(self) -> Mapping[str, float]:
        return {f"{name}.{key}": n for name, child in self._children.items() for key, n in child.counters().items()}

    def reset_cache(self) -> bool:
        done = [child.reset_cache() for child in self._children.values()]
        return all(done)

    def check_integrity(self) -> None:
        for child in self._children.values():
            child.check_integrity()

    def shutdown(self) -> None:
        _shut_down(self._children)


def _shut_down(parts: Mapping[str, SchedulerConnector | WorkerConnector]) -> None:
    """Shuts down all, also if one of them raises."""
    with contextlib.ExitStack() as stack:
        for part in parts.values():
            stack.callback(part.shutdown)


def _merged(results: Mapping[str, FinishResult]) -> dict[str, Any] | None:
    """Merges the parameters of all children; returns None if no child has any."""
    params: dict[str, Any] = {}
    for name, result in results.items():
        given = result.kv_transfer_params or {}
        assert params.keys().isdisjoint(given), f"{name} and another child both answer {sorted(params.keys() & given)}"
        params.update(given)
    return params or None


def _of_child(report: TransferReport, name: str) -> TransferReport:
    return msgspec.structs.replace(report, transfer_id=msgspec.structs.replace(report.transfer_id, child=name))


class _HooksOfAll:
    def __init__(self, hooks: Sequence[LayerHooks]) -> None:
        self._hooks = hooks

    def wait_for_layer_load(self, layer_name: str) -> None:
        for hooks in self._hooks:
            hooks.wait_for_layer_load(layer_name)

    def save_kv_layer(self, layer_name: str) -> None:
        for hooks in self._hooks:
            hooks.save_kv_layer(layer_name)


class MultiWorker:
    """Drives the children's parts in parallel."""

    def __init__(self, children: Mapping[str, WorkerConnector]) -> None:
        self._children = children
        self._parts = tuple(children.values())
        hooks = [part.layer_hooks for part in self._parts if part.layer_hooks is not None]
        self.layer_hooks = _HooksOfAll(hooks) if hooks else None
        self.needs_shared_memory = any(part.needs_shared_memory for part in self._parts)

    def register_kv_caches(self, view: KVCacheView) -> None:
        for part in self._parts:
            part.register_kv_caches(view)

    def get_handshake_metadata(self) -> MultiHandshake:
        return MultiHandshake({name: part.get_handshake_metadata() for name, part in self._children.items()})

    def begin_step(self, metadata: KVConnectorMetadata | None) -> None:
        assert isinstance(metadata, MultiMetadata), metadata
        for name, part in self._children.items():
            part.begin_step(metadata.children[name])

    def start_load_kv(self) -> None:
        for part in self._parts:
            part.start_load_kv()

    def get_finished(self, finished_request_ids: frozenset[str]) -> KVConnectorOutput:
        reports: list[TransferReport] = []
        for name, part in self._children.items():
            reports += (_of_child(report, name) for report in part.get_finished(finished_request_ids).reports)
        return KVConnectorOutput(tuple(reports))

    def wait_for_save(self) -> None:
        for part in self._parts:
            part.wait_for_save()

    def end_step(self) -> None:
        for part in self._parts:
            part.end_step()

    def shutdown(self) -> None:
        _shut_down(self._children)
