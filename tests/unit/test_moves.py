"""Moves of one rank's KV: its connections to the ranks of other engines, and transfers that share them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from unittest.mock import Mock

import numpy as np
import pytest

from penstock.kv_transfer.p2p.dialler import Dialler, threads
from penstock.kv_transfer.p2p.messages import ReadJob, Shard
from penstock.kv_transfer.p2p.moves import Mover, Read
from penstock.kv_transfer.topology.planner import sources
from penstock.kv_transfer.transports.base import PeerId, TransferHandle, TransferState
from penstock.messages.kv_transfer import ShardId, TransferId
from penstock.simulation.memory_transport import Fault, FaultKind, MemoryFabric
from penstock.utils.clock import ManualClock
from penstock.utils.errors import PeerError
from tests.unit.test_rank_transfers import BLOCK_SIZE, TABLES, filled, layouts_of, memory_of

SLOW = Fault(delay=1.0)


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


@pytest.mark.parametrize("is_needed_again", [False, True])
def test_a_forgotten_connection_ends_with_the_engine(is_needed_again: bool) -> None:
    fabric, later = MemoryFabric(ManualClock()), Later()
    here, there = fabric.endpoint("here"), fabric.endpoint("there")
    dialler = Dialler(here, later)
    dialler.find(there.descriptor())
    later.run()
    assert dialler.find(there.descriptor()) == there.peer_id
    dialler.forget(there.descriptor())
    if is_needed_again:
        dialler.find(there.descriptor())
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


def test_a_connection_that_could_not_be_made_is_made_again() -> None:
    fabric = MemoryFabric(ManualClock())
    here, there = fabric.endpoint("here"), fabric.endpoint("there")
    failed: Future[PeerId] = Future()
    failed.set_exception(PeerError("nobody answers"))
    made: Future[PeerId] = Future()
    made.set_result(here.connect(there.descriptor()))
    attempts = iter([failed, made])
    dialler = Dialler(here, lambda connect: next(attempts))
    with pytest.raises(PeerError, match="nobody answers"):
        dialler.find(there.descriptor())
    assert dialler.find(there.descriptor()) == there.peer_id


def test_a_connection_for_which_there_is_no_thread_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    fabric = MemoryFabric(ManualClock())
    here, there = fabric.endpoint("here"), fabric.endpoint("there")
    dialler = Dialler(here, threads())
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        with pytest.raises(PeerError, match="can't start new thread"):
            dialler.find(there.descriptor())
    dialler.find(there.descriptor())
    assert dialler._peers[there.descriptor()].result(10) == there.peer_id
    assert dialler.find(there.descriptor()) == there.peer_id


def test_a_connection_that_fails_when_it_is_no_longer_needed_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    fabric, failing = MemoryFabric(ManualClock()), Future[PeerId]()
    here, there = fabric.endpoint("here"), fabric.endpoint("there")
    dialler = Dialler(here, lambda connect: failing)
    assert dialler.find(there.descriptor()) is None
    dialler.disconnect(there.descriptor())
    failing.set_exception(PeerError("nobody answers"))
    assert not caplog.records


def test_a_connection_that_is_being_made_again_outlives_the_earlier_one() -> None:
    fabric, later = MemoryFabric(ManualClock()), Later()
    here, there = fabric.endpoint("here"), fabric.endpoint("there")
    dialler = Dialler(here, later)
    dialler.find(there.descriptor())
    later.run()
    assert dialler.find(there.descriptor()) == there.peer_id
    dialler.forget(there.descriptor())
    assert dialler.find(there.descriptor()) is None
    dialler.hang_up(there.peer_id)
    later.run()
    assert dialler.find(there.descriptor()) == there.peer_id
    assert here.peers == {there.peer_id}


class Rig:
    """A rank that reads from the two ranks of another engine."""

    def __init__(self) -> None:
        ((shard, layout),) = layouts_of((1, 1, None)).items()
        theirs = layouts_of((1, 2, None))
        self.clock = ManualClock()
        self.fault = Fault()
        self.next_faults: list[Fault] = []
        fabric = MemoryFabric(self.clock, lambda: self.next_faults.pop(0) if self.next_faults else self.fault)
        self.here = fabric.endpoint("here")
        self.here.register([memory_of(layout).data])
        self.slices = sources(layout, theirs, shard)
        self.peer: dict[ShardId, Shard] = {}
        for rank, each in theirs.items():
            there = fabric.endpoint(f"there {rank}")
            there.register([filled(each, TABLES["producer"]).data])
            self.peer[rank] = Shard(rank, each, there.descriptor())
        self.later = Later()
        self.mover = Mover(layout, self.here, self.later)

    def read(self, name: str, fault: Fault = SLOW) -> Read:
        """Has begun, if it could."""
        self.fault = fault
        blocks = {"block_ids": TABLES["consumer"], "remote_block_ids": TABLES["producer"]}
        job = ReadJob(job_id=TransferId(name, 0), peer="p/1", first=0, end=BLOCK_SIZE, digests=(), **blocks)
        read = Read(job, self.peer, dict(self.slices))
        self.mover.add(read)
        for _ in range(10):
            self.advance(read)
            self.later.run()
        return read

    def advance(self, read: Read) -> list[TransferState]:
        """As a step does."""
        states = self.mover.advance(read)
        self.mover.cut_unwanted()
        return states


def test_the_connections_to_all_ranks_may_have_ended_since_the_last_read() -> None:
    rig = Rig()
    for name in ("first", "second"):
        read = rig.read(name)
        rig.clock.advance(2.0)
        assert rig.advance(read) == [TransferState.DONE] * 2
        for peer in rig.here.peers:
            rig.here.disconnect(peer)


def test_a_connection_is_not_made_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, attempts = Rig(), list[PeerId]()

    def refuse(peer: PeerId, runs: np.ndarray) -> TransferHandle:
        attempts.append(peer)
        raise PeerError(f"{peer} is not connected")

    monkeypatch.setattr(rig.here, "submit", refuse)
    assert rig.read("first").has_failed
    assert len(attempts) == 2


def test_a_very_long_read_has_several_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transport has a limit, which blocks of different sizes reach with some ten thousand tokens."""
    rig = Rig()
    whole, read_whole = rig.here.submit, list[np.ndarray]()
    monkeypatch.setattr(rig.here, "submit", lambda peer, runs: read_whole.append(runs) or whole(peer, runs))
    read = rig.read("first")
    rig.clock.advance(2.0)
    assert rig.advance(read) == [TransferState.DONE] * 2
    assert len(read_whole) == 2
    with monkeypatch.context() as nothing:
        nothing.setattr("penstock.kv_transfer.p2p.moves.plan_runs", lambda *_: np.empty((0, 3), np.int64))
        assert len(rig.read("empty").transfers) == 2
    monkeypatch.setattr("penstock.kv_transfer.p2p.moves._MOST_RUNS", 3)
    parts = list[np.ndarray]()
    monkeypatch.setattr(rig.here, "submit", lambda peer, runs: parts.append(runs) or whole(peer, runs))
    read = rig.read("second")
    rig.clock.advance(2.0)
    assert rig.advance(read) == [TransferState.DONE] * len(parts)
    assert max(map(len, parts)) == 3
    assert np.array_equal(np.concatenate(parts), np.concatenate(read_whole))


