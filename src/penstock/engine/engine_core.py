"""The engine core: schedule, execute, apply. Synchronous and overlapped steps use the same code; only the depth
differs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain

from penstock.core.scheduler import Scheduler
from penstock.engine.kv_events import EventPublisher, NullEventPublisher
from penstock.executor.executor import Executor, Pending
from penstock.messages.kv_events import KVEvent
from penstock.messages.outputs import EngineOutput
from penstock.messages.requests import EngineRequest
from penstock.messages.runner_output import ModelRunnerOutput
from penstock.messages.scheduler_output import SchedulerOutput
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
        if self._failure is not None:
            raise EngineDeadError(f"the engine has stopped: {self._failure}") from self._failure
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
        return self._scheduler.num_blocks

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

    def block_map(self, max_cells: int) -> BlockMap:
        """The block pool as at most `max_cells` letters (`BlockPool.map`)."""
        return self._scheduler.block_map(max_cells)

    def expert_map(self) -> ExpertMap:
        """The loads of the experts that are balanced."""
        return self._scheduler.experts.map()

    def step(self, *, waits: bool = True) -> StepReport:
        """Launches steps up to the depth, then waits for the oldest and applies its result.

        If all requests wait for KV of other engines, it returns when some has arrived, or after a while; without
        `waits` at once, for a caller that sleeps for `patience` and also has other events to wait for.

        Raises EngineDeadError, now and from then on, if a worker or the scheduler fails.
        """
        if self._failure is not None:
            raise EngineDeadError(f"the engine has stopped: {self._failure}") from self._failure
        with self._failing():
            return self._step(waits)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Marks the engine as dead if the body raises an exception."""
        try:
            yield
        except Exception as error:
            # Keep the steps in flight: torch aborts the process when memory that a failed GPU was to write is freed.
            self._failure = error
            what = str(error) if isinstance(error, EngineDeadError) else f"{type(error).__name__}: {error}"
            raise EngineDeadError(f"the engine core failed: {what}") from error

    def _step(self, waits: bool) -> StepReport:
        processed: list[_Processed] = []
        while len(self._in_flight) < self._max_num_in_flight and self._scheduler.needs_step:
            plan = self._scheduler.schedule()
            if plan is None:
                break
            self._note_events(plan)
            self._executor.execute_model(plan)
            while self._in_flight and self._in_flight[0][0].step <= plan.barrier_step:
                # The forward pass runs concurrently.
                processed.append(self._process_oldest())
            self._in_flight.append((plan, self._executor.sample_tokens(self._scheduler.grammar_masks(plan))))
            if plan.is_empty or processed:
                break
        if self._in_flight and not processed:
            processed.append(self._process_oldest())
        self._publish_kv_events()
        if self._debug:
            self.check_integrity()
        return self._make_report(processed, waits)

    def _process_oldest(self) -> _Processed:
        """Waits for the oldest step in flight and applies its result."""
        plan, future = self._in_flight.popleft()
        outputs = self._scheduler.update_from_output(plan, future.result())
        return plan.total_num_scheduled_tokens, outputs

    def _publish_kv_events(self) -> None:
        events = self._scheduler.take_kv_events()
        if events:
            self._publisher.publish(events)
            if self._reports_kv_events:
                self._unreported_kv_events += events

    def _make_report(self, processed: list[_Processed], waits: bool) -> StepReport:
        num_tokens = sum(count for count, _ in processed)
        if not num_tokens and not self._in_flight and self._scheduler.needs_step and (waits or self.patience == 0):
            # Nothing could run: leave the processor to the work that the requests wait for.
            self._scheduler.wait(_GRAMMAR_SECONDS, min(self.patience or _TRANSFER_SECONDS, _IDLE_SECONDS))
        events, self._events = tuple(self._events), []
        outputs = tuple(chain.from_iterable(outputs for _, outputs in processed))
        return self._report(outputs, events, num_tokens)

    def report(self) -> StepReport:
        """What there is to tell when no step follows."""
        return self._report((), (), 0)

    def _report(
        self, outputs: tuple[EngineOutput, ...], events: tuple[RequestEvent, ...], num_tokens: int
    ) -> StepReport:
        kv_events, self._unreported_kv_events = self._unreported_kv_events, ()
        return StepReport(
            outputs=outputs, events=events, num_tokens=num_tokens, stats=self._scheduler.stats(), kv_events=kv_events
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

    def watch_workers(self, on_death: Callable[[], None]) -> None:
        """Registers `on_death`, called from another thread when a worker dies; `check_workers` then raises the
        reason.
        """
        self._executor.watch(on_death)

    def check_workers(self) -> None:
        """Raises EngineDeadError, now and from then on, if a worker is dead."""
        with self._failing():
            self._executor.check()

    def kill_workers(self) -> None:
        """Kills the workers' processes. May be called from any thread; the engine is dead afterwards."""
        self._executor.kill()

    def shutdown(self) -> None:
        """Waits for steps and KV transfers in flight, and frees the worker; the engine is dead afterwards.

        Idempotent.
        """
        if self._failure is None and not self._scheduler.has_unfinished_requests:
            self._flush_transfers()
        if self._failure is None:
            self._failure = EngineDeadError("it was shut down")
            self._in_flight.clear()
        self._executor.shutdown()
        self._scheduler.shutdown()
        self._publisher.shutdown()

    def _flush_transfers(self) -> None:
        """Executes steps until no KV transfer is in flight, with a time limit: KV that does not reach a tier can be
        recomputed.
        """
        deadline = self._clock.now() + _FLUSH_SECONDS
        while self.has_transfers and self._clock.now() < deadline:
            self.step()
