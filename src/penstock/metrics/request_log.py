"""The front end's records of requests: one each, kept while the request runs and for a short time after it.

Metrics, traces and the dashboard all read these records; times are stored nowhere else. Times are seconds on the
monotonic clock, which all processes of a machine share, so the engine core's and the front end's events are comparable.
"""

from __future__ import annotations

import enum
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from penstock.messages.outputs import FinishReason
from penstock.messages.stats import RequestEventKind, StepReport

# For a request that is preempted repeatedly, only the first phases are kept.
_MAX_PHASES = 64
_MAX_ENDED = 200


class Phase(enum.StrEnum):
    QUEUED = "queued"
    PREFILL = "prefill"
    DECODE = "decode"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(slots=True)
class RequestRecord:
    """One completion. `phases` are the phases that it has entered, with their times; `trace` is its caller's
    traceparent, `adapter` the name of its LoRA. With `is_pooled` its answer has no tokens, and was returned at its end.
    """

    request_id: str
    arrived: float
    num_prompt_tokens: int
    n: int = 1
    max_tokens: int | None = None
    trace: str | None = None
    adapter: str | None = None
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    is_pooled: bool = False
    finish_reason: str | None = None
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    ended: float | None = None
    phases: list[tuple[Phase, float]] = field(default_factory=list[tuple[Phase, float]])

    @property
    def phase(self) -> Phase:
        return Phase.FINISHED if self.ended is not None else self.phases[-1][0]

    @property
    def stands_for_request(self) -> bool:
        """True for exactly one of a request's n completions, whose ids are the request's with #0 to #n-1 appended."""
        return self.n == 1 or self.request_id.endswith("#0")

    def stages(self) -> dict[str, tuple[float, float]]:
        """Returns the start and end of an ended completion's stages (queue, prefill, decode). A preemption does not
        restart them.
        """
        assert self.ended is not None, f"{self.request_id} has not ended"
        stages = {"queue": (self.arrived, self.first_scheduled or self.ended)}
        if self.first_scheduled is not None:
            stages["prefill"] = (self.first_scheduled, self.first_token or self.ended)
        if self.first_token is not None and self.last_token is not None:
            stages["decode"] = (self.first_token, self.last_token)
        return stages

    def enter(self, phase: Phase, time: float) -> None:
        if len(self.phases) < _MAX_PHASES or phase is Phase.FINISHED:
            self.phases.append((phase, time))


class EngineObserver(Protocol):
    """Receives events; must be quick, because the front end's event loop waits for it, and must not raise."""

    def on_step(self, report: StepReport) -> None: ...

    def on_tokens(self, record: RequestRecord, num_tokens: int, seconds: float) -> None:
        """New tokens were generated, `seconds` after the previous ones or, for the first ones, after the arrival. The
        record's `num_output_tokens` already counts them.
        """
        ...

    def on_end(self, record: RequestRecord) -> None: ...


class RequestLog:
    """Updates the records and notifies the observers."""

    def __init__(self, observers: Sequence[EngineObserver]) -> None:
        self._observers = observers
        self._running: dict[str, RequestRecord] = {}
        self._ended: deque[RequestRecord] = deque(maxlen=_MAX_ENDED)

    def __len__(self) -> int:
        """The number of requests that have not ended."""
        return len(self._running)

    def num_by_phase(self) -> Counter[Phase]:
        """Returns the number of running requests in each phase."""
        return Counter(record.phase for record in self._running.values())

    def adapters(self) -> tuple[list[str], list[str]]:
        """Returns the names of the adapters that requests run with, and of those that others wait with, sorted."""
        running, waiting = set[str](), set[str]()
        for record in self._running.values():
            if record.adapter is not None:
                (running if record.phase in (Phase.PREFILL, Phase.DECODE) else waiting).add(record.adapter)
        return sorted(running), sorted(waiting)

    def recent(self) -> list[RequestRecord]:
        """Returns all records: recently ended requests in order of their end, then running ones in order of arrival."""
        return [*self._ended, *self._running.values()]

    def add(self, record: RequestRecord) -> None:
        record.enter(Phase.QUEUED, record.arrived)
        self._running[record.request_id] = record

    def on_report(self, report: StepReport, now: float) -> None:
        """Applies one step; ends are reported separately, because a stop string may end a request before the engine
        does.
        """
        for event in report.events:
            record = self._running.get(event.request_id)
            if record is None:
                continue
            if event.kind is RequestEventKind.PREEMPTED:
                record.num_preemptions += 1
                record.enter(Phase.PREEMPTED, event.time)
            else:
                record.first_scheduled = record.first_scheduled or event.time
                record.enter(Phase.PREFILL, event.time)
        for output in report.outputs:
            record = self._running.get(output.request_id)
            if record is not None and output.new_token_ids:
                record.num_cached_tokens = output.num_cached_tokens
                self._on_tokens(record, len(output.new_token_ids), now)
            elif record is not None and output.pooled is not None:
                record.num_cached_tokens = output.num_cached_tokens
                record.is_pooled = True
        for observer in self._observers:
            observer.on_step(report)

    def _on_tokens(self, record: RequestRecord, num_tokens: int, now: float) -> None:
        if record.phases[-1][0] is not Phase.DECODE:
            record.enter(Phase.DECODE, now)
        seconds = now - (record.arrived if record.last_token is None else record.last_token)
        record.first_token = record.first_token or now
        record.last_token = now
        record.num_output_tokens += num_tokens
        for observer in self._observers:
            observer.on_tokens(record, num_tokens, seconds)

    def end(self, request_ids: Iterable[str], reason: str, now: float) -> None:
        """Records that these requests have ended for this reason; ignores unknown ones."""
        for request_id in request_ids:
            record = self._running.pop(request_id, None)
            if record is None:
                continue
            record.finish_reason = FinishReason(reason).value
            record.ended = now
            record.enter(Phase.FINISHED, now)
            self._ended.append(record)
            for observer in self._observers:
                observer.on_end(record)
