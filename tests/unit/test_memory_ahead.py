"""Memory is allocated before it is used for the first time."""

import ctypes
import itertools
import mmap
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest

from penstock.kv_transfer.transports import peers
from penstock.kv_transfer.transports.sockets import SocketsTransport
from penstock.utils import memory_ahead, shared_memory
from penstock.utils.memory_ahead import Area, MemoryAhead
from penstock.utils.shared_memory import populate_memory

MIB = 1 << 20
KEY = b"k" * 32


def recorded(areas: list[Area], *uses: tuple[int, int]) -> list[tuple[int, int]]:
    """Returns the intervals that are populated, in order."""
    found: list[tuple[int, int]] = []
    ahead = MemoryAhead(areas, lambda start, num_bytes: found.append((start, start + num_bytes)))
    for number, used in uses:
        ahead.use(number, used)
    ahead._end()
    ahead._thread.join()
    return found


def test_an_area_is_populated_ahead_of_its_use_and_never_beyond_its_end() -> None:
    def area() -> Area:
        return Area(start=MIB, num_bytes=9 * MIB, ahead=4 * MIB)

    assert recorded([area()], (0, 0)) == [(MIB, 2 * MIB), (2 * MIB, 4 * MIB), (4 * MIB, 6 * MIB)]
    assert recorded([area()], (0, 0), (0, 2 * MIB)) == recorded([area()], (0, 0)), "half of it is ready"
    assert recorded([area()], (0, 9 * MIB)) == [], "nothing follows"
    assert recorded([area()], (0, 7 * MIB))[-1] == (8 * MIB, 10 * MIB)
    assert recorded([Area(0, 0), area()], (0, 0), (1, 8 * MIB)) == [(8 * MIB, 10 * MIB)]


_WITHOUT_CLOSE = """
import time
from penstock.utils.memory_ahead import Area, MemoryAhead
kept = MemoryAhead([Area(0, 1 << 30)], lambda *_: time.sleep(1000))
kept.use(0, 0)
"""


def test_a_program_ends_while_memory_waits_to_be_populated() -> None:
    """On a busy machine that may take minutes."""
    subprocess.run([sys.executable, "-c", _WITHOUT_CLOSE], check=True, timeout=60)


def test_the_thread_ends_with_its_owner() -> None:
    found: list[int] = []
    ahead = MemoryAhead([Area(0, 3 * MIB)], lambda start, _: found.append(start))
    ahead.use(0, 0)
    thread = ahead._thread
    del ahead
    thread.join(20)
    assert not thread.is_alive()
    assert found == [0, 2 * MIB]


def num_resident(mapping: mmap.mmap) -> int:
    address = np.frombuffer(mapping, np.uint8).ctypes.data
    pages = (ctypes.c_ubyte * (len(mapping) // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(mapping)), pages) == 0
    return sum(page & 1 for page in pages)


def test_populated_memory_keeps_its_content() -> None:
    mapping = mmap.mmap(-1, MIB)
    mapping[5000] = 7
    before = num_resident(mapping)
    populate_memory(np.frombuffer(mapping, np.uint8).ctypes.data + 5000, MIB // 2)
    assert before < MIB // 2 // mmap.PAGESIZE <= num_resident(mapping)
    assert mapping[5000] == 7


def test_no_call_locks_the_mappings_of_the_process_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of the lowest priority that loses its core within a call may wait for it for seconds."""
    calls, pauses, seconds = list[tuple[int, int]](), list[float](), itertools.count(0.0, 0.25)

    def madvise(address: ctypes.c_void_p, length: ctypes.c_size_t, _: int) -> None:
        calls.append((address.value or 0, length.value))

    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(madvise=madvise))
    monkeypatch.setattr(shared_memory, "time", SimpleNamespace(monotonic=seconds.__next__))
    monkeypatch.setattr(shared_memory, "threading", SimpleNamespace(Event=lambda: SimpleNamespace(wait=pauses.append)))
    populate_memory(10 * MIB + 5000, 2 * MIB)
    assert pauses == [0.25] * len(calls), "it pauses as long as each call took"
    assert max(length for _, length in calls) <= MIB // 8
    ends = [address + length for address, length in calls]
    assert [10 * MIB + 4096, *ends[:-1]] == [address for address, _ in calls]
    assert ends[-1] == 12 * MIB + 5000


def test_the_memory_of_a_transport_is_allocated_before_transfers_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "AHEAD_BYTES", 8 * MIB)
    monkeypatch.setattr(memory_ahead, "give_way", lambda: None)
    source, target = SocketsTransport("127.0.0.1", KEY), SocketsTransport("127.0.0.1", KEY)
    try:
        mappings = [mmap.mmap(-1, 16 * MIB) for _ in range(2)]
        source.register([memoryview(bytearray(32 * MIB))])
        target.register([memoryview(mapping) for mapping in mappings])
        wait_for(lambda: all(num_resident(each) >= 4 * MIB // mmap.PAGESIZE for each in mappings))
        before = num_resident(mappings[0])
        peer = target.connect(source.descriptor())
        # Bytes 7 MiB to 8 MiB of the second region: one MiB is written, and four behind it are populated.
        handle = target.submit(peer, np.array([[23 * MIB, 0, MIB]], np.int64))
        wait_for(lambda: num_resident(mappings[1]) >= 9 * MIB // mmap.PAGESIZE)
        assert num_resident(mappings[0]) == before, "nothing was written there"
        wait_for(lambda: target.poll(handle).is_settled)
    finally:
        for each in (target, source):
            each.close()


def wait_for(condition) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.01)
