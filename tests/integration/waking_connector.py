"""An out-of-tree connector that pins the blocks of every request until it receives a message.

Option: `socket`, the path of a datagram socket. `release` drops the pins, `work` begins work that `rest` ends.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping, Sequence

from penstock.kv_transfer.connector import ConnectorEvent, FinishAction, FinishResult, Released, RequestView
from penstock.kv_transfer.factory import ConnectorContext
from penstock.kv_transfer.null import NullSchedulerConnector, NullWorkerConnector
from penstock.messages.kv_transfer import ConnectorSetup, KVConnectorMetadata, KVConnectorOutput, ShardId, TransferId
from penstock.messages.outputs import FinishReason
from penstock.messages.scheduler_output import BlockIds, SchedulerOutput

RELEASE, WORK, REST = b"release", b"work", b"rest"


class WakingConnector:
    @staticmethod
    def make_scheduler_connector(context: ConnectorContext) -> WakingScheduler:
        return WakingScheduler(context.config.kv_connector_extra_config["socket"])

    @staticmethod
    def make_worker_connector(
        context: ConnectorContext, shard: ShardId, setup: ConnectorSetup | None
    ) -> NullWorkerConnector:
        return NullWorkerConnector()


class WakingScheduler(NullSchedulerConnector):
    def __init__(self, path: str) -> None:
        self._held: list[TransferId] = []
        self._num_steps = 0
        self._messages: list[bytes] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(path)

    def set_waker(self, waker: Callable[[], None]) -> None:
        threading.Thread(target=self._receive, args=(waker,), daemon=True).start()

    def _receive(self, waker: Callable[[], None]) -> None:
        while message := self._socket.recv(64):
            self._messages.append(message)
            waker()

    def request_finished(self, request: RequestView, block_ids: BlockIds, reason: FinishReason) -> FinishResult:
        self._held.append(request.hold_id)
        return FinishResult(FinishAction.HOLD)

    def build_connector_meta(self, plan: SchedulerOutput) -> KVConnectorMetadata | None:
        self._num_steps += 1
        return None

    def update_connector_output(self, output: KVConnectorOutput) -> Sequence[ConnectorEvent]:
        events: list[ConnectorEvent] = []
        while RELEASE in self._messages:
            self._messages.remove(RELEASE)
            events += map(Released, self._held)
            self._held.clear()
        if REST in self._messages:
            self._messages.clear()
        return events

    @property
    def has_pending_work(self) -> bool:
        return bool(self._messages)

    def counters(self) -> Mapping[str, float]:
        return {"num_steps": self._num_steps, "num_held": len(self._held)}

    def shutdown(self) -> None:
        self._messages.clear()
