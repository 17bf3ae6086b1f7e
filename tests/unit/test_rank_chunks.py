"""Tiers shared by all ranks: an engine can load chunks that an engine with another split has stored."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.engine.cache_plan import plan_cache
from penstock.kv_transfer.offload import OffloadKey
from penstock.kv_transfer.offload.messages import (
    LoadBlock,
    OffloadLoad,
    OffloadMetadata,
    OffloadStore,
    StoreBlock,
)
from penstock.kv_transfer.offload.region import OffloadRegion
from penstock.kv_transfer.offload.tiers.base import TransferJob
from penstock.kv_transfer.offload.tiers.disk import DiskTier, DiskTierConfig
from penstock.kv_transfer.offload.worker import OffloadingWorker
from penstock.kv_transfer.topology.chunks import ChunkFormat
from penstock.messages.kv_cache_spec import KVCacheConfig
from penstock.messages.kv_transfer import ShardId, TransferReport, TransferStatus
from penstock.runner.cpu.kv_cache_view import HostKVCacheView
from penstock.runner.kv_cache import allocate_kv_cache
from penstock.utils.digest import add_digests
from tests.unit.rank_fakes import DRAFT, NUM_HEADS, WINDOWS, layer_name, make_engine_config, make_facts

Split = tuple[int, int, tuple[int, ...] | None]
SPLITS: list[Split] = [(pp, tp, None) for pp, tp in itertools.product(range(1, 5), range(1, 5))]
UNEVEN: list[Split] = [(2, 3, (6, 1)), (3, 2, (1, 1, 5)), (2, 5, (3, 4)), (1, 7, None)]
NUM_BLOCKS = 12
LAYERS = [layer_name(number) for number in range(len(WINDOWS))] + list(DRAFT)
Values = dict[str, np.ndarray]  # by layer: [num_blocks, 2, heads of the model, block_size, head_size] int16


class Engine:
    """All ranks of an engine, with caches of their own and one shared tier."""

    def __init__(self, split: Split, region: OffloadRegion | None = None) -> None:
        pp, tp, counts = split
        facts = make_facts(pp, tp, counts)
        _, self.cache = plan_cache(make_engine_config(num_gpu_blocks_override=NUM_BLOCKS), facts)
        self.chunks = ChunkFormat(self.cache)
        self.region = region or OffloadRegion(8, self.chunks.chunk_bytes)
        heads = {
            each.shard: {n: spec.heads for n, spec in {**each.kv_cache_specs, **each.draft_kv_cache_specs}.items()}
            for each in facts
        }
        self.tensors: dict[ShardId, dict[str, torch.Tensor]] = {}
        self.heads = heads
        self.workers: dict[ShardId, OffloadingWorker] = {}
        for each in facts:
            part: KVCacheConfig = self.cache.part({**each.kv_cache_specs, **each.draft_kv_cache_specs})
            cache = allocate_kv_cache(part, lambda num_bytes: torch.full((num_bytes,), 0xEE, dtype=torch.uint8))
            worker = OffloadingWorker(self.region, each.shard, self.chunks, heads)
            worker.register_kv_caches(HostKVCacheView(cache))
            self.workers[each.shard] = worker
            self.tensors[each.shard] = cache.tensors

    def fill(self, values: Values, group: int, block_id: int) -> None:
        for name, shard, tensor in self.layers_of(group):
            first, end = self.heads[shard][name]
            tensor[block_id] = torch.from_numpy(values[name][block_id, :, first:end]).view(torch.bfloat16)

    def holds(self, values: Values, group: int, block_id: int, of: int) -> bool:
        """Returns whether block `block_id` of all ranks has the content of block `of`."""
        found = True
        for name, shard, tensor in self.layers_of(group):
            first, end = self.heads[shard][name]
            found &= np.array_equal(tensor[block_id].view(torch.int16).numpy(), values[name][of, :, first:end])
        return found

    def layers_of(self, group: int) -> Iterator[tuple[str, ShardId, torch.Tensor]]:
        window = self.cache.groups[group].spec.sliding_window
        for shard, tensors in self.tensors.items():
            for name, tensor in tensors.items():
                if (DRAFT[name] if name in DRAFT else WINDOWS[int(name.split(".")[2])]) == window:
                    yield name, shard, tensor

    def run(self, metadata: OffloadMetadata, order: random.Random) -> list[TransferReport]:
        """Runs a step of every rank, in random order."""
        reports: list[TransferReport] = []
        for shard in order.sample(sorted(self.workers), len(self.workers)):
            worker = self.workers[shard]
            worker.begin_step(metadata)
            worker.start_load_kv()
            reports += worker.get_finished(frozenset()).reports
            worker.end_step()
        return sorted(reports, key=lambda report: report.shard)

    def store(self, blocks: Sequence[StoreBlock], order: random.Random) -> list[bytes]:
        """Stores blocks; returns their digests as the scheduler's side computes them."""
        reports = self.run(OffloadMetadata((OffloadStore("store", tuple(blocks)),)), order)
        assert [report.shard for report in reports] == sorted(self.workers)
        return [reduce(add_digests, each) for each in zip(*(report.digests for report in reports), strict=True)]

    def load(self, blocks: Sequence[LoadBlock], order: random.Random) -> list[TransferReport]:
        return self.run(OffloadMetadata((), (OffloadLoad("load", tuple(blocks)),)), order)


