"""An out-of-tree connector without metadata, which makes progress only if every step reaches its worker."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.kv_transfer.connector import FREED, ConnectorEvent, FinishResult, LoadEnded, Match, RequestView
from penstock.kv_transfer.factory import ConnectorContext
from penstock.kv_transfer.null import NullSchedulerConnector, NullWorkerConnector
from penstock.messages.kv_transfer import (
    BadRange,
    ConnectorSetup,
    KVConnectorMetadata,
    KVConnectorOutput,
    ShardId,
    TransferId,
    TransferReport,
    TransferStatus,
)
from penstock.messages.outputs import FinishReason
from penstock.messages.scheduler_output import BlockIds

NUM_STEPS = 3
LOAD, SAVE = TransferId("0", 0, part=1), TransferId("", 0)


class DrivenConnector:
    @staticmethod
    def make_scheduler_connector(context: ConnectorContext) -> DrivenScheduler:
        return DrivenScheduler(context.cache.block_size)

    @staticmethod
    def make_worker_connector(context: ConnectorContext, shard: ShardId, setup: ConnectorSetup | None) -> DrivenWorker:
        return DrivenWorker(shard)


class DrivenScheduler(NullSchedulerConnector):
    """The first request loads a block, and the load fails; when a request finishes, a save begins."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._open: dict[TransferId, tuple[int, int]] = {}
        self._has_loaded = False

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> Match:
        return Match(0 if self._has_loaded else self._block_size, is_async=True)

    def update_state_after_alloc(
        self, request: RequestView, transfer_id: TransferId, block_ids: BlockIds, num_computed_tokens: int, end: int
    ) -> None:
        self._has_loaded = True
        self._open[transfer_id] = num_computed_tokens, end

    def request_finished(self, request: RequestView, block_ids: BlockIds, reason: FinishReason) -> FinishResult:
        self._open[SAVE] = 0, 0
        return FREED

    def update_connector_output(self, output: KVConnectorOutput) -> Sequence[ConnectorEvent]:
        ended = [report.transfer_id for report in output.reports if report.transfer_id in self._open]
        ranges = {name: self._open.pop(name) for name in ended}
        return [LoadEnded(name, (BadRange(0, *tokens),)) for name, tokens in ranges.items() if name != SAVE]

    @property
    def has_pending_work(self) -> bool:
        return bool(self._open)


class DrivenWorker(NullWorkerConnector):
    def __init__(self, shard: ShardId) -> None:
        self._shard = shard
        self._num_steps = 0

    def begin_step(self, metadata: KVConnectorMetadata | None) -> None:
        assert metadata is None
        self._num_steps += 1

    def get_finished(self, finished_request_ids: frozenset[str]) -> KVConnectorOutput:
        if self._num_steps % NUM_STEPS:
            return KVConnectorOutput()
        failed, done = TransferStatus.FAILED, TransferStatus.DONE
        reports = TransferReport(LOAD, self._shard, failed), TransferReport(SAVE, self._shard, done)
        return KVConnectorOutput(reports)
