"""Registered memory as one flat address space."""

import ctypes

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.kv_transfer.topology.planner import merge
from penstock.kv_transfer.transports.flat_memory import (
    FlatMemory,
    check_ranges,
    check_runs,
    pair_segments,
)
from penstock.kv_transfer.transports.memory_copy import copy_in_pieces
from penstock.utils.errors import PeerError


@given(st.lists(st.binary(max_size=9), max_size=6), st.data())
def test_flat_offsets_address_the_regions_one_after_another(contents, data):
    flat = b"".join(contents)
    memory = FlatMemory([memoryview(bytearray(each)) for each in contents])
    assert memory.num_bytes == len(flat)
    at = st.integers(0, len(flat))
    cuts = [sorted(data.draw(st.tuples(at, at))) for _ in range(data.draw(st.integers(0, 5)))]
    ranges = np.array([(start, end - start) for start, end in cuts], np.int64).reshape(-1, 2)
    for start, end in cuts:
        assert memory.read(start, end - start) == flat[start:end]
    segments = memory.segments(ranges)
    assert (segments[:, 1] > 0).all()
    found = b"".join(ctypes.string_at(address, size) for address, size in segments.tolist())
    assert found == b"".join(flat[start:end] for start, end in cuts)
    assert len(merge(segments)) <= len(segments)
    assert b"".join(ctypes.string_at(address, size) for address, size in merge(segments).tolist()) == found
    for start, end in cuts:
        memory.write(start, bytes(reversed(flat[start:end])))
        flat = flat[:start] + flat[start:end][::-1] + flat[end:]
    assert memory.read(0, len(flat)) == flat


@pytest.mark.parametrize(
    ("offset", "size"), [(-1, 1), (0, -1), (0, 11), (10, 1), (11, 0), ((1 << 63) - 1, (1 << 63) - 1), (-(1 << 63), 5)]
)
def test_ranges_outside_the_memory_are_refused(offset, size):
    good = np.array([[0, 0, 10], [10, 0, 0]], np.int64)
    check_runs(good, 10, 10)
    bad = np.array([[0, 10], [offset, size]], np.int64)
    with pytest.raises(PeerError, match="run 1 is outside the local memory"):
        check_ranges(bad[:, 0], bad[:, 1], 10, "local")
    for run in ((0, offset, size), (offset, 0, size)):
        with pytest.raises(PeerError, match="outside"):
            check_runs(np.array([run], np.int64), 10, 10)


@given(st.lists(st.integers(0, 9), max_size=5), st.lists(st.integers(0, 9), max_size=5), st.data())
def test_runs_between_memories_with_different_regions_are_copied(local_sizes, remote_sizes, data):
    local = FlatMemory([memoryview(bytearray(size)) for size in local_sizes])
    remote = FlatMemory([memoryview(bytearray(b"\xff" * size)) for size in remote_sizes])
    remote.write(0, bytes(range(1, remote.num_bytes + 1)))
    runs: list[tuple[int, int, int]] = []
    expected = bytearray(local.num_bytes)
    at = 0
    while at < local.num_bytes and data.draw(st.booleans()):
        size = data.draw(st.integers(0, min(local.num_bytes - at, remote.num_bytes)))
        source = data.draw(st.integers(0, remote.num_bytes - size))
        runs.append((at, source, size))
        expected[at : at + size] = remote.read(source, size)
        at += size + data.draw(st.integers(0, 3))
    for _ in copy_in_pieces(pair_segments(local, remote, np.array(runs, np.int64).reshape(-1, 3))):
        pass
    assert local.read(0, local.num_bytes) == expected


@pytest.mark.parametrize("size", [1, 100, 40 << 10, 9 << 20])
def test_small_and_large_runs_are_copied(size):
    count = max(3, 3000 // size)
    source = np.random.default_rng(0).integers(0, 256, count * size, np.uint8)
    into = np.zeros_like(source)
    order = np.random.default_rng(1).permutation(count)
    starts = np.arange(count)
    runs = np.stack(
        [into.ctypes.data + starts * size, source.ctypes.data + order * size, np.full(count, size)], 1
    ).astype(np.int64)
    num_pieces = len(list(copy_in_pieces(runs)))
    assert num_pieces >= count * size / (8 << 20)
    assert (into.reshape(count, size) == source.reshape(count, size)[order]).all()
