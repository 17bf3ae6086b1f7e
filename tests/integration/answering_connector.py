"""An out-of-tree connector that moves nothing and answers requests with their parameters, finish reason and blocks."""

from __future__ import annotations

from penstock.kv_transfer.connector import FinishAction, FinishResult, RequestView
from penstock.kv_transfer.factory import ConnectorContext
from penstock.kv_transfer.null import NullSchedulerConnector, NullWorkerConnector
from penstock.messages.kv_transfer import ConnectorSetup, ShardId
from penstock.messages.outputs import FinishReason
from penstock.messages.scheduler_output import BlockIds


class AnsweringConnector:
    answers_requests = True

    @staticmethod
    def make_scheduler_connector(context: ConnectorContext) -> AnsweringScheduler:
        return AnsweringScheduler()

    @staticmethod
    def make_worker_connector(
        context: ConnectorContext, shard: ShardId, setup: ConnectorSetup | None
    ) -> NullWorkerConnector:
        return NullWorkerConnector()


class AnsweringScheduler(NullSchedulerConnector):
    def request_finished(self, request: RequestView, block_ids: BlockIds, reason: FinishReason) -> FinishResult:
        if not request.kv_transfer_params:
            return FinishResult(FinishAction.FREE)
        answer = {
            "asked": dict(request.kv_transfer_params),
            "reason": reason.value,
            "blocks": list(map(list, block_ids)),
        }
        return FinishResult(FinishAction.FREE, answer)
