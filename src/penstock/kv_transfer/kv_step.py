"""One step of a worker's connector, from binding its metadata to forgetting it: the only place that calls the hooks.

    IDLE -> BOUND -> FORWARD -> COLLECTED -> FINALIZED -> IDLE

Results are collected before the drafter runs and saves are finalised after it, so what `wait_for_save` ends is reported
with the next step, whether there is a drafter or not. The step ends on every path, also on that of an exception.
"""

from __future__ import annotations

import enum
from types import TracebackType

from penstock.kv_transfer.connector import WorkerConnector
from penstock.kv_transfer.null import NullWorkerConnector
from penstock.messages.kv_transfer import NO_METADATA, KVConnectorMetadata, KVConnectorOutput
from penstock.messages.scheduler_output import SchedulerOutput


class KVStepState(enum.Enum):
    IDLE = "idle"
    BOUND = "bound"
    FORWARD = "forward"
    COLLECTED = "collected"
    FINALIZED = "finalized"


_NEXT = {
    KVStepState.IDLE: KVStepState.BOUND,
    KVStepState.BOUND: KVStepState.FORWARD,
    KVStepState.FORWARD: KVStepState.COLLECTED,
    KVStepState.COLLECTED: KVStepState.FINALIZED,
}


class KVStep:
    """Drives one rank's connector. As a context it covers the step's second half and ends it.

    A plan without metadata (a warm-up's) does not reach the connector.
    """

    def __init__(self, connector: WorkerConnector) -> None:
        self._connectors: dict[bool, WorkerConnector] = {True: connector, False: NullWorkerConnector()}
        self._active = self._connectors[False]
        self.state = KVStepState.IDLE
        self._metadata: KVConnectorMetadata = NO_METADATA
        self._finished_request_ids: frozenset[str] = frozenset()

    @property
    def hooks(self) -> WorkerConnector:
        """Whose layer hooks this step's forward pass calls."""
        return self._connectors[self._active.layerwise]

    def begin(self, plan: SchedulerOutput) -> None:
        """Before the step writes anything; loads that its own tokens need have begun when this returns."""
        self._advance(KVStepState.BOUND)
        self._metadata = plan.kv_connector_metadata
        self._finished_request_ids = plan.finished_request_ids
        self._active = self._connectors[self._metadata is not NO_METADATA]
        self._active.begin_step(self._metadata)
        if self._metadata.has_sync_loads:
            self._active.start_load_kv()

    def on_forward_launched(self) -> None:
        """The target's forward pass, if the step has one, is on its way: other loads may begin beside it."""
        self._advance(KVStepState.FORWARD)
        if not self._metadata.has_sync_loads:
            self._active.start_load_kv()

    def collect(self) -> KVConnectorOutput:
        """What has ended by now."""
        self._advance(KVStepState.COLLECTED)
        return self._active.get_finished(self._finished_request_ids)

    def finalize(self) -> None:
        """Nothing of this step writes KV any more."""
        self._advance(KVStepState.FINALIZED)
        self._active.wait_for_save()

    def end(self) -> None:
        """Forgets the step, complete or not."""
        if self.state is not KVStepState.IDLE:
            self._active.end_step()
            self.state = KVStepState.IDLE

    def shutdown(self) -> None:
        """No step will come any more."""
        self._connectors[True].shutdown()

    def _advance(self, state: KVStepState) -> None:
        assert _NEXT.get(self.state) is state, f"the connector's step goes from {self.state} to {state}"
        self.state = state

    def __enter__(self) -> KVStep:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end()
