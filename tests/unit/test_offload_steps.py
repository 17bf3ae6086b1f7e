"""The work of the OffloadingConnector per step and per completed block is bounded for any length of prompt."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import pytest

from penstock.kv_transfer.offload import OffloadKey
from penstock.kv_transfer.offload.manager import LookupResult, OffloadingManager, Prompt
from penstock.kv_transfer.offload.messages import LoadBlock, OffloadLoad, OffloadMetadata, OffloadStore, StoreBlock
from penstock.kv_transfer.offload.policies import ARCPolicy, CachePolicy, LRUPolicy
from penstock.kv_transfer.offload.region import OffloadRegion
from penstock.kv_transfer.offload.worker import OffloadingWorker
from penstock.kv_transfer.topology.chunks import ChunkFormat
from penstock.kv_transfer.view import DONE, Parts, Place, Take, Transfer
from penstock.messages.kv_cache_spec import KVCacheConfig, KVCacheGroup, KVCacheSpec
from penstock.messages.kv_layout import KVLayout, LayerLayout, MemoryRegion
from penstock.messages.kv_transfer import BadRange, TransferId, TransferReport, TransferStatus
from penstock.utils.clock import ManualClock
from penstock.utils.digest import DIGEST_BYTES
from tests.unit.offload_fakes import make_key
from tests.unit.transfer_names import named

MIB = 1 << 20


class CountingView:
    """A cache of one layer, in the memory of the host or of a device; records the blocks that are written."""

    def __init__(self, block_bytes: int, device: str = "cpu") -> None:
        shape = (99, 2, 1, 4, block_bytes // 32)
        strides = (block_bytes, block_bytes // 2, block_bytes // 2, block_bytes // 8, 4)
        layer = LayerLayout("a", 0, "kv", 0, "float32", ("block", "kv", "head", "token", "dim"), shape, strides, (0, 1))
        self.layout = KVLayout(4, (MemoryRegion("kv", 99 * block_bytes, device),), (layer,))
        self.written: list[Place] = []

    def write_blocks(self, places: Sequence[Place], data: Sequence[Parts], take: Take) -> Transfer:
        self.written += places
        for number, each in enumerate(data):
            take(number, each)
        return DONE


def make_worker(view: Any, block_bytes: int) -> OffloadingWorker:
    spec = KVCacheSpec.keys_and_values(1, block_bytes // 32, "float32")
    chunks = ChunkFormat(KVCacheConfig(99, 4, (KVCacheGroup(("a",), spec),)))
    worker = OffloadingWorker(OffloadRegion(12, chunks.chunk_bytes), (0, 0), chunks, {})
    worker.register_kv_caches(view)
    return worker


def make_load(name: str, num_blocks: int, first: int = 1, digest: bytes | None = None) -> OffloadLoad:
    blocks = (LoadBlock(0, first + index, index, index, digest) for index in range(num_blocks))
    return OffloadLoad(named(name), tuple(blocks))


def run_step(
    worker: OffloadingWorker,
    *loads: OffloadLoad,
    stores: tuple[OffloadStore, ...] = (),
    cancelled: tuple[TransferId, ...] = (),
) -> list[TransferReport]:
    worker.begin_step(OffloadMetadata(stores, loads, cancelled))
    worker.start_load_kv()
    output = worker.get_finished(frozenset())
    worker.wait_for_save()
    worker.end_step()
    return list(output.reports)


def test_a_long_load_takes_several_steps() -> None:
    view = CountingView(3 * MIB)
    worker = make_worker(view, 3 * MIB)
    assert run_step(worker, make_load("one", 5), make_load("two", 1, first=50)) == []
    assert view.written == [(0, 1), (0, 2)], "two blocks of 3 MiB fit into 8 MiB"
    assert run_step(worker) == []
    assert view.written[2:] == [(0, 3), (0, 4)]
    assert [report.transfer_id for report in run_step(worker)] == [named("one"), named("two")]
    assert view.written[4:] == [(0, 5), (0, 50)], "loads stay in order, and share a step's bytes"
    assert run_step(worker) == []


def test_no_more_of_a_cancelled_load_is_copied() -> None:
    """It ends at once, and those behind it begin; also if it is cancelled before its first step."""
    view = CountingView(3 * MIB)
    worker = make_worker(view, 3 * MIB)
    assert run_step(worker, make_load("one", 4), make_load("two", 3, first=50)) == []
    (ended,) = run_step(worker, cancelled=(named("one"),))
    assert view.written == [(0, 1), (0, 2), (0, 50), (0, 51)]
    assert (ended.transfer_id, ended.status) == (named("one"), TransferStatus.FAILED)
    assert ended.bad_ranges == (BadRange(0, 8, 12), BadRange(0, 12, 16))
    ended, other = run_step(worker, make_load("three", 1), cancelled=(named("three"), named("one"), named("never")))
    assert (ended.transfer_id, ended.status, other.transfer_id) == (named("two"), TransferStatus.DONE, named("three"))
    assert view.written[4:] == [(0, 52)]


def test_a_long_step_lets_the_next_one_load_more() -> None:
    """An eighth of its time, so that a load ends before its deadline however long steps are; a pause does not count."""
    view, clock = CountingView(3 * MIB), ManualClock()
    worker = make_worker(view, 3 * MIB)
    worker._clock = clock

    def step(seconds: float, *loads: OffloadLoad) -> int:
        before = len(view.written)
        worker.begin_step(OffloadMetadata((), loads))
        worker.start_load_kv()
        clock.advance(seconds)
        worker.get_finished(frozenset())
        worker.end_step()
        return len(view.written) - before

    assert step(0.06, make_load("one", 12)) == 2
    clock.advance(100)
    assert step(0.001) == 10, "30 MiB at 512 MiB/s"
    assert step(0.02, make_load("two", 12)) == 2
    assert step(0.0) == 3, "10 MiB"
    assert step(0.0) == 2


def test_a_bad_block_of_any_step_is_reported_at_the_end() -> None:
    worker = make_worker(CountingView(3 * MIB), 3 * MIB)
    assert run_step(worker, make_load("one", 3, digest=b"x" * 16)) == []
    (report,) = run_step(worker)
    assert report.status is TransferStatus.FAILED
    assert [(bad.start, bad.end) for bad in report.bad_ranges] == [(0, 4), (4, 8), (8, 12)]


def test_a_block_larger_than_the_limit_is_loaded_alone() -> None:
    view = CountingView(9 * MIB)
    worker = make_worker(view, 9 * MIB)
    assert run_step(worker, make_load("one", 2)) == []
    assert len(view.written) == 1
    assert [report.transfer_id for report in run_step(worker)] == [named("one")]


def test_a_load_to_a_device_takes_one_step() -> None:
    view = CountingView(3 * MIB, device="cuda")
    assert len(run_step(make_worker(view, 3 * MIB), make_load("one", 9))) == 1


class DeviceView(CountingView):
    """The cache of a device, whose copies end, or fail, when a test says so."""

    def __init__(self, block_bytes: int) -> None:
        super().__init__(block_bytes, device="cuda")
        self.is_done = False
        self.error: Exception | None = None
        self.num_waits = 0

    def read_blocks(self, places: Sequence[Place], take: Take) -> Transfer:
        for number in range(len(places)):
            take(number, [memoryview(bytes([number]) * (self.layout.block_bytes(0)))])
        return self

    def write_blocks(self, places: Sequence[Place], data: Sequence[Parts], take: Take) -> Transfer:
        super().write_blocks(places, data, take)
        return self

    def done(self) -> bool:
        return self.is_done

    def result(self) -> None:
        self.num_waits += 1
        if self.error is not None:
            raise self.error


STORE = OffloadStore(named("store"), (StoreBlock(0, 1, 0, is_attested=True), StoreBlock(0, 2, 1, is_attested=False)))


def test_copies_of_a_device_are_reported_when_they_have_ended() -> None:
    view = DeviceView(MIB)
    worker = make_worker(view, MIB)
    assert run_step(worker, make_load("load", 2), stores=(STORE,)) == []
    assert run_step(worker) == []
    view.is_done = True
    stored, loaded = run_step(worker)
    assert (stored.transfer_id, loaded.transfer_id) == (named("store"), named("load"))
    assert [len(each) for each in stored.digests] == [DIGEST_BYTES, 0], "one of the blocks has a digest"
    assert view.num_waits == 2
    assert run_step(worker) == []


def test_a_copy_of_a_device_that_failed_ends_the_step() -> None:
    view = DeviceView(MIB)
    worker = make_worker(view, MIB)
    run_step(worker, stores=(STORE,))
    view.is_done, view.error = True, RuntimeError("the device is lost")
    with pytest.raises(RuntimeError, match="the device is lost"):
        run_step(worker)


def test_shutdown_waits_for_copies() -> None:
    view = DeviceView(MIB)
    worker = make_worker(view, MIB)
    run_step(worker, make_load("load", 1), stores=(STORE,))
    worker.shutdown()
    assert view.num_waits == 2


def test_blocks_are_read_before_the_step_writes_anything() -> None:
    view = DeviceView(MIB)
    worker = make_worker(view, MIB)
    worker.begin_step(OffloadMetadata((STORE,), (make_load("load", 1),)))
    assert bytes(worker._region.chunk(1)[:4]) == b"\1\1\1\1"
    assert view.written == []


def test_a_rank_without_the_layers_of_a_group_loads_and_stores_nothing_of_it() -> None:
    spec = KVCacheSpec.keys_and_values(1, MIB // 32, "float32")
    cache = KVCacheConfig(99, 4, (KVCacheGroup(("a",), spec), KVCacheGroup(("b",), spec)))
    chunks, view = ChunkFormat(cache), DeviceView(MIB)
    heads = {(0, 0): {"a": (0, 1)}, (1, 0): {"b": (0, 1)}}
    worker = OffloadingWorker(OffloadRegion(12, chunks.chunk_bytes), (0, 0), chunks, heads)
    worker.register_kv_caches(view)
    store = OffloadStore(named("store"), tuple(StoreBlock(group, 1, group, is_attested=True) for group in range(2)))
    load = OffloadLoad(named("load"), tuple(LoadBlock(group, 1, group, 0, None) for group in range(2)))
    view.is_done = True
    stored, _ = run_step(worker, load, stores=(store,))
    assert view.written == [(0, 1)]
    assert stored.digests[0] != stored.digests[1] == bytes(DIGEST_BYTES), "what it lacks adds nothing to the digest"


def test_shutdown_drops_loads_that_no_step_has_begun() -> None:
    view = CountingView(3 * MIB)
    worker = make_worker(view, 3 * MIB)
    run_step(worker, make_load("one", 5))
    worker.shutdown()
    assert len(view.written) == 2


@pytest.mark.spread(1)
@pytest.mark.parametrize("seed", range(6))
def test_a_tail_never_outlives_its_head(seed: int) -> None:
    """Prompts that share a stem grow block by block, beside others that end; the tier is far too small for all."""
    chance = random.Random(seed)
    manager = OffloadingManager(100, LRUPolicy())
    parent: dict[OffloadKey, OffloadKey] = {}
    live: list[tuple[Prompt, list[OffloadKey]]] = []
    num_evicted = 0
    for step in range(1500):
        if len(live) < 3:
            stem = [make_key(number) for number in range(chance.randrange(30))]
            keys = stem + [make_key(1000 * step + number) for number in range(100, 100 + chance.randint(1, 30))]
            parent.update(zip(keys[1:], keys, strict=False))
            live.append((Prompt(), keys))
        prompt, keys = chance.choice(live)
        first = len(prompt.places)
        new = [(key, first + number) for number, key in enumerate(keys[first : first + chance.randint(1, 3)])]
        prompt.places.update(new)
        here = {key for key in parent if manager.lookup(key) is LookupResult.HIT}
        for key, _ in manager.prepare_store(new, prompt):
            manager.complete_store(key, b"d" * 16, success=True)
        gone = {key for key in here if manager.lookup(key) is LookupResult.MISS}
        num_evicted += len(gone)
        orphans = [key for key, head in parent.items() if head in gone and manager.lookup(key) is LookupResult.HIT]
        assert not orphans, f"step {step}: {len(orphans)} keys have lost their head"
        if len(prompt.places) == len(keys) or chance.random() < 0.05:
            live.remove((prompt, keys))
            manager.touch(list(prompt.places))
    assert num_evicted > 200
    manager.check_integrity()


def num_instructions(work: Callable[[], None]) -> int:
    """The interpreter's instructions: every lookup, every heap operation and every key of a walk takes some."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def grow(manager: OffloadingManager, prompts: Sequence[Prompt], num_blocks: int) -> None:
    """Every prompt computes that many blocks, one by one and in turns."""
    for _ in range(num_blocks):
        for number, prompt in enumerate(prompts):
            place = len(prompt.places)
            new = (make_key(place, group=number), place)
            prompt.places.update([new])
            for key, _ in manager.prepare_store([new], prompt):
                manager.complete_store(key, None, success=True)


