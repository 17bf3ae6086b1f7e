"""An out-of-tree connector that moves nothing and records its calls."""

from __future__ import annotations

import msgspec

from penstock.kv_transfer.factory import ConnectorContext
from penstock.kv_transfer.null import NullSchedulerConnector, NullWorkerConnector
from penstock.kv_transfer.view import KVCacheView
from penstock.messages.kv_transfer import ConnectorSetup, KVConnectorMetadata, KVConnectorOutput, ShardId
from penstock.messages.scheduler_output import SchedulerOutput
from penstock.utils.layer_hooks import LayerHooks
from penstock.utils.wire import register_kind

CALLS: list[tuple[str, object]] = []


@register_kind
class StepNumber(KVConnectorMetadata, msgspec.Struct, frozen=True, tag=True):
    step: int = 0
    sync: bool = False

    @property
    def has_sync_loads(self) -> bool:
        return self.sync


class RecordingConnector:
    @staticmethod
    def make_scheduler_connector(context: ConnectorContext) -> RecordingScheduler:
        return RecordingScheduler(bool(context.config.kv_connector_extra_config.get("sync")))

    @staticmethod
    def make_worker_connector(
        context: ConnectorContext, shard: ShardId, setup: ConnectorSetup | None
    ) -> RecordingWorker:
        assert setup is None
        return RecordingWorker()


class RecordingScheduler(NullSchedulerConnector):
    def __init__(self, sync: bool) -> None:
        self.sync = sync

    def build_connector_meta(self, plan: SchedulerOutput) -> StepNumber:
        CALLS.append(("build", plan.step))
        return StepNumber(plan.step, self.sync)


class RecordingWorker(NullWorkerConnector):
    @property
    def layer_hooks(self) -> LayerHooks:
        return self

    def register_kv_caches(self, view: KVCacheView) -> None:
        self.view = view

    def begin_step(self, metadata: KVConnectorMetadata | None) -> None:
        assert isinstance(metadata, StepNumber)
        CALLS.append(("begin", metadata.step))

    def start_load_kv(self) -> None:
        CALLS.append(("load", None))

    def wait_for_layer_load(self, layer_name: str) -> None:
        CALLS.append(("layer load", layer_name))

    def save_kv_layer(self, layer_name: str) -> None:
        CALLS.append(("layer save", layer_name))

    def get_finished(self, finished_request_ids: frozenset[str]) -> KVConnectorOutput:
        CALLS.append(("finished", finished_request_ids))
        return KVConnectorOutput()

    def wait_for_save(self) -> None:
        CALLS.append(("save", b"".join(bytes(part) for part in self.view.block_parts(0, 1))))

    def end_step(self) -> None:
        CALLS.append(("end", None))
