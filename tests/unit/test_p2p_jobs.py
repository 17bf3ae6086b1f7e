"""Jobs of the workers of all ranks: what a step tells them, and what their reports mean."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from penstock.kv_transfer.p2p.consumer import Load
from penstock.kv_transfer.p2p.jobs import Digested, ReadEnded, WorkerJobs
from penstock.kv_transfer.p2p.messages import VERSION, Grant, Hello, PeerShards, Shard, ShardDigests
from penstock.kv_transfer.p2p.params import RemotePrefill
from penstock.kv_transfer.p2p.producer import Digest
from penstock.messages.kv_transfer import BadRange, ShardId, TransferId, TransferReport, TransferStatus
from penstock.messages.scheduler_output import BlockIds
from penstock.utils.errors import PeerError
from tests.unit.kv_memory_fakes import make_layout, model

RANKS: tuple[ShardId, ...] = ((0, 0), (0, 1))
OWN: dict[ShardId, Shard] = {rank: Shard(rank, make_layout(model(2), 4, rank=rank[1], tp=2), b"") for rank in RANKS}
DONE, FAILED = TransferStatus.DONE, TransferStatus.FAILED
LOAD, DIGEST = TransferId("load", 0), TransferId("hold", 0, part=1)


def on_wire(name: TransferId) -> TransferId:
    return replace(name, epoch="epoch")


def hello(block_size: int = 4, engine_id: str = "p") -> Hello:
    shards = (Shard((0, 0), make_layout(model(2), block_size), b""),)
    return Hello(version=VERSION, engine_id=engine_id, epoch="1", meaning={}, transport="memory", shards=shards)


def make_jobs(peer: Hello, *, is_source: bool) -> WorkerJobs:
    jobs = WorkerJobs("epoch", OWN, 2)
    jobs.register(peer, is_source=is_source)
    return jobs


def reading(
    jobs: WorkerJobs, peer: Hello, remote: BlockIds, own: BlockIds = ((1, 2), (1, 2)), first: int = 0, end: int = 8
) -> Load:
    load = Load(LOAD, LOAD, RemotePrefill(("127.0.0.1", 1), "p"), b"", block_ids=own, first=first, end=end)
    jobs.read(load, Grant(transfer_id=LOAD, lease=1.0, block_ids=remote), peer)
    return load


def report(rank: int, status: TransferStatus = DONE, *bad: BadRange) -> TransferReport:
    return TransferReport(on_wire(LOAD), RANKS[rank], status, bad)


def test_a_read_ends_when_every_rank_has_reported() -> None:
    jobs = make_jobs(hello(), is_source=True)
    load = reading(jobs, hello(), ((7, 8), (7, 8)))
    assert not jobs.is_idle
    assert jobs.apply(TransferReport(LOAD, RANKS[0], DONE)) is None, "a report of another life"
    assert jobs.apply(report(0)) is None
    assert jobs.apply(report(0)) is None
    assert jobs.apply(report(1)) == ReadEnded(load, (), True)
    assert jobs.is_idle
    assert jobs.counters == {"p2p_duplicate_reports": 1, "p2p_unknown_reports": 1}
    jobs.check_integrity()


@pytest.mark.parametrize("failed", [0, 1])
def test_a_read_is_complete_unless_a_rank_does_not_know_what_is_missing(failed: int) -> None:
    for bad, is_complete in (((), False), ((BadRange(0, 4, 8),), True)):
        jobs = make_jobs(hello(), is_source=True)
        reading(jobs, hello(), ((7, 8), (7, 8)))
        jobs.apply(report(1 - failed))
        ended = jobs.apply(report(failed, FAILED, *bad))
        assert isinstance(ended, ReadEnded)
        assert ended.is_complete is is_complete
        assert ended.bad_ranges == (bad or (BadRange(0, 0, 8), BadRange(1, 0, 8)))


@pytest.mark.parametrize(
    ("block_size", "remote", "own", "end", "missing"),
    [
        (4, ((7, 8), (0, 8)), ((1, 2), (1, 2)), 8, [BadRange(1, 0, 4)]),
        (4, ((7, 8), (0, 8)), ((1, 2), (0, 2)), 8, []),
        (2, ((7, 8, 9, 0), (7, 0, 8, 9)), ((1, 2), (1, 2)), 8, [BadRange(0, 4, 8), BadRange(1, 0, 4)]),
        (4, ((7, 0), (7, 8)), ((1, 2), (1, 2)), 6, [BadRange(0, 4, 6)]),
        (8, ((0,), (7,)), ((1, 2), (1, 2)), 8, [BadRange(0, 0, 4), BadRange(0, 4, 8)]),
    ],
    ids=["missing there", "not needed here", "smaller blocks", "part of a block", "larger blocks"],
)
def test_blocks_that_the_other_engine_lacks_are_computed(
    block_size: int, remote: BlockIds, own: BlockIds, end: int, missing: list[BadRange]
) -> None:
    jobs, peer = make_jobs(hello(block_size), is_source=True), hello(block_size)
    load = reading(jobs, peer, remote, own, end=end)
    jobs.apply(report(0))
    assert jobs.apply(report(1)) == ReadEnded(load, tuple(missing), True)


@pytest.mark.parametrize("remote", [((7, 8),), ((7, 8), (7, 8), (7, 8)), ((7, 8), (7,)), ()])
def test_a_grant_that_names_too_few_blocks_or_groups_is_refused(remote: BlockIds) -> None:
    jobs = make_jobs(hello(), is_source=True)
    with pytest.raises(PeerError, match="does not name blocks for 8 tokens"):
        reading(jobs, hello(), remote)
    assert jobs.is_idle
    jobs.check_integrity()


def test_workers_hear_of_an_engine_before_its_first_job_and_of_their_own_ranks_once() -> None:
    peer = hello()
    jobs = make_jobs(peer, is_source=True)
    reading(jobs, peer, ((7, 8, 9), (7, 8, 9)))
    first = jobs.take({"p/1"}, has_time=False)
    assert (first.own, first.peers) == (tuple(OWN.values()), (PeerShards("p/1", peer.shards),))
    assert first.reads[0].remote_block_ids == ((7, 8), (7, 8))
    jobs.apply(report(0))
    jobs.apply(report(1))
    reading(jobs, peer, ((7, 8), (7, 8)))
    second = jobs.take({"p/1"}, has_time=True)
    assert (second.own, second.peers, second.has_time) == ((), (), True)
    # An engine from which ranks still read is forgotten when they have ended.
    assert jobs.take(set(), has_time=True).forgotten == ()
    jobs.apply(report(0))
    jobs.apply(report(1))
    assert jobs.take(set(), has_time=True).forgotten == ("p/1",)
    assert jobs.take(set(), has_time=True).forgotten == ()
    jobs.register(peer, is_source=True)
    reading(jobs, peer, ((7, 8), (7, 8)))
    assert jobs.take({"p/1"}, has_time=True).peers == first.peers, "it has come again"
    jobs.check_integrity()


def digest(jobs: WorkerJobs, peer: Hello, first: int, end: int) -> None:
    jobs.digest(Digest(DIGEST, jobs.reading_of(peer), ((1, 2, 3), (4, 5, 6)), first, end))


def test_a_digest_job_names_only_the_blocks_of_its_piece() -> None:
    peer = hello(2)
    jobs = make_jobs(peer, is_source=False)
    digest(jobs, peer, 4, 10)
    # The engine leaves before the step that begins the job.
    metadata = jobs.take(set(), has_time=False)
    (job,) = metadata.digests
    assert (job.peer, job.block_ids, job.first, job.end) == ("p/1", ((2, 3), (5, 6)), 0, 6)
    assert (metadata.peers, metadata.forgotten) == ((PeerShards("p/1", peer.shards),), ())
    assert not jobs.is_idle
    jobs.drop_digest(DIGEST)
    jobs.drop_digest(DIGEST)
    assert not jobs.is_idle, "the workers are to be told"
    metadata = jobs.take(set(), has_time=False)
    assert (metadata.dropped, metadata.forgotten) == ((on_wire(DIGEST),), ("p/1",))
    assert jobs.is_idle
    with pytest.raises(KeyError):
        jobs.reading_of(peer)
    jobs.check_integrity()


@pytest.mark.parametrize("status", [DONE, FAILED])
def test_digests_are_those_of_all_ranks_or_none(status: TransferStatus) -> None:
    peer = hello()
    jobs = make_jobs(peer, is_source=False)
    digest(jobs, peer, 0, 8)
    rows = [(b"a", b"b", b"c", b"d"), (b"e", b"f", b"g", b"h")]
    first = TransferReport(on_wire(DIGEST), RANKS[0], status, digests=rows[0])
    assert jobs.apply(first) is None
    found = jobs.apply(TransferReport(on_wire(DIGEST), RANKS[1], DONE, digests=rows[1]))
    collected = tuple(ShardDigests(rank, (0, 0), (row[:2], row[2:])) for rank, row in zip(RANKS, rows, strict=True))
    assert found == Digested(DIGEST, collected if status is DONE else None)


def test_engines_with_equal_readings_share_one() -> None:
    jobs = make_jobs(hello(2), is_source=False)
    jobs.register(hello(2, "another"), is_source=False)
    assert jobs.reading_of(hello(2)) is jobs.reading_of(hello(2, "another"))
