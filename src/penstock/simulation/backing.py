"""Backings: the part of a world that outlives its engines and builds the two parts of their connectors."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from penstock.kv_transfer.connector import SchedulerConnector, WorkerConnector
from penstock.kv_transfer.null import NullSchedulerConnector, NullWorkerConnector
from penstock.messages.kv_cache_spec import KVCacheConfig
from penstock.messages.kv_transfer import ShardId
from penstock.simulation.memory_transport import Fault, FaultKind
from penstock.simulation.ranks import RankConfig
from penstock.simulation.setup import Setup
from penstock.utils.clock import ManualClock


@dataclass(frozen=True, slots=True)
class Site:
    """One life of one engine. `cache` is the whole engine's; its ranks have parts of it."""

    name: str
    life: int
    cache: KVCacheConfig
    ranks: RankConfig


@dataclass(frozen=True, slots=True)
class Parts:
    """A connector for one life of one engine, with a worker part for each of its ranks; or none, and null parts."""

    scheduler: SchedulerConnector
    workers: Mapping[ShardId, WorkerConnector]
    is_null: bool = False


@dataclass(frozen=True, slots=True)
class Touch:
    """A block that a transfer in progress may read or write at any moment."""

    block_id: int
    writes: bool


class Backing:
    """Engines without a connector. Also the base of backings that do not need every method."""

    def attach(self, site: Site) -> Parts:
        """A new life of an engine begins; the previous one has crashed."""
        workers = {shard: NullWorkerConnector() for shard in site.ranks.shards}
        return Parts(NullSchedulerConnector(), workers, is_null=True)

    def crash(self, name: str) -> None:
        """The engine of that name has died, with everything in progress."""

    def restart(self) -> None:
        """The backing dies and restarts empty."""

    def tick(self) -> None:
        """Called after time has advanced."""

    def touching(self, name: str) -> Iterable[Touch]:
        """Returns the blocks of that engine's memory that transfers may access from now on."""
        return ()

    def check(self, contents: Callable[[int, bytes, str, int], bytes | None]) -> None:
        """Checks the invariants. `contents(group, block hash, layer, head)` returns the expected content of a block,
        None for a hash that no request has.
        """

    def is_stopped(self, name: str) -> bool:
        """Whether the engine's process is currently stopped."""
        return False

    def has_news(self, name: str) -> bool:
        """Whether an engine without requests has a reason to execute a step."""
        return True

    @property
    def is_settled(self) -> bool:
        """Whether nothing is open that will end by itself."""
        return True

    def counters(self) -> Mapping[str, float]:
        """Returns counts of events."""
        return {}

    def check_idle(self) -> None:
        """Checks that nothing remains when there are no requests."""


class BackingContext:
    """The part of a world that a backing may use: the clock, and the fault of each transfer."""

    def __init__(self, setup: Setup, clock: ManualClock, rng: random.Random) -> None:
        self.setup = setup
        self.clock = clock
        self.has_faults = True
        self._rng = rng

    def fault_of(self) -> Fault:
        """Draws the fault of a transfer."""
        rng, faults = self._rng, self.setup.faults
        delay = rng.uniform(0.0, faults.max_delay if rng.random() < faults.slow else 0.004)
        kind = FaultKind.NONE
        if self.has_faults:
            kinds = (
                FaultKind.DROP,
                FaultKind.LOST_COMPLETION,
                FaultKind.DIE,
                FaultKind.DIE_UNSETTLED,
                FaultKind.CORRUPT,
            )
            weights = (faults.drop, faults.lost_completion, faults.die, faults.die_unsettled, faults.corrupt)
            kind = rng.choices((FaultKind.NONE, *kinds), (1 - sum(weights), *weights))[0]
        return Fault(kind, delay, rng.random(), rng.uniform(0.0, 0.5))

    def is_struck(self) -> bool:
        """Whether a byte of memory is corrupted in this tick."""
        return self.has_faults and self._rng.random() < self.setup.faults.corrupt / 4

    def is_repeated(self) -> bool:
        """Whether the end of a backing's job is reported twice."""
        rate = self.setup.faults.repeated
        return rate > 0 and self.has_faults and self._rng.random() < rate

    def pick(self, count: int) -> int:
        """Draws a number below `count`."""
        return self._rng.randrange(count)
