"""Moves of one rank's KV: its connections to the ranks of other engines, and transfers that share them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from penstock.kv_transfer.p2p.dialler import Dialler
from penstock.kv_transfer.transports.base import PeerId
from penstock.kv_transfer.transports.memory import MemoryFabric
from penstock.utils.clock import ManualClock


class Later:
    """A background that works when it is told to."""

    def __init__(self) -> None:
        self._work: list[tuple[Callable[[], PeerId], Future[PeerId]]] = []

    def __call__(self, connect: Callable[[], PeerId]) -> Future[PeerId]:
        future: Future[PeerId] = Future()
        self._work.append((connect, future))
        return future

    def run(self) -> None:
        """As if each had a thread of its own."""
        work, self._work = self._work, []
        for future, peer in [(future, connect()) for connect, future in work]:
            future.set_result(peer)


def test_a_connection_ends_with_the_engine_also_while_it_is_being_made() -> None:
    fabric, later = MemoryFabric(ManualClock()), Later()
    here, there = fabric.endpoint("here"), fabric.endpoint("there")
    dialler = Dialler(here, later)
    for is_made in (True, False):
        assert dialler.find(there.descriptor()) is None
        if is_made:
            later.run()
            assert dialler.find(there.descriptor()) == there.peer_id
        dialler.disconnect(there.descriptor())
        later.run()
        assert not here.peers


def test_a_connection_that_is_needed_again_meanwhile_stays() -> None:
    fabric, later = MemoryFabric(ManualClock()), Later()
    here, there = fabric.endpoint("here"), fabric.endpoint("there")
    dialler = Dialler(here, later)
    dialler.find(there.descriptor())
    dialler.disconnect(there.descriptor())
    dialler.find(there.descriptor())
    later.run()
    assert here.peers == {dialler.find(there.descriptor())}
