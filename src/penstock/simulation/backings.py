"""Backings by name: to add a connector to the simulation, add an entry here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from penstock.kv_transfer.multi import MultiScheduler, MultiWorker
from penstock.simulation.backing import Backing, BackingContext, Parts, Site, Touch
from penstock.simulation.p2p import P2PBacking
from penstock.simulation.tiers import OffloadBacking


class SeveralBackings(Backing):
    """Tiers and connections to the other engines for every engine, combined by the real `MultiConnector`'s parts.

    In half of the worlds an engine looks into its tiers first.
    """

    def __init__(self, context: BackingContext) -> None:
        self._children: dict[str, Backing] = {"tiers": OffloadBacking(context), "p2p": P2PBacking(context)}
        if context.pick(2):
            self._children = dict(reversed(self._children.items()))

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

    def is_stopped(self, name: str) -> bool:
        return any(child.is_stopped(name) for child in self._children.values())

    def has_news(self, name: str) -> bool:
        return any(child.has_news(name) for child in self._children.values())

    @property
    def is_settled(self) -> bool:
        return all(child.is_settled for child in self._children.values())

    def counters(self) -> Mapping[str, float]:
        return {name: value for child in self._children.values() for name, value in child.counters().items()}

    def check_idle(self) -> None:
        for child in self._children.values():
            child.check_idle()


BACKINGS: dict[str, Callable[[BackingContext], Backing]] = {
    "none": lambda context: Backing(),
    "tiers": OffloadBacking,
    "several": SeveralBackings,
    "p2p": P2PBacking,
}
