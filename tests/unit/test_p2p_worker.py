"""Transfers of one rank, and the steps in which they end."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

import pytest
from msgspec.structs import replace

from penstock.kv_transfer.p2p.dialler import Background, Dialler
from penstock.kv_transfer.p2p.messages import (
    DigestJob,
    P2PMetadata,
    PeerShards,
    ReadJob,
    Shard,
    ShardDigests,
)
from penstock.kv_transfer.p2p.worker import P2PWorker
from penstock.kv_transfer.transports.base import PeerId
from penstock.messages.kv_transfer import BadRange, TransferId, TransferReport, TransferStatus
from penstock.simulation.memory_transport import NO_FAULT, Fault, FaultKind, MemoryFabric
from penstock.utils.clock import ManualClock
from tests.unit.test_p2p_layouts import RANK, connect_now, make_memory

_LOAD, _DIGEST = TransferId("load", 0), TransferId("hold", 0, part=1)
_READ = ReadJob(job_id=_LOAD, peer="p/1", block_ids=((1,),), remote_block_ids=((2,),), first=0, end=4, digests=())


@pytest.mark.parametrize("has_time", [True, False])
def test_a_step_without_work_waits_for_a_short_read(has_time: bool) -> None:
    clock = ManualClock()
    fabric = MemoryFabric(clock, lambda: Fault(delay=0.001))
    sender = fabric.endpoint("p")
    there = make_memory()
    sender.register(there.region_memory())
    worker = P2PWorker(RANK, lambda _: fabric.endpoint("d"), connect_now)
    worker.register_kv_caches(make_memory())
    peers = (PeerShards("p/1", (Shard(RANK, there.layout, sender.descriptor()),)),)

    def step(metadata: P2PMetadata) -> tuple[TransferReport, ...]:
        worker.begin_step(metadata)
        worker.start_load_kv()
        reports = worker.get_finished(frozenset()).reports
        worker.end_step()
        return reports

    # This transport's `wait` ends with every part of the bytes, of which there are two.
    reports = step(P2PMetadata(peers=peers, reads=(_READ,), has_time=has_time)) + step(P2PMetadata(has_time=has_time))
    done = TransferReport(_LOAD, RANK, TransferStatus.DONE)
    assert (reports, clock.now()) == (((done,), 0.001) if has_time else ((), 0.0))
    clock.advance(0.001)
    reports += step(P2PMetadata(has_time=has_time))
    assert reports == (done,)


@pytest.mark.parametrize(("seconds", "has_time", "num_steps"), [(0.0, False, 9), (20.0, False, 1), (20.0, True, 1)])
def test_digests_take_a_share_of_the_time_of_a_step(seconds: float, has_time: bool, num_steps: int) -> None:
    """Steps that take no time digest a unit each, and one more finds that none is left."""
    clock, memory = ManualClock(), make_memory(num_blocks=9)
    unit_bytes = memory.layout.layers[0].block_bytes
    endpoint = MemoryFabric(clock).endpoint("p")
    worker = P2PWorker(RANK, lambda _: endpoint, connect_now, digest_bytes=1000 * unit_bytes, clock=clock)
    worker.register_kv_caches(memory)
    job = DigestJob(job_id=_DIGEST, peer="", block_ids=(tuple(range(1, 9)),), first=0, end=32)
    own = (Shard(RANK, memory.layout, endpoint.descriptor()),)
    metadata, steps = P2PMetadata(own=own, digests=(job,), has_time=has_time), 0
    while True:
        steps += 1
        worker.begin_step(metadata)
        worker.start_load_kv()
        clock.advance(seconds)
        reports = worker.get_finished(frozenset()).reports
        worker.end_step()
        metadata = P2PMetadata(has_time=has_time)
        if reports:
            break
    assert steps == num_steps
    ((report,), digests) = reports, reports[0].digests
    assert (report.transfer_id, report.status, len(digests)) == (_DIGEST, TransferStatus.DONE, 8)


def test_a_dropped_digest_is_neither_computed_nor_reported() -> None:
    clock, memory = ManualClock(), make_memory()
    endpoint = MemoryFabric(clock).endpoint("p")
    worker = P2PWorker(RANK, lambda _: endpoint, connect_now, digest_bytes=1.0, clock=clock)
    worker.register_kv_caches(memory)
    job = DigestJob(job_id=_DIGEST, peer="", block_ids=((1, 2),), first=0, end=8)
    own = (Shard(RANK, memory.layout, endpoint.descriptor()),)
    steps = [P2PMetadata(own=own, digests=(job,)), P2PMetadata(dropped=(_DIGEST,)), P2PMetadata(has_time=True)]
    for metadata in steps:
        worker.begin_step(metadata)
        assert worker.get_finished(frozenset()).reports == ()
        worker.end_step()
        clock.advance(100.0)
    # A job may be dropped in the step that would begin it.
    worker.begin_step(P2PMetadata(digests=(job,), dropped=(_DIGEST,), has_time=True))
    assert worker.get_finished(frozenset()).reports == ()
    assert not worker._digesting


class Reader:
    """A rank that reads from another one through a transport with this fault."""

    def __init__(self, fault: Fault = NO_FAULT, background: Background = connect_now) -> None:
        self.clock = ManualClock()
        fabric = MemoryFabric(self.clock, lambda: fault)
        sender, there = fabric.endpoint("p"), make_memory()
        sender.register(there.region_memory())
        self.endpoint = fabric.endpoint("d")
        self.worker = P2PWorker(RANK, lambda _: self.endpoint, background, clock=self.clock)
        self.worker.register_kv_caches(make_memory())
        self.peers = (PeerShards("p/1", (Shard(RANK, there.layout, sender.descriptor()),)),)

    def step(self, metadata: P2PMetadata = P2PMetadata()) -> list[TransferReport]:  # noqa: B008
        self.worker.begin_step(metadata)
        self.worker.start_load_kv()
        reports = self.worker.get_finished(frozenset()).reports
        self.worker.end_step()
        self.clock.advance(1.0)
        return list(reports)


_FAILED = TransferReport(_LOAD, RANK, TransferStatus.FAILED)


def test_a_cancelled_read_is_reported_as_failed() -> None:
    reader = Reader(Fault(FaultKind.DROP))
    assert reader.step(P2PMetadata(peers=reader.peers, reads=(_READ,))) == []
    assert reader.step(P2PMetadata(cancelled=(TransferId("another", 0),))) == []
    reports = reader.step(P2PMetadata(cancelled=(_LOAD,)))
    assert reports + reader.step() == [_FAILED]


def test_a_read_that_is_cancelled_by_the_step_that_begins_it_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, begun = Reader(), list[object]()
    monkeypatch.setattr(reader.endpoint, "submit", lambda *args: begun.append(args))
    assert reader.step(P2PMetadata(peers=reader.peers, reads=(_READ,), cancelled=(_LOAD,))) == [_FAILED]
    assert not begun


@pytest.mark.parametrize(
    ("digests", "end", "bad"),
    [
        (((b"wrong",),), 4, BadRange(0, 0, 4)),
        (((b"wrong",),), 3, BadRange(0, 0, 3)),
        (((),), 4, BadRange(0, 0, 4)),
        ((), 4, BadRange(0, 0, 4)),
    ],
    ids=["wrong", "part of a block", "too few", "no group"],
)
def test_kv_that_does_not_have_the_given_digests_is_bad(
    digests: tuple[tuple[bytes, ...], ...], end: int, bad: BadRange
) -> None:
    reader = Reader()
    job = replace(_READ, end=end, digests=(ShardDigests(RANK, RANK, digests),))
    reports = reader.step(P2PMetadata(peers=reader.peers, reads=(job,)))
    assert reports + reader.step() == [TransferReport(_LOAD, RANK, TransferStatus.FAILED, (bad,))]
    assert reader.step() == [], "it is reported once"


def test_nothing_is_left_of_a_forgotten_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, ended = Reader(), list[object]()
    job = DigestJob(job_id=_DIGEST, peer="p/1", block_ids=((1,),), first=0, end=4)
    metadata = P2PMetadata(own=reader.peers[0].shards, peers=reader.peers, reads=(_READ,), digests=(job,))
    assert {report.transfer_id for report in reader.step(metadata) + reader.step()} == {_LOAD, _DIGEST}
    monkeypatch.setattr(reader.endpoint, "disconnect", ended.append)
    reader.step(P2PMetadata(forgotten=("p/1", "unknown")))
    assert set(ended) == {"p#1"}
    assert not reader.worker._tables
    assert not reader.worker._readers


@pytest.mark.parametrize(
    ("pause", "seconds", "has_time", "expected"),
    [
        (0.0, 0.0, False, 0.001),
        (0.004, 0.02, False, 0.024),
        (5.0, 0.02, False, 0.03),
        (0.0, 0.0, True, 0.008),
        (0.002, 0.003, True, 0.04),
        (5.0, 5.0, True, 0.08),
    ],
)
def test_a_step_digests_for_its_length_and_a_short_pause_before_it(
    pause: float, seconds: float, has_time: bool, expected: float
) -> None:
    """A step without other work digests eight times as much, but does not delay a request that arrives meanwhile."""
    clock = ManualClock()
    endpoint = MemoryFabric(clock).endpoint("p")
    worker = P2PWorker(RANK, lambda _: endpoint, connect_now, digest_bytes=1000.0, clock=clock)
    worker.register_kv_caches(make_memory())
    clock.advance(pause)
    worker.begin_step(P2PMetadata(has_time=has_time))
    clock.advance(seconds)
    assert worker._room() == pytest.approx(1000.0 * expected)


def test_a_step_digests_at_most_a_unit_more_than_its_share() -> None:
    """Of all jobs together, and a finished one is reported once."""
    clock, memory = ManualClock(), make_memory(num_blocks=9)
    endpoint = MemoryFabric(clock).endpoint("p")
    worker = P2PWorker(RANK, lambda _: endpoint, connect_now, digest_bytes=1.0, clock=clock)
    worker.register_kv_caches(memory)
    names = [TransferId("hold", 0, part) for part in (1, 2)]
    jobs = tuple(DigestJob(job_id=name, peer="", block_ids=((1, 2),), first=0, end=8) for name in names)
    own = (Shard(RANK, memory.layout, endpoint.descriptor()),)
    worker.begin_step(P2PMetadata(own=own, digests=jobs))
    counts: list[list[int]] = []
    jobs_in_progress = list(worker._digesting)
    for _ in range(6):
        worker._collect(1.0)
        counts.append([len(each.digests) for each in jobs_in_progress])
    assert counts[:2] == [[1, 0], [2, 0]]
    assert counts[-1] == [2, 2]
    assert [report.transfer_id for report in worker._reports] == names


def test_a_read_is_not_reported_while_its_connection_is_being_made() -> None:
    waiting: list[tuple[Callable[[], PeerId], Future[PeerId]]] = []

    def later(connect: Callable[[], PeerId]) -> Future[PeerId]:
        waiting.append((connect, Future()))
        return waiting[-1][1]

    reader = Reader(background=later)
    assert reader.step(P2PMetadata(peers=reader.peers, reads=(_READ,))) + reader.step() == []
    ((connect, future),) = waiting
    future.set_result(connect())
    assert reader.step() + reader.step() == [TransferReport(_LOAD, RANK, TransferStatus.DONE)]


def test_no_read_begins_with_a_peer_while_a_cancelled_one_runs_on() -> None:
    """A transfer ends with its connection, which another read needs: with new ones it would be needed forever."""
    reader = Reader(Fault(FaultKind.DROP))
    names = [TransferId(name, 0) for name in ("cancelled", "wanted", "new")]
    jobs = [replace(_READ, job_id=name, block_ids=((block,),)) for block, name in enumerate(names, start=1)]
    assert reader.step(P2PMetadata(peers=reader.peers, reads=(jobs[0], jobs[1]))) == []
    assert reader.step(P2PMetadata(reads=(jobs[2],), cancelled=(names[0],))) == []
    begun = {read.job.job_id: len(read.transfers) for read in reader.worker._mover.reads}
    assert begun == {names[0]: 1, names[1]: 1, names[2]: 0}
    reports = reader.step(P2PMetadata(cancelled=(names[1],))) + reader.step()
    assert {report.transfer_id for report in reports} == set(names[:2])
    assert [len(read.transfers) for read in reader.worker._mover.reads] == [1]


def test_a_connection_that_is_needed_again_is_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint, dials, ended = MemoryFabric(ManualClock()).endpoint("d"), list[Future[PeerId]](), list[PeerId]()
    monkeypatch.setattr(endpoint, "disconnect", ended.append)

    def later(connect: Callable[[], PeerId]) -> Future[PeerId]:
        dials.append(Future())
        return dials[-1]

    dialler = Dialler(endpoint, later)
    # An engine is forgotten while it is being dialled, and then known again.
    assert dialler.find(b"p") is None
    dialler.disconnect(b"p")
    assert dialler.find(b"p") is None
    dials[0].set_result("first")
    assert not ended
    dials[1].set_result("first")
    assert dialler.find(b"p") == "first"
    # A read gives up a connection that has been dropped as unusable, and is being made again.
    dialler.forget(b"p")
    assert dialler.find(b"p") is None
    dialler.hang_up("first")
    assert (ended, dialler.find(b"p"), len(dials)) == (["first"], None, 3)
