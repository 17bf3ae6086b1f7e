"""Digests, the keys that get one, the region of chunks, and the choice between loading and computing."""

from __future__ import annotations

import itertools
import mmap
import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.kv_transfer.digest import SAMPLED_ONE_IN, Attestation
from penstock.kv_transfer.offload.cost_model import LoadCostModel
from penstock.kv_transfer.offload.messages import StateChunks
from penstock.kv_transfer.offload.region import OffloadRegion
from penstock.utils.digest import DIGEST_BYTES, digest
from penstock.utils.errors import ConfigError
from penstock.utils.shared_memory import SharedMemory
from tests.unit.offload_fakes import make_key

MIB = 1 << 20


@given(data=st.binary(max_size=200), cuts=st.lists(st.integers(0, 200), max_size=3))
def test_a_digest_does_not_depend_on_how_the_bytes_are_split(data: bytes, cuts: list[int]) -> None:
    places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    parts = [memoryview(data)[start:end] for start, end in itertools.pairwise(places)]
    assert digest(*parts) == digest(data)
    assert len(digest(data)) == DIGEST_BYTES


def test_the_digest_matches_a_published_test_vector() -> None:
    # The XXH3-128 of the empty input, from the specification's test vectors.
    assert digest().hex() == "99aa06d3014798d86001c324468d497f"


