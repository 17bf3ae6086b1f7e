"""Transfers of one rank, and the steps in which they end."""

from __future__ import annotations

import pytest

from penstock.kv_transfer.p2p.messages import P2PMetadata, PeerShards, ReadJob, Shard
from penstock.kv_transfer.p2p.worker import P2PWorker
from penstock.messages.kv_transfer import TransferReport, TransferStatus
from penstock.simulation.memory_transport import Fault, MemoryFabric
from penstock.utils.clock import ManualClock
from tests.unit.test_p2p_layouts import RANK, connect_now, make_memory

_READ = ReadJob(job_id="load", peer="p/1", block_ids=((1,),), remote_block_ids=((2,),), first=0, end=4, digests=())


@pytest.mark.parametrize("has_time", [True, False])
def test_a_step_without_work_waits_for_a_short_read(has_time: bool) -> None:
    clock = ManualClock()
    fabric = MemoryFabric(clock, lambda _operation, _size: Fault(delay=0.001))
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
