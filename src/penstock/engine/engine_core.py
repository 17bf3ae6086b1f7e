"""The engine core: schedule, execute, apply. Synchronous and overlapped steps use the same code; only the depth
differs. Engines that share experts make all steps together (`step_together`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

from msgspec.structs import replace

from penstock.core.scheduler import Scheduler
from penstock.engine.kv_events import EventPublisher, NullEventPublisher
from penstock.executor.executor import Executor, Pending, unite_experts
from penstock.messages.kv_events import KVEvent
from penstock.messages.outputs import EngineOutput
from penstock.messages.requests import EngineRequest
from penstock.messages.runner_output import ModelRunnerOutput
from penstock.messages.scheduler_output import GrammarOutput, SchedulerOutput
from penstock.messages.stats import BlockMap, ExpertMap, RequestEvent, RequestEventKind, SchedulerStats, StepReport
from penstock.utils.clock import Clock, SystemClock
from penstock.utils.errors import EngineDeadError

# How long a step without work waits for a grammar that is being compiled, or for KV in transfer.
_GRAMMAR_SECONDS = 0.05
_TRANSFER_SECONDS = 0.005
# The same if all requests wait for other engines. Several connectors are waited for one after the other.
_IDLE_SECONDS = 0.05
_FLUSH_SECONDS = 10.0

_Processed = tuple[int, list[EngineOutput]]
"""A step's processed result: how many tokens it computed, and the requests' outputs."""


class EngineCore:
    """Owns the scheduler and the steps in flight, at most `max_num_in_flight`. One thread calls it."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        max_num_in_flight: int,
        publisher: EventPublisher | None = None,
        debug: bool = False,
        reports_kv_events: bool = False,
        clock: Clock = SystemClock(),  # noqa: B008 - it has no state
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._max_num_in_flight = max_num_in_flight
        self._publisher = publisher or NullEventPublisher()
        self._debug = debug
        self._reports_kv_events = reports_kv_events
        self._unreported_kv_events: tuple[KVEvent, ...] = ()
        self._failure: Exception | None = None
        self._in_flight: deque[tuple[SchedulerOutput, Pending[ModelRunnerOutput]]] = deque()
        self._clock = clock
        self._events: list[RequestEvent] = []

    def add_request(self, request: EngineRequest) -> None:
        """Queues a request. Raises RequestError or OverloadedError if it is refused, RequestFailedError if the engine
        fails on it, EngineDeadError if the engine is dead.
        """
        self.check_alive()
        self._scheduler.add_request(request)

    def abort_requests(self, request_ids: Iterable[str]) -> list[EngineOutput]:
        """Ends requests at once; their results in flight are dropped."""
        return self._scheduler.abort_requests(request_ids)

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do; False for a dead engine."""
        return self._failure is None and bool(self._in_flight or self._scheduler.has_unfinished_requests)

    @property
    def patience(self) -> float | None:
        """How many seconds `step` has nothing to do unless the connector calls its waker: 0 if a step can do something
        at once, None if there is no request either, or the engine is dead.
        """
        if self._failure is not None:
            return None
        return 0.0 if self._in_flight else self._scheduler.seconds_until_due(self._clock.now())

    @property
    def num_in_flight(self) -> int:
        """Launched steps whose results have not been applied."""
        return len(self._in_flight)

    @property
    def has_rows_to_free(self) -> bool:
        """Whether the worker must still be notified of ended requests."""
        return self._failure is None and self._scheduler.has_rows_to_free

    @property
    def has_transfers(self) -> bool:
        """Whether KV transfers need steps, with or without requests."""
        return self._failure is None and self._scheduler.has_transfers

    @property
    def num_blocks(self) -> int:
        """KV blocks available to requests."""
        return self._scheduler.pool.num_usable

    def stats(self) -> SchedulerStats:
        return self._scheduler.stats()

    def reset_prefix_cache(self, reset_connector: bool = False) -> bool:
        """Clears the prefix cache and, if requested, the KV connector's storage outside the engine. Returns False while
        requests run, or if the connector's storage was requested and cannot be cleared; the prefix cache is cleared
        even then.
        """
        is_reset = self._scheduler.reset_prefix_cache(reset_connector)
        self._publish_kv_events()
        return is_reset

    def forget_adapter(self, digest: bytes) -> bool:
        """Called when an adapter has been unloaded. Returns False if it may still be read: ask again later."""
        loads = (load for plan, _ in self._in_flight for load in plan.adapter_loads)
        return all(load.adapter.digest != digest for load in loads) and self._scheduler.adapters.forget(digest)

    def block_map(self, max_cells: int) -> BlockMap:
        """The block pool as at most `max_cells` letters (`BlockPool.map`)."""
        return self._scheduler.pool.map(max_cells)

    def expert_map(self) -> ExpertMap:
        """The loads of the experts that are balanced."""
        return self._scheduler.experts.map()

    def step(self, *, waits: bool = True) -> StepReport:
        """Launches steps up to the depth, then waits for the oldest and applies its result.

        If all requests wait for KV of other engines, it returns when some has arrived, or after a while; without
        `waits` at once, for a caller that sleeps for `patience` and also has other events to wait for.

        Raises EngineDeadError, now and from then on, if a worker or the scheduler fails.
        """
        (report,) = step_together([self], waits)
        return report

    def check_alive(self) -> None:
        """Raises EngineDeadError if the engine is dead."""
        if self._failure is not None:
            raise EngineDeadError(f"the engine has stopped: {self._failure}") from self._failure

    def fail(self, error: Exception) -> None:
        """Marks the engine as dead."""
        # Keep the steps in flight: torch aborts the process when memory that a failed GPU was to write is freed.
        self._failure = error

    # ---- The parts of a step ----

    @property
    def has_place(self) -> bool:
        """Whether another step may be in flight."""
        return len(self._in_flight) < self._max_num_in_flight

    def plan(self, must: bool = False) -> SchedulerOutput | None:
        """Plans a step, if there is anything to do or if it `must`."""
        if not must and not self._scheduler.needs_step:
            return None
        plan = self._scheduler.schedule(must)
        if plan is not None:
            self._note_events(plan)
        return plan

    def launch(self, plan: SchedulerOutput, dp_rank: int) -> None:
        """Launches the forward pass. `dp_rank` is this engine among those of the executor."""
        self._executor.execute_model(plan, dp_rank)

    def grammar_masks(self, plan: SchedulerOutput) -> GrammarOutput | None:
        """Returns what the step's requests may sample, when the results of steps up to `barrier_step` are applied."""
        return self._scheduler.grammar_masks(plan)

    def finish_launch(self, plan: SchedulerOutput, masks: GrammarOutput | None, dp_rank: int) -> None:
        """Launches the rest of the step."""
        self._in_flight.append((plan, self._executor.sample_tokens(masks, dp_rank)))

    def is_in_flight(self, step: int) -> bool:
        """Whether the oldest step in flight is this one or an earlier one."""
        return bool(self._in_flight) and self._in_flight[0][0].step <= step

    def take_oldest(self) -> tuple[SchedulerOutput, ModelRunnerOutput]:
        """Waits for the result of the oldest step in flight."""
        plan, future = self._in_flight.popleft()
        return plan, future.result()

    def apply(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> _Processed:
        """Applies the result of a step."""
        return plan.total_num_scheduled_tokens, self._scheduler.update_from_output(plan, result)

    def end_step(self) -> None:
        """Called when results have been applied."""
        self._publish_kv_events()
        if self._debug:
            self.check_integrity()

    def _publish_kv_events(self) -> None:
        events = self._scheduler.take_kv_events()
        if events:
            self._publisher.publish(events)
            if self._reports_kv_events:
                self._unreported_kv_events += events

    def wait(self, waits: bool) -> None:
        """Called if nothing could run: leaves the processor to the work that the requests wait for."""
        if not self._in_flight and self._scheduler.needs_step and (waits or self.patience == 0):
            self._scheduler.wait(_GRAMMAR_SECONDS, min(self.patience or _TRANSFER_SECONDS, _IDLE_SECONDS))

    def make_report(self, processed: list[_Processed], dp_rank: int) -> StepReport:
        """Returns the report of the steps whose results have been applied."""
        num_tokens = sum(count for count, _ in processed)
        events, self._events = tuple(self._events), []
        outputs = tuple(chain.from_iterable(outputs for _, outputs in processed))
        return self._report(outputs, events, num_tokens, dp_rank)

    def report(self, dp_rank: int = 0) -> StepReport:
        """What there is to tell when no step follows."""
        return self._report((), (), 0, dp_rank)

    def _report(
        self, outputs: tuple[EngineOutput, ...], events: tuple[RequestEvent, ...], num_tokens: int, dp_rank: int
    ) -> StepReport:
        kv_events, self._unreported_kv_events = self._unreported_kv_events, ()
        return StepReport(
            outputs=outputs,
            events=events,
            num_tokens=num_tokens,
            stats=self._scheduler.stats(),
            kv_events=kv_events,
            dp_rank=dp_rank,
        )

    def _note_events(self, plan: SchedulerOutput) -> None:
        now = self._clock.now()
        for request_id in sorted(plan.preempted_request_ids):
            self._events.append(RequestEvent(request_id, RequestEventKind.PREEMPTED, now))
        for new in plan.new_requests:
            self._events.append(RequestEvent(new.request_id, RequestEventKind.SCHEDULED, now))

    def check_integrity(self) -> None:
        """Raises AssertionError if the scheduler's derived state is inconsistent in itself or with the steps in
        flight.
        """
        steps = [plan.step for plan, _ in self._in_flight]
        assert self._scheduler.steps_in_flight == steps, (self._scheduler.steps_in_flight, steps)
        self._scheduler.check_integrity()

    def shutdown(self) -> None:
        """Waits for steps and KV transfers in flight, and frees the worker; the engine is dead afterwards.

        Idempotent. Raises EngineDeadError if a step fails meanwhile; the worker is freed even then.
        """
        shut_down([self])

    def close(self) -> None:
        """Frees the worker; the engine is dead afterwards. Idempotent."""
        if self._failure is None:
            self._failure = EngineDeadError("it was shut down")
            self._in_flight.clear()
        self._executor.shutdown()
        self._scheduler.shutdown()
        self._publisher.shutdown()

    @property
    def has_requests(self) -> bool:
        return self._scheduler.has_unfinished_requests

    def now(self) -> float:
        """The time on the engine's clock, in seconds."""
        return self._clock.now()


@contextmanager
def failing(cores: Sequence[EngineCore]) -> Iterator[None]:
    """Marks the engines as dead if the body raises an exception. Raises EngineDeadError if they are dead already."""
    for core in cores:
        core.check_alive()
    try:
        yield
    except Exception as error:
        for core in cores:
            core.fail(error)
        what = str(error) if isinstance(error, EngineDeadError) else f"{type(error).__name__}: {error}"
        raise EngineDeadError(f"the engine core failed: {what}") from error


def step_together(cores: Sequence[EngineCore], waits: bool) -> list[StepReport]:
    """Makes a step on every engine of an executor, as `EngineCore.step` describes; returns their reports.

    `cores` are in the order of their data parallel ranks.

    Each engine launches every step, without tokens if it has none, and a step's result is awaited when all have
    launched it. All are dead if one fails.
    """
    with failing(cores):
        processed: list[list[_Processed]] = [[] for _ in cores]
        while all(core.has_place for core in cores) and (plans := _plan_together(cores)):
            for rank, plan in enumerate(plans):
                cores[rank].launch(plan, rank)
            barrier = max(plan.barrier_step for plan in plans)
            while cores[0].is_in_flight(barrier):
                # The forward pass runs concurrently.
                _process_oldest(cores, processed)
            # All masks first: an engine that fails here must not leave others waiting in the step.
            masks = [core.grammar_masks(plan) for core, plan in zip(cores, plans, strict=True)]
            for rank, plan in enumerate(plans):
                cores[rank].finish_launch(plan, masks[rank], rank)
            if all(plan.is_empty for plan in plans) or processed[0]:
                break
        if cores[0].num_in_flight and not processed[0]:
            _process_oldest(cores, processed)
        for core in cores:
            core.end_step()
        if not any(count for of_core in processed for count, _ in of_core):
            for core in cores:
                core.wait(waits)
        return [core.make_report(processed[rank], rank) for rank, core in enumerate(cores)]


def shut_down(cores: Sequence[EngineCore]) -> None:
    """Executes steps until no KV transfer is in flight, unless there are requests or the engines are dead; then frees
    the workers, even if a step fails. The steps have a time limit: KV that does not reach a tier can be recomputed.
    """
    deadline = cores[0].now() + _FLUSH_SECONDS
    try:
        while not any(core.has_requests for core in cores) and any(core.has_transfers for core in cores):
            if cores[0].now() >= deadline:
                break
            step_together(cores, waits=True)
    finally:
        for core in cores:
            core.close()


def _plan_together(cores: Sequence[EngineCore]) -> list[SchedulerOutput]:
    """Returns the engines' plans for the next step; none if no engine can do anything."""
    found = [core.plan() for core in cores]
    if all(plan is None for plan in found):
        return []
    plans = [plan or core.plan(must=True) for core, plan in zip(cores, found, strict=True)]
    made = [plan for plan in plans if plan is not None]
    if len(cores) == 1:
        return made
    assert len({plan.step for plan in made}) == 1 and len(made) == len(cores), [plan.step for plan in made]
    # The first engine's scheduler balances the experts of all.
    shared = {"rows_by_engine": tuple(plan.row_counts for plan in made), "expert_orders": made[0].expert_orders}
    return [replace(plan, **shared) for plan in made]


def _process_oldest(cores: Sequence[EngineCore], processed: list[list[_Processed]]) -> None:
    """Waits for the oldest step on all engines and applies its results."""
    steps = [core.take_oldest() for core in cores]
    if len(cores) > 1:
        plan, result = steps[0]
        experts = unite_experts([result.experts for _, result in steps])
        steps[0] = plan, replace(result, experts=experts)
    for core, step, of_core in zip(cores, steps, processed, strict=True):
        of_core.append(core.apply(*step))
