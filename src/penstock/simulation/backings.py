"""Backings by name: to add a connector to the simulation, add an entry here."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from penstock.kv_transfer.multi import MultiScheduler, MultiWorker
from penstock.simulation.backing import Backing, BackingContext, Parts, Site, StoreBacking, Touch
from penstock.simulation.p2p import P2PBacking
from penstock.simulation.store import StagelessStoreScheduler
from penstock.simulation.tiers import OffloadBacking


class SeveralBackings(Backing):
    """Separate tiers and the shared store for every engine, combined by the real `MultiConnector`'s parts."""

    def __init__(self, context: BackingContext) -> None:
        self._children: dict[str, Backing] = {"tiers": OffloadBacking(context), "store": StoreBacking(context)}

    def attach(self, site: Site) -> Parts:
        parts = {name: child.attach(site) for name, child in self._children.items()}
        workers = {
            shard: MultiWorker({name: each.workers[shard] for name, each in parts.items()})
            for shard in site.ranks.shards
        }
        return Parts(MultiScheduler({name: each.scheduler for name, each in parts.items()}), workers)

    def crash(self, name: str) -> None:
        for child in self._children.values():
            child.crash(name)

    def restart(self) -> None:
        for child in self._children.values():
            child.restart()

    def tick(self) -> None:
        for child in self._children.values():
            child.tick()

    def touching(self, name: str) -> Iterable[Touch]:
        return (touch for child in self._children.values() for touch in child.touching(name))

    def check(self, contents: Callable[[int, bytes, str, int], bytes | None]) -> None:
        for child in self._children.values():
            child.check(contents)

    def check_idle(self) -> None:
        for child in self._children.values():
            child.check_idle()


BACKINGS: dict[str, Callable[[BackingContext], Backing]] = {
    "none": lambda context: Backing(),
    "store": StoreBacking,
    "stageless_store": lambda context: StoreBacking(context, StagelessStoreScheduler),
    "tiers": OffloadBacking,
    "several": SeveralBackings,
    "p2p": P2PBacking,
}