def work_per_block(make_policy: Callable[[int], CachePolicy], num_prompts: int, old_share: int, length: int) -> float:
    """Instructions per block of prompts that grow from `length` on in a full tier, with the refreshes that are due."""
    num_chunks = num_prompts * length * (1 + old_share)
    manager = OffloadingManager(num_chunks, make_policy(num_chunks))
    ended = Prompt({make_key(place, group=99): place for place in range(num_chunks)})
    for key, _ in manager.prepare_store(list(ended.places.items()), ended):
        manager.complete_store(key, None, success=True)
    prompts = [Prompt() for _ in range(num_prompts)]
    grow(manager, prompts, length)
    assert manager.stats.num_free == 0
    num_blocks = length // 4
    return num_instructions(lambda: grow(manager, prompts, num_blocks)) / (num_blocks * num_prompts)


@pytest.mark.spread(3)
@pytest.mark.parametrize("make_policy", [lambda _: LRUPolicy(), ARCPolicy], ids=["lru", "arc"])
@pytest.mark.parametrize(
    ("num_prompts", "old_share"),
    [(1, 0), (4, 0), (4, 1)],
    ids=["one prompt fills the tier", "the live prompts fill the tier", "half of the tier is old"],
)
def test_the_work_per_block_does_not_depend_on_the_length_of_the_prompt(
    make_policy: Callable[[int], CachePolicy], num_prompts: int, old_share: int
) -> None:
    short, long = (work_per_block(make_policy, num_prompts, old_share, length) for length in (64, 512))
    assert long < 1.5 * short, f"{short:.0f} instructions per block for short prompts, {long:.0f} for long ones"
