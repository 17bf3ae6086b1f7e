"""Wraps a connector's two parts and checks every call and every result against the two protocols."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import cast

from penstock.kv_transfer.connector import (
    ConnectorEvent,
    FinishAction,
    FinishResult,
    LoadEnded,
    Match,
    RequestView,
    SchedulerConnector,
    WorkerConnector,
)
from penstock.kv_transfer.forwarding import Forwarding
from penstock.messages.kv_transfer import (
    KVConnectorMetadata,
    KVConnectorOutput,
    ShardId,
    TransferId,
    TransferReport,
    TransferStatus,
)
from penstock.messages.outputs import FinishReason
from penstock.messages.scheduler_output import BlockIds, BlockTable, SchedulerOutput
from penstock.simulation.backing import Parts, Site
from penstock.utils.errors import RequestError

_UNKNOWN = TransferReport("unknown/load-0", (0, 0), TransferStatus.DONE)


class CheckedScheduler(Forwarding):
    """Raises AssertionError if the connector or its caller violates the contract of `SchedulerConnector`.

    What is raised for one request would end this request only, so it is raised again for the next step.
    """

    def __init__(self, inner: SchedulerConnector, block_size: int) -> None:
        super().__init__(inner)
        self._block_size = block_size
        self._loads: dict[TransferId, tuple[int, int]] = {}
        self._holds: set[TransferId] = set()
        self._last_step = 0
        self._raised: Exception | None = None
        # An unsolicited report must be counted and have no other effect.
        inner.update_connector_output(KVConnectorOutput((_UNKNOWN,)))
        assert not inner.has_pending_work, "a new connector has work"

    @contextmanager
    def _kept(self) -> Generator[None]:
        try:
            yield
        except RequestError:
            raise
        except Exception as error:
            self._raised = error
            raise

    def on_new_request(self, request: RequestView) -> None:
        with self._kept():
            self.inner.on_new_request(request)

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> Match:
        with self._kept():
            return self._match(request, num_computed_tokens)

    def _match(self, request: RequestView, num_computed_tokens: int) -> Match:
        match = self.inner.get_num_new_matched_tokens(request, num_computed_tokens)
        again = self.inner.get_num_new_matched_tokens(request, num_computed_tokens)
        assert match == again, f"{request.request_id} was promised {match}, and then {again}"
        assert match.num_tokens % self._block_size == 0, f"{match} is not a whole number of blocks"
        most = request.num_tokens - 1 - num_computed_tokens
        assert 0 <= match.num_tokens <= max(0, most), f"{match}, where at most {most} tokens may be loaded"
        assert not (match.is_pending and match.num_tokens), f"{match} is pending and has tokens"
        return match

    def update_state_after_alloc(
        self, request: RequestView, transfer_id: TransferId, block_ids: BlockIds, num_computed_tokens: int, end: int
    ) -> None:
        with self._kept():
            assert transfer_id not in self._loads, f"{transfer_id} begins twice"
            self._loads[transfer_id] = num_computed_tokens, end
            self.inner.update_state_after_alloc(request, transfer_id, block_ids, num_computed_tokens, end)
            assert self.inner.has_pending_work, f"{transfer_id} is in progress, but nothing is pending"

    def on_blocks_complete(self, request: RequestView, block_ids: BlockTable, first: int, end: int) -> None:
        assert 0 <= first < end <= len(request.block_hashes), (first, end)
        self.inner.on_blocks_complete(request, block_ids, first, end)

    def build_connector_meta(self, plan: SchedulerOutput) -> KVConnectorMetadata | None:
        if self._raised is not None:
            raise self._raised
        assert plan.step == self._last_step + 1, f"step {plan.step} follows step {self._last_step}"
        self._last_step = plan.step
        return self.inner.build_connector_meta(plan)

    def update_connector_output(self, output: KVConnectorOutput) -> Sequence[ConnectorEvent]:
        events = self.inner.update_connector_output(output)
        for event in events:
            if isinstance(event, LoadEnded):
                assert event.transfer_id in self._loads, f"{event.transfer_id} ends but was not in progress"
                first, end = self._loads.pop(event.transfer_id)
                for bad in event.bad_ranges:
                    assert first <= bad.start < bad.end <= end, f"{bad} is not within [{first}, {end})"
            else:
                assert event.transfer_id in self._holds, f"{event.transfer_id} is released but was not held"
                self._holds.remove(event.transfer_id)
        # Blocks may be held without pending work, for a peer that has not requested them yet.
        assert not self._loads or self.inner.has_pending_work, f"nothing is pending, but {sorted(self._loads)} are"
        return events

    def request_finished(self, request: RequestView, block_ids: BlockIds, reason: FinishReason) -> FinishResult:
        result = self.inner.request_finished(request, block_ids, reason)
        if result.action is FinishAction.HOLD:
            assert any(block_ids), f"{request.request_id} has no blocks to hold"
            assert request.hold_id not in self._holds, f"{request.hold_id} is held twice"
            self._holds.add(request.hold_id)
        return result

    def shutdown(self) -> None:
        self.inner.shutdown()
        self.inner.shutdown()


class CheckedWorker(Forwarding):
    """Raises AssertionError if a worker's part reports for another rank, or reports a transfer twice."""

    def __init__(self, inner: WorkerConnector, shard: ShardId) -> None:
        super().__init__(inner)
        self._shard = shard
        self._reported: set[TransferId] = set()

    def get_finished(self, finished_request_ids: frozenset[str]) -> KVConnectorOutput:
        output = self.inner.get_finished(finished_request_ids)
        for report in output.reports:
            assert report.shard == self._shard, f"rank {self._shard} reports for {report.shard}"
            assert report.transfer_id not in self._reported, f"{report.transfer_id} ends twice on {self._shard}"
            self._reported.add(report.transfer_id)
        return output

    def shutdown(self) -> None:
        self.inner.shutdown()
        self.inner.shutdown()


class CheckedBacking(Forwarding):
    """A backing whose connectors are all checked."""

    def attach(self, site: Site) -> Parts:
        parts: Parts = self.inner.attach(site)
        return replace(
            parts,
            scheduler=cast(SchedulerConnector, CheckedScheduler(parts.scheduler, site.cache.block_size)),
            workers={
                shard: cast(WorkerConnector, CheckedWorker(worker, shard)) for shard, worker in parts.workers.items()
            },
        )