def make_values(seed: int) -> Values:
    rng = np.random.default_rng(seed)
    return {
        name: rng.integers(-9999, 9999, (NUM_BLOCKS, 2, NUM_HEADS // (2 if name in DRAFT else 1), 16, 8), np.int16)
        for name in LAYERS
    }


STORES = [StoreBlock(0, 3, 5, True), StoreBlock(1, 7, 0, True), StoreBlock(0, 4, 2, True)]


def stored_by(split: Split, seed: int = 1) -> tuple[Engine, list[bytes]]:
    engine, values = Engine(split), make_values(1)
    for block in STORES:
        engine.fill(values, block.group, block.block_id)
    return engine, engine.store(STORES, random.Random(seed))


def payloads(engine: Engine) -> list[bytes]:
    """Returns the content of the chunks, up to the end of the table."""
    found: list[bytes] = []
    for block in STORES:
        chunk = engine.region.chunk(block.chunk_id)
        end = engine.chunks.table_starts[block.group] + engine.chunks.table(block.group, chunk).nbytes
        found.append(bytes(chunk[:end]))
    return found


@pytest.mark.parametrize("split", [*SPLITS, *UNEVEN])
def test_a_chunk_does_not_depend_on_the_split_that_wrote_it(split: Split) -> None:
    one, digests_of_one = stored_by((1, 1, None))
    engine, digests = stored_by(split, seed=sum(split[:2]))
    assert digests == digests_of_one
    assert payloads(engine) == payloads(one)
    for index, block in enumerate(STORES):
        assert engine.chunks.digest(block.group, engine.region.chunk(block.chunk_id)) == digests[index]


@contextmanager
def loaded(writer: Split, reader: Split) -> Iterator[tuple[Engine, Engine, list[LoadBlock]]]:
    stored, digests = stored_by(writer)
    engine = Engine(reader, stored.region)
    places = {0: iter((8, 9)), 1: iter((2,))}
    loads = [
        LoadBlock(block.group, next(places[block.group]), block.chunk_id, index, digests[index])
        for index, block in enumerate(STORES)
    ]
    yield stored, engine, loads


@pytest.mark.parametrize("reader", [*SPLITS, *UNEVEN])
@pytest.mark.parametrize("writer", [(1, 1, None), (1, 2, None), (4, 3, None), (3, 4, (1, 1, 5)), (2, 5, None)])
def test_every_split_loads_the_chunks_of_every_other(writer: Split, reader: Split) -> None:
    with loaded(writer, reader) as (_, engine, loads):
        reports = engine.load(loads, random.Random(2))
        assert [report.status for report in reports] == [TransferStatus.DONE] * len(engine.workers)
        for block, load in zip(STORES, loads, strict=True):
            assert engine.holds(make_values(1), load.group, load.block_id, block.block_id)


@pytest.mark.parametrize("reader", [(1, 1, None), (2, 3, None), (1, 7, None)])
def test_a_changed_byte_is_found_by_the_ranks_that_have_it(reader: Split) -> None:
    """Only these ranks find a changed payload byte; all ranks of the group find a changed table or another chunk."""
    rng = random.Random(0)
    with loaded((2, 2, None), reader) as (stored, engine, loads):
        start = engine.chunks.table_starts[0]
        end = start + engine.chunks.table(0, engine.region.chunk(5)).nbytes
        with_group = {shard for _, shard, _ in engine.layers_of(0)}
        for at in [*rng.sample(range(start), 60), *rng.sample(range(start, end), 20)]:
            chunk = stored.region.chunk(5)
            chunk[at] ^= 1
            failed = {r.shard for r in engine.load(loads[:1], rng) if r.status is TransferStatus.FAILED}
            chunk[at] ^= 1
            places = engine.chunks.places[0].items()
            found = [(name, place) for name, place in places if place.start <= at < place.start + place.num_bytes]
            having = with_group
            for name, place in found:
                head = (at - place.start) // (16 * 8 * 2) % place.num_heads
                having = {s for s, of in engine.heads.items() if name in of and of[name][0] <= head < of[name][1]}
            assert failed == having
        wrong = [LoadBlock(0, 8, 2, 0, loads[0].digest)]
        failed = {r.shard for r in engine.load(wrong, rng) if r.status is TransferStatus.FAILED}
        assert failed == with_group, "chunk 2 is another block's"


def test_one_rank_writes_a_head_that_several_ranks_have() -> None:
    engine = Engine((1, 7, None))
    written: dict[tuple[str, int], int] = {}
    for shard, worker in engine.workers.items():
        for name, _, _ in [each for each in engine.layers_of(0) if each[1] == shard]:
            (part,) = [p for p in worker._chunks._parts[0] if p.place == engine.chunks.places[0][name]]
            for head in range(part.first_written, part.end):
                written[name, head] = written.get((name, head), 0) + 1
    expected = {(name, head) for name in LAYERS[:3] + LAYERS[4:5] for head in range(NUM_HEADS)}
    assert written == dict.fromkeys(expected | {(name, head) for name in DRAFT for head in range(NUM_HEADS // 2)}, 1)


def test_a_block_without_attestation() -> None:
    engine, values = Engine((2, 2, None)), make_values(1)
    engine.fill(values, 0, 3)
    reports = engine.run(OffloadMetadata((OffloadStore("store", (StoreBlock(0, 3, 1, False),)),)), random.Random(0))
    assert {report.digests for report in reports} == {(b"",)}
    reports = engine.load([LoadBlock(0, 6, 1, 0, None)], random.Random(0))
    assert {report.status for report in reports} == {TransferStatus.DONE}
    assert engine.holds(values, 0, 6, 3)


@pytest.mark.parametrize(("writer", "reader"), [((1, 2, None), (1, 1, None)), ((3, 1, None), (2, 4, None))])
def test_chunks_on_disk_are_loaded_after_a_restart_with_other_ranks(
    writer: Split, reader: Split, tmp_path: Path
) -> None:
    keys: tuple[OffloadKey, ...] = tuple((block.group, bytes([number]) * 32) for number, block in enumerate(STORES))
    stored, digests = stored_by(writer)
    config = DiskTierConfig(tmp_path, 1 << 30)
    tier = DiskTier(config, b"f" * 16, stored.region)
    assert tier.submit_store(TransferJob(1, keys, tuple(b.chunk_id for b in STORES), tuple(digests), False))
    tier.drain_jobs()
    assert len(tier.get_finished_jobs()[0].successful_keys) == 3
    tier.shutdown()

    engine = Engine(reader)
    tier = DiskTier(config, b"f" * 16, engine.region)
    assert tier.submit_load(TransferJob(1, keys, (6, 1, 3), (None,) * 3, True))
    tier.drain_jobs()
    (result,) = tier.get_finished_jobs()
    tier.shutdown()
    found = dict(zip(result.successful_keys, result.digests, strict=True))
    loads = [
        LoadBlock(key[0], 9 + index % 2, chunk, index, found[key])
        for index, (key, chunk) in enumerate(zip(keys, (6, 1, 3), strict=True))
    ]
    loads[2] = LoadBlock(0, 11, 3, 2, found[keys[2]])
    reports = engine.load(loads, random.Random(0))
    assert {report.status for report in reports} == {TransferStatus.DONE}
    for block, load in zip(STORES, loads, strict=True):
        assert engine.holds(make_values(1), load.group, load.block_id, block.block_id)