@given(st.binary(min_size=1, max_size=300), st.integers(0, 10_000))
def test_a_flipped_bit_changes_the_digest(data: bytes, place: int) -> None:
    changed = bytearray(data)
    changed[place // 8 % len(data)] ^= 1 << place % 8
    assert digest(changed) != digest(data)


def test_attestation_covers_all_none_or_a_sample_of_the_keys() -> None:
    keys = [make_key(number, group) for number in range(4000) for group in range(4)]
    assert all(Attestation("all").covers(key) for key in keys)
    assert not any(Attestation("off").covers(key) for key in keys)
    sampled = Attestation("sampled")
    for group in range(4):
        covered = [key for key in keys if key[0] == group and sampled.covers(key)]
        assert len(covered) == pytest.approx(4000 / SAMPLED_ONE_IN, rel=0.2)
        assert all(Attestation("sampled").covers((key[0], bytes(key[1]))) for key in covered), "both ends agree"


def test_chunks_of_a_region_do_not_overlap() -> None:
    region = OffloadRegion(1 << 10, MIB)
    region.chunk(3)[:] = b"\x03" * MIB
    region.chunk(4)[0] = 4
    assert bytes(region.chunk(3)[-1:]) == b"\x03"
    assert bytes(region.chunk(4)[:2]) == b"\x04\x00"
    assert region.chunk((1 << 10) - 1).nbytes == MIB
    for outside in (-1, 1 << 10):
        with pytest.raises(AssertionError):
            region.chunk(outside)


@pytest.mark.parametrize(("block_bytes", "state_bytes"), [(100, 3 * mmap.PAGESIZE), (mmap.PAGESIZE, 100), (100, 100)])
def test_chunks_of_two_sizes_in_one_region(block_bytes: int, state_bytes: int) -> None:
    states = StateChunks(group=1, num_chunks=3, chunk_bytes=state_bytes)
    region = OffloadRegion(5, block_bytes, states)
    attached = OffloadRegion.attach(region.memory, block_bytes, states)
    assert (attached.num_chunks, attached.num_chunk_ids) == (5, 8)
    assert (region.bytes_of(0), region.bytes_of(1), region.bytes_of(2)) == (block_bytes, state_bytes, block_bytes)
    for number in range(8):
        region.chunk(number)[:] = bytes([number + 1]) * len(region.chunk(number))
    for number in range(8):
        num_bytes = state_bytes if number >= 5 else block_bytes
        assert attached.chunk(number) == bytes([number + 1]) * num_bytes
        if num_bytes % mmap.PAGESIZE == 0:
            address = np.frombuffer(region.chunk(number), np.uint8).ctypes.data
            assert address % mmap.PAGESIZE == 0, "a disk could not bypass the page cache"
    with pytest.raises(AssertionError):
        region.chunk(8)


def test_memory_of_both_sizes_is_populated_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    populated: list[int] = []
    monkeypatch.setattr(SharedMemory, "populate", lambda self, start, num_bytes: populated.append(start))
    states = StateChunks(group=1, num_chunks=1 << 10, chunk_bytes=MIB)
    region = OffloadRegion(1 << 10, MIB, states)
    region.chunk((1 << 10) + 200)
    region.chunk(200)
    region._ahead._end()
    region._ahead._thread.join()
    blocks = {start - (1 << 30) for start in populated if start >= 1 << 30}
    assert max(blocks) == 456 * MIB, "states far ahead do not count as those of blocks"
    assert max(start for start in populated if start < 1 << 30) == 456 * MIB


@pytest.mark.long
@pytest.mark.alone
def test_memory_is_populated_shortly_ahead_of_use() -> None:
    """It is measured in a process of its own, because the memory of other tests varies."""
    code = f"""
import mmap, time
from pathlib import Path
from penstock.kv_transfer.offload.region import OffloadRegion

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

def wait_for(num_bytes):
    end = time.monotonic() + 30
    while resident() - before < num_bytes and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(0.2)
    return (resident() - before) >> 20

before = resident()
region = OffloadRegion(2 << 10, {MIB})
print(wait_for(250 << 20))
for number in range(200):
    region.chunk(number)
print(wait_for(300 << 20))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, later = map(int, done.stdout.split())
    assert 250 <= first < 300
    assert 300 <= later < 520


def test_a_region_closes_after_the_memory_being_populated_and_populates_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread of the lowest priority would otherwise keep a busy machine's process from ending."""
    has_begun, may_end, populated = threading.Event(), threading.Event(), list[int]()

    def populate(self: SharedMemory, start: int, num_bytes: int) -> None:
        populated.append(start)
        has_begun.set()
        may_end.wait()

    monkeypatch.setattr(SharedMemory, "populate", populate)
    region = OffloadRegion(1 << 10, MIB)
    has_begun.wait()
    closing = threading.Thread(target=region.close)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive(), "it closed the memory that a thread was still writing to"
    may_end.set()
    closing.join()
    assert populated == [0]


@pytest.mark.parametrize("num_chunks", [0, -1, 1 << 42, 1 << 62])
def test_the_error_for_an_impossible_region_names_the_flag(num_chunks: int) -> None:
    with pytest.raises(ConfigError, match="cpu_bytes_to_use"):
        OffloadRegion(num_chunks, mmap.PAGESIZE)


def measured(load_seconds: float, compute_seconds: float) -> LoadCostModel:
    """Returns a model that has measured 100 tokens computed, and loads of 1 and 3 MiB at `load_seconds` per MiB."""
    model = LoadCostModel(retry_seconds=10.0)
    model.on_computed(100, compute_seconds)
    for num_mib in (1, 3, 1, 3):
        model.on_loaded("STORAGE", num_mib * MIB, num_mib * load_seconds)
    return model


def test_chunks_are_loaded_until_both_costs_are_measured() -> None:
    model = LoadCostModel()
    assert model.should_load("STORAGE", 1, MIB)
    model.on_loaded("STORAGE", MIB, 100.0)
    assert model.should_load("STORAGE", 1, MIB), "computing has not been measured yet"
    model.on_computed(1000, 0.01)
    assert not model.should_load("STORAGE", 1, MIB)
    assert model.should_load("CPU", 1, MIB), "the other medium has not been measured yet"


def test_the_cheaper_choice_is_made() -> None:
    assert measured(load_seconds=0.01, compute_seconds=1.0).should_load("STORAGE", 100, MIB)
    assert not measured(load_seconds=1.0, compute_seconds=0.1).should_load("STORAGE", 100, MIB)


def test_the_fixed_cost_makes_short_loads_uneconomical() -> None:
    model = LoadCostModel()
    model.on_computed(100, 0.1)
    for num_mib in (1, 10, 1, 10):
        model.on_loaded("STORAGE", num_mib * MIB, 0.05 + 0.001 * num_mib)
    assert not model.should_load("STORAGE", 16, MIB)
    assert model.should_load("STORAGE", 160, 10 * MIB)


def test_should_load_does_not_change_the_model() -> None:
    model = measured(load_seconds=1.0, compute_seconds=0.1)
    assert not any(model.should_load("STORAGE", 100, MIB) for _ in range(1000))


def test_a_slower_medium_is_retried_and_a_wrong_measurement_fades() -> None:
    model = measured(load_seconds=100.0, compute_seconds=0.1)
    num_tries = 0
    for _ in range(20_000):
        if model.should_load("STORAGE", 100, MIB):
            num_tries += 1
            model.on_loaded("STORAGE", MIB, 0.01)
        else:
            model.on_computed(100, 0.1)
    assert num_tries > 15_000, "in the end loading is recognised as cheaper"


def test_a_slower_medium_is_retried_rarely() -> None:
    model = measured(load_seconds=1.0, compute_seconds=0.1)
    num_tries = 0
    for _ in range(10_000):
        if model.should_load("STORAGE", 100, MIB):
            num_tries += 1
            model.on_loaded("STORAGE", MIB, 1.0)
        else:
            model.on_computed(100, 0.1)
    assert 50 <= num_tries <= 110, "once in 10 seconds of computing, at 0.1 s each"


@given(
    st.lists(st.tuples(st.integers(0, 1 << 34), st.floats(0, 1e4)), min_size=1, max_size=20),
    st.integers(0, 1 << 34),
)
def test_no_measurement_makes_a_prediction_negative(loads: list[tuple[int, float]], num_bytes: int) -> None:
    model = LoadCostModel()
    for size, seconds in loads:
        model.on_loaded("CPU", size, seconds)
    assert model._media["CPU"].line.at(num_bytes) >= 0.0
