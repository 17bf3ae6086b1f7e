"""Registered memory as one flat address space."""

import ctypes

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.kv_transfer.transports.flat_memory import FlatMemory, check_ranges, check_runs
from penstock.utils.errors import PeerError


@given(st.lists(st.binary(max_size=9), max_size=6), st.data())
def test_flat_offsets_address_the_regions_one_after_the_other(contents, data):
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
