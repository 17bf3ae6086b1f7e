"""What the engine core tells of itself beside its outputs."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from penstock.messages.outputs import EngineOutput


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """What the scheduler looks like at this moment; the counters only grow."""

    num_running: int
    num_waiting: int
    kv_cache_usage: float
    num_preemptions: int
    prefix_cache_queries: int
    prefix_cache_hits: int


class RequestEventKind(enum.StrEnum):
    SCHEDULED = "scheduled"
    PREEMPTED = "preempted"


@dataclass(frozen=True, slots=True)
class RequestEvent:
    """A request entered the runner, or lost its place in it. `time` is in seconds on the monotonic clock."""

    request_id: str
    kind: RequestEventKind
    time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One call of `EngineCore.step`: what the requests got, and what happened to them on the way.

    `num_tokens` is how many tokens the processed step computed, 0 when there was nothing to process.
    """

    outputs: tuple[EngineOutput, ...]
    events: tuple[RequestEvent, ...]
    num_tokens: int
    stats: SchedulerStats
