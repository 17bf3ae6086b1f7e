"""Layouts that a peer may declare, and what becomes of its KV where they do not fit."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest
from msgspec.structs import replace

from penstock.kv_transfer.p2p import digests as digests_module
from penstock.kv_transfer.p2p.digests import UnitDigests
from penstock.kv_transfer.p2p.jobs import WorkerJobs
from penstock.kv_transfer.p2p.messages import VERSION, Hello, P2PMetadata, PeerShards, ReadJob, Shard, ShardDigests
from penstock.kv_transfer.p2p.worker import P2PWorker
from penstock.kv_transfer.topology.layouts import check_layout
from penstock.kv_transfer.topology.pieces import digest_order, unit_runs
from penstock.kv_transfer.topology.planner import sources
from penstock.kv_transfer.transports.base import PeerId
from penstock.messages.kv_cache_spec import NULL_BLOCK
from penstock.messages.kv_layout import KVLayout
from penstock.messages.kv_transfer import ShardId, TransferId, TransferReport, TransferStatus
from penstock.simulation.memory_transport import MemoryFabric
from penstock.simulation.oracle import RECURRENT, OracleMemory, cache_config, make_layers
from penstock.utils.clock import ManualClock
from penstock.utils.errors import PeerError

RANK: ShardId = (0, 0)


def make_memory(num_blocks: int = 4) -> OracleMemory:
    return OracleMemory(cache_config(make_layers((0,), 1, has_drafter=False), num_blocks, 4, 2), RANK, range(2))


def with_unknown_layer(layout: KVLayout) -> KVLayout:
    """Its first layer, which no other engine has, lacks the axes of heads, of keys and values, and of their numbers."""
    first = layout.layers[0]
    (block, _, token, *_), (block_bytes, _, token_bytes, *_) = first.shape, first.strides
    unknown = replace(
        first,
        name="unknown",
        axes=("block", "token"),
        shape=(block, token),
        strides=(block_bytes, token_bytes),
        heads=(0, 1),
    )
    return replace(layout, layers=(unknown, *layout.layers))


def hello(layout: KVLayout) -> Hello:
    shards = (Shard(RANK, layout, b""),)
    return Hello(version=VERSION, engine_id="p", epoch="1", meaning={}, transport="memory", shards=shards)


def test_a_peer_in_whose_order_nothing_can_be_digested_is_refused() -> None:
    layout = make_memory().layout
    own = {RANK: Shard(RANK, layout, b"")}
    WorkerJobs("epoch", own, 1).register(hello(layout), is_source=True)
    with pytest.raises(PeerError, match=r"axes \['head', 'kv'\] that the other engine's order"):
        WorkerJobs("epoch", own, 1).register(hello(with_unknown_layer(layout)), is_source=True)


def test_the_bytes_of_many_units_are_found_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between blocks of different sizes, finding them all would keep a step waiting."""
    memory = make_memory(num_blocks=40)
    rng = random.Random(0)
    for region in memory.region_memory():
        region[:] = rng.randbytes(len(region))
    slices = sources(memory.layout, {RANK: memory.layout}, RANK)[RANK]
    order = digest_order(memory.layout)

    def units() -> Iterator[tuple[int, bytes, int]]:
        digests = UnitDigests(memory.layout, memory.region_memory())
        return digests.of(slices, order, [*range(1, 20), NULL_BLOCK, *range(21, 39)], 0, 2, 151, 4)

    whole = list(units())
    assert [token for token, *_ in whole] == [2, *range(4, 151, 4)]
    assert [token for token, each, _ in whole if not each] == [76], "it has no block"
    calls: list[int] = []
    monkeypatch.setattr(digests_module, "unit_runs", lambda *given: calls.append(1) or unit_runs(*given))
    for at_once, num_calls in ((5, 8), (19, 2), (38, 1), (37, 2)):
        monkeypatch.setattr(digests_module, "_AT_ONCE", at_once)
        calls.clear()
        found = units()
        assert len(calls) == 1
        assert list(found) == whole
        assert len(calls) == num_calls


@pytest.mark.parametrize("first", [-1, (1 << 64) - 1])
def test_blocks_of_a_peer_begin_at_an_id_of_63_bits(first: int) -> None:
    layout = make_memory().layout
    (layer,) = layout.layers
    with pytest.raises(PeerError, match="its blocks cannot begin at"):
        check_layout(replace(layout, layers=(replace(layer, first_block=first),)))


def test_engines_with_recurrent_layers_and_other_block_sizes_are_refused() -> None:
    def layout(block_size: int) -> KVLayout:
        layers = make_layers((0, RECURRENT), 1, has_drafter=False)
        config = dataclasses.replace(cache_config(layers, 4, block_size, 2), num_states=3)
        return OracleMemory(config, RANK, range(2)).layout

    own = {RANK: Shard(RANK, layout(4), b"")}
    WorkerJobs("epoch", own, 2).register(hello(layout(4)), is_source=True)
    with pytest.raises(
        PeerError, match=r"block_size is 4 here and 8 in the other engine: models with recurrent layers"
    ):
        WorkerJobs("epoch", own, 2).register(hello(layout(8)), is_source=True)


def connect_now(connect: Callable[[], PeerId]) -> Future[PeerId]:
    future: Future[PeerId] = Future()
    future.set_result(connect())
    return future


def test_a_read_that_cannot_be_compared_fails() -> None:
    """Registration refuses such a peer; if one gets through, it costs its KV and not the rank."""
    fabric = MemoryFabric(ManualClock())
    here, there = make_memory(), make_memory()
    sender = fabric.endpoint("p")
    sender.register(there.region_memory())
    worker = P2PWorker(RANK, lambda _: fabric.endpoint("d"), connect_now)
    worker.register_kv_caches(here)
    shard = Shard(RANK, with_unknown_layer(there.layout), sender.descriptor())
    job = ReadJob(
        job_id=TransferId("load", 0),
        peer="p/1",
        block_ids=((1,),),
        remote_block_ids=((2,),),
        first=0,
        end=4,
        digests=(ShardDigests(RANK, RANK, ((b"digest",),)),),
    )
    reports: list[TransferReport] = []
    for metadata in (P2PMetadata(peers=(PeerShards("p/1", (shard,)),), reads=(job,)), P2PMetadata(), P2PMetadata()):
        worker.begin_step(metadata)
        worker.start_load_kv()
        fabric.run()
        reports += worker.get_finished(frozenset()).reports
        worker.end_step()
    assert reports == [TransferReport(TransferId("load", 0), RANK, TransferStatus.FAILED)]
