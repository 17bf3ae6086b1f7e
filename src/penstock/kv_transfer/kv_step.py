"""One step of a rank's connector, from binding its metadata to dropping it: the only place that calls the hooks.

    IDLE -> BOUND -> FORWARD -> COLLECTED -> FINALIZED -> IDLE

Every rank runs every step through the two halves here, the production runner and a simulated rank alike. Results are
collected before the drafter runs and saves are finalised after it, so the saves that `wait_for_save` completes are
reported with the next step, with or without a drafter. The step ends on every path, including exceptions.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import TypeVar

from penstock.kv_transfer.connector import WorkerConnector
from penstock.kv_transfer.null import NullWorkerConnector
from penstock.messages.kv_transfer import KVConnectorMetadata, KVConnectorOutput
from penstock.messages.scheduler_output import SchedulerOutput
from penstock.utils.layer_hooks import NO_HOOKS, LayerHooks

_Result = TypeVar("_Result")


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
    """Drives one rank's connector. A warm-up step does not reach it; every other step does, whatever its plan."""

    def __init__(self, connector: WorkerConnector) -> None:
        self._connector = connector
        self._null = NullWorkerConnector()
        self._active: WorkerConnector = self._null
        self.state = KVStepState.IDLE
        self._metadata: KVConnectorMetadata | None = None
        self._finished_request_ids: frozenset[str] = frozenset()

    @property
    def hooks(self) -> LayerHooks:
        """Returns the hooks that this step's forward pass calls around its layers."""
        return self._active.layer_hooks or NO_HOOKS

    def run_forward(self, plan: SchedulerOutput, forward: Callable[[], _Result]) -> _Result:
        """Runs the first half. `forward` updates the rows and launches the target's forward pass, if there is one."""
        try:
            self._begin(plan)
            result = forward()
            self._on_forward_launched()
        except BaseException:
            self._end()
            raise
        return result

    def run_sampling(self, sample_and_draft: Callable[[], _Result]) -> tuple[_Result, KVConnectorOutput]:
        """Runs the second half, and returns also the transfers that had ended at its start.

        Nothing of the step writes KV after `sample_and_draft`.
        """
        try:
            self._advance(KVStepState.COLLECTED)
            finished = self._active.get_finished(self._finished_request_ids)
            result = sample_and_draft()
            self._advance(KVStepState.FINALIZED)
            self._active.wait_for_save()
        finally:
            self._end()
        return result, finished

    def shutdown(self) -> None:
        """Shuts down the connector; no step follows."""
        self._connector.shutdown()

    def _begin(self, plan: SchedulerOutput) -> None:
        """Starts a step before it writes anything; loads that its own tokens need have begun on return."""
        self._advance(KVStepState.BOUND)
        self._metadata = plan.kv_connector_metadata
        self._finished_request_ids = plan.finished_request_ids
        self._active = self._null if plan.is_warm_up else self._connector
        self._active.begin_step(self._metadata)
        if self._has_sync_loads:
            self._active.start_load_kv()

    def _on_forward_launched(self) -> None:
        """Starts asynchronous loads, which run in parallel with the forward pass."""
        self._advance(KVStepState.FORWARD)
        if not self._has_sync_loads:
            self._active.start_load_kv()

    @property
    def _has_sync_loads(self) -> bool:
        return self._metadata is not None and self._metadata.has_sync_loads

    def _end(self) -> None:
        """Ends the step, complete or not."""
        if self.state is not KVStepState.IDLE:
            self._active.end_step()
            self.state = KVStepState.IDLE

    def _advance(self, state: KVStepState) -> None:
        assert _NEXT.get(self.state) is state, f"the connector's step goes from {self.state} to {state}"
        self.state = state