def test_a_read_that_is_given_up_ends_no_other_one() -> None:
    rig = Rig()
    reads = [rig.read("first"), rig.read("second")]
    rig.mover.give_up(reads[0])
    late = rig.read("third")
    assert late.parts, "it begins when nothing unwanted is under way"
    assert [rig.advance(read) for read in reads] == [[TransferState.PENDING] * 2] * 2
    rig.clock.advance(2.0)
    assert [rig.advance(read) for read in reads] == [[TransferState.DONE] * 2] * 2
    assert not reads[1].has_failed
    rig.advance(late)
    assert not late.parts


@pytest.mark.parametrize("is_last_given_up", [False, True])
def test_a_read_that_is_given_up_does_not_run_on_alone(is_last_given_up: bool) -> None:
    rig = Rig()
    stuck = rig.read("first", Fault(FaultKind.DROP))
    wanted = rig.read("second")
    rig.mover.give_up(stuck)
    assert rig.advance(stuck) == [TransferState.PENDING] * 2
    if is_last_given_up:
        rig.mover.give_up(wanted)
    else:
        rig.clock.advance(2.0)
        rig.advance(wanted)
    assert rig.advance(stuck) == [TransferState.FAILED_SETTLED] * 2
    assert not rig.here.peers


def test_a_read_alone_ends_when_it_is_given_up() -> None:
    rig = Rig()
    read = rig.read("first")
    rig.mover.give_up(read)
    assert rig.advance(read) == [TransferState.FAILED_SETTLED] * 2


def test_connections_that_were_ended_here_do_not_count_as_failures() -> None:
    rig = Rig()
    rig.mover.give_up(rig.read("first", Fault(FaultKind.DROP)))
    read = rig.read("second")
    assert (read.parts, read.retried) == ({}, set())


def test_a_read_ends_with_the_first_of_its_transfers_that_fails() -> None:
    rig = Rig()
    rig.next_faults = [Fault(FaultKind.DIE, delay=1.0), Fault(FaultKind.DROP)]
    read = rig.read("first")
    rig.clock.advance(2.0)
    rig.advance(read)
    assert read.has_failed
    assert rig.advance(read) == [TransferState.FAILED_SETTLED] * 2, "the other would not have ended"
