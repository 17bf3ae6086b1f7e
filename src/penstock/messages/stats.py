"""Statistics of the engine core.

Objects created in every step are `msgspec.Struct`s: a frozen dataclass takes ten times as long to create.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from penstock.messages.kv_events import KVEvent
from penstock.messages.outputs import EngineOutput


class SpeculationStats(msgspec.Struct, frozen=True):
    """Counters: verifications, drafts verified, and accepted drafts by their position after the last token."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_per_position: tuple[int, ...] = ()

    @property
    def num_accepted_tokens(self) -> int:
        return sum(self.num_accepted_per_position)


class RemoteKVStats(msgspec.Struct, frozen=True):
    """Counters of loads from outside the engine: begun, incomplete, timed out; and loaded tokens."""

    num_loads: int = 0
    num_failed: int = 0
    num_timeouts: int = 0
    num_tokens: int = 0


class ExpertStats(msgspec.Struct, frozen=True):
    """`balancedness` is the mean load of the ranks in proportion to the highest one, as last measured; 1 is equal load.
    Counters of experts that were copied to a rank, and of copies that failed.
    """

    balancedness: float = 1.0
    num_moved: int = 0
    num_failed: int = 0


class StateCounts(msgspec.Struct, frozen=True):
    """States of recurrent layers: those that requests or transfers hold, and checkpoints that later requests may begin
    with. All others are free.
    """

    held: int = 0
    checkpoints: int = 0


class SchedulerStats(msgspec.Struct, frozen=True):
    """A snapshot of the scheduler; the counters only grow."""

    num_running: int
    num_waiting: int
    kv_cache_usage: float
    num_preemptions: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    speculation: SpeculationStats = SpeculationStats()
    num_waiting_for_remote_kv: int = 0
    remote_kv: RemoteKVStats = RemoteKVStats()
    connector: Mapping[str, float] = msgspec.field(default_factory=dict[str, float])
    num_graph_replays: int = 0
    experts: ExpertStats = ExpertStats()
    states: StateCounts = StateCounts()


class BlockMap(msgspec.Struct, frozen=True, tag=True):
    """A map of the block pool: letters in `cells`, each for the same number of consecutive blocks, and the number of
    blocks of each letter. A letter is the initial of free, cached, owned, loading, or pinned (with a pin and no
    owner); a cell of several blocks shows the busiest one.
    """

    cells: str
    counts: dict[str, int]


class ExpertLoads(msgspec.Struct, frozen=True):
    """The loads of the experts in one placement. `cells` has a string for every layer and in it a letter for every slot
    of the ranks, rank after rank: a is no load, i the layer's mean, z 25 eighths of it or more. `peaks` has for every
    layer the highest load of a rank in proportion to the mean.
    """

    cells: tuple[str, ...] = ()
    peaks: tuple[float, ...] = ()


class ExpertMap(msgspec.Struct, frozen=True, tag=True):
    """The loads of the last steps as they would be where the experts were at first, and where they are now; without
    layers if experts are not balanced.
    """

    layers: tuple[str, ...] = ()
    num_ranks: int = 1
    before: ExpertLoads = ExpertLoads()
    now: ExpertLoads = ExpertLoads()


class RequestEventKind(enum.StrEnum):
    SCHEDULED = "scheduled"
    PREEMPTED = "preempted"


@dataclass(frozen=True, slots=True)
class RequestEvent:
    """A request was added to the runner, or preempted. `time` is in seconds on the monotonic clock."""

    request_id: str
    kind: RequestEventKind
    time: float


class StepReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The result of one call of `EngineCore.step`: outputs and events of requests. `num_tokens` is how many tokens the
    processed step computed, 0 if there was nothing to process. `kv_events` are the KV events since the last report, if
    the engine reports them. `dp_rank` is the engine's among those of its core. `aborted` are requests that the core has
    just aborted: no later report mentions them.
    """

    outputs: tuple[EngineOutput, ...]
    events: tuple[RequestEvent, ...]
    num_tokens: int
    stats: SchedulerStats
    kv_events: tuple[KVEvent, ...] = ()
    dp_rank: int = 0
    aborted: tuple[str, ...] = ()
