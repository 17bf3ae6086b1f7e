"""Transfers of one rank, and the steps in which they end."""

from __future__ import annotations

import pytest

from penstock.kv_transfer.p2p.messages import DigestJob, P2PMetadata, PeerShards, ReadJob, Shard
from penstock.kv_transfer.p2p.worker import P2PWorker
from penstock.messages.kv_transfer import TransferReport, TransferStatus
from penstock.simulation.memory_transport import Fault, MemoryFabric
from penstock.utils.clock import ManualClock
from tests.unit.test_p2p_layouts import RANK, connect_now, make_memory

_READ = ReadJob(job_id="load", peer="p/1", block_ids=((1,),), remote_block_ids=((2,),), first=0, end=4, digests=())


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
    done = TransferReport("load", RANK, TransferStatus.DONE)
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
    job = DigestJob(job_id="digest", peer="", block_ids=(tuple(range(1, 9)),), first=0, end=32)
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
    assert (report.transfer_id, report.status, len(digests)) == ("digest", TransferStatus.DONE, 8)


def test_a_dropped_digest_is_neither_computed_nor_reported() -> None:
    clock, memory = ManualClock(), make_memory()
    endpoint = MemoryFabric(clock).endpoint("p")
    worker = P2PWorker(RANK, lambda _: endpoint, connect_now, digest_bytes=1.0, clock=clock)
    worker.register_kv_caches(memory)
    job = DigestJob(job_id="digest", peer="", block_ids=((1, 2),), first=0, end=8)
    own = (Shard(RANK, memory.layout, endpoint.descriptor()),)
    steps = [P2PMetadata(own=own, digests=(job,)), P2PMetadata(dropped=("digest",)), P2PMetadata(has_time=True)]
    for metadata in steps:
        worker.begin_step(metadata)
        assert worker.get_finished(frozenset()).reports == ()
        worker.end_step()
        clock.advance(100.0)
    # A job may be dropped in the step that would begin it.
    worker.begin_step(P2PMetadata(digests=(job,), dropped=("digest",), has_time=True))
    assert worker.get_finished(frozenset()).reports == ()
