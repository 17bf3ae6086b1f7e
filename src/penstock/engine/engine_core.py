"""The heart: schedule, execute, apply. Synchronous and overlapped steps run the same lines; only the depth differs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain

from penstock.core.scheduler import Scheduler
from penstock.executor.executor import Executor, Pending
from penstock.kv_transfer.events import EventPublisher, NullEventPublisher
from penstock.messages.outputs import EngineOutput
from penstock.messages.requests import EngineRequest
from penstock.messages.runner_output import ModelRunnerOutput
from penstock.messages.scheduler_output import SchedulerOutput
from penstock.messages.stats import BlockMap, RequestEvent, RequestEventKind, SchedulerStats, StepReport
from penstock.utils.clock import Clock, SystemClock
from penstock.utils.errors import EngineDeadError

# How long a step without work waits for a grammar that is being compiled, or for KV that is on its way.
_GRAMMAR_SECONDS = 0.05
_TRANSFER_SECONDS = 0.005
_FLUSH_SECONDS = 10.0

_Processed = tuple[int, list[EngineOutput]]
"""A step's result, applied: how many tokens it computed, and what the requests got."""


class EngineCore:
    """Owns the scheduler and the steps in flight, at most `max_num_in_flight`. One thread drives it."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        max_num_in_flight: int,
        publisher: EventPublisher | None = None,
        debug: bool = False,
        clock: Clock = SystemClock(),  # noqa: B008 - it has no state
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._max_num_in_flight = max_num_in_flight
        self._publisher = publisher or NullEventPublisher()
        self._debug = debug
        self._failure: Exception | None = None
        self._in_flight: deque[tuple[SchedulerOutput, Pending[ModelRunnerOutput]]] = deque()
        self._clock = clock
        self._events: list[RequestEvent] = []

    def add_request(self, request: EngineRequest) -> None:
        """Queues a request. Raises RequestError or OverloadedError when it is refused, EngineDeadError when all are."""
        if self._failure is not None:
            raise EngineDeadError(f"the engine has stopped: {self._failure}") from self._failure
        self._scheduler.add_request(request)

    def abort_requests(self, request_ids: Iterable[str]) -> list[EngineOutput]:
        """Ends requests at once; what is in flight for them is dropped."""
        return self._scheduler.abort_requests(request_ids)

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do; a dead engine has not."""
        return self._failure is None and bool(self._in_flight or self._scheduler.has_unfinished_requests)

    @property
    def num_in_flight(self) -> int:
        """Steps that were launched and whose results have not been applied."""
        return len(self._in_flight)

    @property
    def has_rows_to_free(self) -> bool:
        """Whether the worker has still to be told of requests that have ended."""
        return self._failure is None and self._scheduler.has_rows_to_free

    @property
    def has_transfers(self) -> bool:
        """Whether KV is on its way that needs steps, with requests or without."""
        return self._failure is None and self._scheduler.has_transfers

    @property
    def num_blocks(self) -> int:
        """KV blocks that requests can have."""
        return self._scheduler.num_blocks

    def stats(self) -> SchedulerStats:
        return self._scheduler.stats()

    def reset_prefix_cache(self, reset_connector: bool = False) -> bool:
        """Forgets all cached prefixes, and what the KV connector keeps outside the engine if that is wanted too.

        False while requests run, and when there is no connector that can forget although that is wanted; the engine's
        own prefixes are forgotten even then.
        """
        is_reset = self._scheduler.reset_prefix_cache(reset_connector)
        self._publish_kv_events()
        return is_reset

    def block_map(self, max_cells: int) -> BlockMap:
        """The block pool as at most `max_cells` letters (`BlockPool.map`)."""
        return self._scheduler.block_map(max_cells)

    def step(self) -> StepReport:
        """Launches steps up to the depth, then waits for the oldest and applies its result.

        Raises EngineDeadError, now and from then on, when a worker or the scheduler fails.
        """
        if self._failure is not None:
            raise EngineDeadError(f"the engine has stopped: {self._failure}") from self._failure
        with self._failing():
            return self._step()

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """An exception inside is the end of the engine."""
        try:
            yield
        except Exception as error:
            # What is in flight stays: where memory is freed that a broken GPU was to write, torch aborts the process.
            self._failure = error
            what = str(error) if isinstance(error, EngineDeadError) else f"{type(error).__name__}: {error}"
            raise EngineDeadError(f"the engine core failed: {what}") from error

    def _step(self) -> StepReport:
        processed: list[_Processed] = []
        while len(self._in_flight) < self._max_num_in_flight and self._scheduler.needs_step:
            plan = self._scheduler.schedule()
            if plan is None:
                break
            self._note_events(plan)
            self._executor.execute_model(plan)
            while self._in_flight and self._in_flight[0][0].step <= plan.barrier_step:
                # The forward pass runs meanwhile.
                processed.append(self._process_oldest())
            self._in_flight.append((plan, self._executor.sample_tokens(self._scheduler.grammar_masks(plan))))
            if plan.is_empty or processed:
                break
        if self._in_flight and not processed:
            processed.append(self._process_oldest())
        self._publish_kv_events()
        if self._debug:
            self.check_integrity()
        return self._make_report(processed)

    def _process_oldest(self) -> _Processed:
        """Waits for the oldest step in flight and applies its result."""
        plan, future = self._in_flight.popleft()
        outputs = self._scheduler.update_from_output(plan, future.result())
        return plan.total_num_scheduled_tokens, outputs

    def _publish_kv_events(self) -> None:
        events = self._scheduler.take_kv_events()
        if events:
            self._publisher.publish(events)

    def _make_report(self, processed: list[_Processed]) -> StepReport:
        num_tokens = sum(count for count, _ in processed)
        if not num_tokens and not self._in_flight:
            # Nothing could run: what the requests wait for needs the processor more.
            self._scheduler.wait(_GRAMMAR_SECONDS, _TRANSFER_SECONDS)
        events, self._events = tuple(self._events), []
        outputs = tuple(chain.from_iterable(outputs for _, outputs in processed))
        return StepReport(outputs=outputs, events=events, num_tokens=num_tokens, stats=self._scheduler.stats())

    def _note_events(self, plan: SchedulerOutput) -> None:
        now = self._clock.now()
        for request_id in sorted(plan.preempted_request_ids):
            self._events.append(RequestEvent(request_id, RequestEventKind.PREEMPTED, now))
        for new in plan.new_requests:
            self._events.append(RequestEvent(new.request_id, RequestEventKind.SCHEDULED, now))

    def check_integrity(self) -> None:
        """AssertionError when the scheduler's derived state does not agree with itself or with the steps in flight."""
        steps = [plan.step for plan, _ in self._in_flight]
        assert self._scheduler.steps_in_flight == steps, (self._scheduler.steps_in_flight, steps)
        self._scheduler.check_integrity()

    def watch_workers(self, on_death: Callable[[], None]) -> None:
        """Has `on_death` called, from another thread, when a worker dies; `check_workers` then says why."""
        self._executor.watch(on_death)

    def check_workers(self) -> None:
        """Raises EngineDeadError, now and from then on, if a worker is dead."""
        with self._failing():
            self._executor.check()

    def kill_workers(self) -> None:
        """Ends their processes at once. From any thread; the engine is dead afterwards."""
        self._executor.kill()

    def shutdown(self) -> None:
        """Waits for the steps in flight and for KV on its way, and frees the worker; the engine is dead afterwards.

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
        """Steps until no KV is on its way, or too long: what a tier does not get is computed again some day."""
        deadline = self._clock.now() + _FLUSH_SECONDS
        while self.has_transfers and self._clock.now() < deadline:
            self.step()
