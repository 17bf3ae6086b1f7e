"""The transports between processes: the contract, and peers that die or stop in the middle of a transfer."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from penstock.kv_transfer.transports import shared_memory
from penstock.kv_transfer.transports.base import DataTransport, TransferHandle, TransferState
from penstock.kv_transfer.transports.memory_copy import copy_in_pieces
from penstock.simulation.conformance import TransportRig, check_transport, runs_of
from penstock.utils.errors import PeerError
from tests.integration.transfer_libraries import LIBRARY_KINDS
from tests.integration.transport_process import LateTransport, Memories, RemoteTransport

KINDS = ("sockets", "shared_memory", *LIBRARY_KINDS)
# Large enough that a peer can be stopped in the middle of a transfer over sockets; a gate stops copies.
SIZES = {"sockets": 256 << 20, "shared_memory": 32 << 20}


@contextlib.contextmanager
def remotes() -> Iterator[list[RemoteTransport]]:
    """Yields a list for endpoints in other processes, which end with the test."""
    made: list[RemoteTransport] = []
    try:
        yield made
    finally:
        for each in made:
            each.end()


@pytest.mark.spread(1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_transport_to_another_process_conforms(kind: str) -> None:
    with remotes() as made:

        def make() -> TransportRig:
            memories = Memories()
            made.append(RemoteTransport(kind, memories))
            right = made[-1]

            def restart() -> RemoteTransport:
                right.end()
                made.append(RemoteTransport(kind, memories))
                return made[-1]

            left = cast(DataTransport, LateTransport(kind, memories))
            return TransportRig(left, right, restart, memories.allocate)

        check_transport(make)


class Pair:
    """A transport in this process with memory of zeros, and one in another process with memory of ones."""

    def __init__(self, kind: str, made: list[RemoteTransport]) -> None:
        memories = Memories()
        self.near, self.far = memories.allocate(SIZES[kind]), memories.allocate(SIZES[kind])
        self.whole = runs_of((0, 0, SIZES[kind]))
        np.frombuffer(self.far, np.uint8)[:] = 1
        self.right = RemoteTransport(kind, memories)
        made.append(self.right)
        self.left = cast(DataTransport, LateTransport(kind, memories))
        self.left.register([self.near])
        self.right.register([self.far])
        self.peer = self.left.connect(self.right.descriptor())

    def signal(self, number: int) -> None:
        os.kill(self.right.process.pid, number)

    def begin_and_stop(self) -> TransferHandle:
        """Begins a read, and stops the peer when a part has landed."""
        np.frombuffer(self.far, np.uint8)[:] = 2
        # On a busy machine, the read may have ended before the peer is stopped.
        for _ in range(20):
            np.frombuffer(self.near, np.uint8)[:] = 1
            handle = self.left.submit(self.peer, self.whole)
            deadline = time.monotonic() + 10
            while self.near[0] == 1:
                assert time.monotonic() < deadline, "nothing has landed"
            self.signal(signal.SIGSTOP)
            if self.left.poll(handle) is TransferState.PENDING and self.near[-1] == 1:
                return handle
            self.signal(signal.SIGCONT)
            assert self.state_after(handle, is_settled) is TransferState.DONE
        pytest.fail("no read was stopped midway")

    def state_after(self, handle: TransferHandle, is_over: Callable[[TransferState], bool]) -> TransferState:
        deadline = time.monotonic() + 10
        while not is_over(self.left.poll(handle)) and time.monotonic() < deadline:
            self.left.wait([handle], 0.5)
        return self.left.poll(handle)


@contextlib.contextmanager
def pair_of(kind: str) -> Iterator[Pair]:
    with remotes() as made:
        pair = Pair(kind, made)
        try:
            yield pair
        finally:
            pair.left.close()


class Snapshot:
    """A copy of memories, which shows whether any byte changes."""

    def __init__(self, *memories: memoryview) -> None:
        self._arrays = [np.frombuffer(memory, np.uint8) for memory in memories]
        self._copies = [array.copy() for array in self._arrays]

    def is_unchanged(self) -> bool:
        return all(map(np.array_equal, self._arrays, self._copies))


def is_settled(state: TransferState) -> bool:
    return state.is_settled


class Gate:
    """Stops copies between their pieces until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.has_begun, self.is_open = threading.Event(), threading.Event()
        monkeypatch.setattr(shared_memory, "copy_in_pieces", self._copy)

    def _copy(self, runs: np.ndarray) -> Iterator[None]:
        for _ in copy_in_pieces(runs):
            self.has_begun.set()
            assert self.is_open.wait(30)
            yield


def test_a_peer_that_is_killed_during_a_read_over_sockets() -> None:
    with pair_of("sockets") as pair:
        handle = pair.begin_and_stop()
        queued = [pair.left.submit(pair.peer, pair.whole) for _ in range(3)]
        pair.signal(signal.SIGKILL)
        for each in (handle, *queued):
            assert pair.state_after(each, is_settled) is TransferState.FAILED_SETTLED
        before = Snapshot(pair.near)
        pair.left.wait([handle], 0.3)
        assert before.is_unchanged()
        with pytest.raises(PeerError, match="not connected"):
            pair.left.submit(pair.peer, pair.whole)


def test_a_peer_that_is_killed_during_a_copy_of_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    with pair_of("shared_memory") as pair:
        handle = pair.left.submit(pair.peer, pair.whole)
        queued = pair.left.submit(pair.peer, pair.whole)
        assert gate.has_begun.wait(10)
        pair.signal(signal.SIGKILL)
        assert pair.state_after(queued, is_settled) is TransferState.FAILED_SETTLED
        lost = TransferState.FAILED_UNSETTLED
        assert pair.state_after(handle, lambda state: state is lost) is lost
        gate.is_open.set()
        assert pair.state_after(handle, is_settled) is TransferState.FAILED_SETTLED
        before = Snapshot(pair.near, pair.far)
        pair.left.wait([handle], 0.2)
        assert before.is_unchanged()
        with pytest.raises(PeerError, match="not connected"):
            pair.left.submit(pair.peer, pair.whole)


def test_bytes_of_shared_memory_whose_owner_has_died_meanwhile_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that watches the peer is late to notice it, so nothing else ends the transfer."""
    has_settled, watch = threading.Event(), shared_memory.SharedMemoryTransport._watch

    def watch_late(self: shared_memory.SharedMemoryTransport, peer: Any) -> None:
        assert has_settled.wait(30)
        watch(self, peer)

    def copy_and_kill(runs: np.ndarray) -> Iterator[None]:
        yield from copy_in_pieces(runs)
        pair.right.end()

    monkeypatch.setattr(shared_memory.SharedMemoryTransport, "_watch", watch_late)
    monkeypatch.setattr(shared_memory, "copy_in_pieces", copy_and_kill)
    with pair_of("shared_memory") as pair:
        try:
            handle = pair.left.submit(pair.peer, pair.whole)
            assert pair.state_after(handle, is_settled) is TransferState.FAILED_SETTLED
        finally:
            has_settled.set()


def test_nothing_lands_when_a_stopped_peer_continues_after_it_was_given_up() -> None:
    with pair_of("sockets") as pair:
        handle = pair.begin_and_stop()
        pair.left.disconnect(pair.peer)
        assert pair.state_after(handle, is_settled) is TransferState.FAILED_SETTLED
        before = Snapshot(pair.near)
        pair.signal(signal.SIGCONT)
        pair.left.wait([handle], 0.5)
        assert before.is_unchanged()
        assert pair.near[-1] == 1
        pair.peer = pair.left.connect(pair.right.descriptor())
        again = pair.left.submit(pair.peer, pair.whole)
        assert pair.state_after(again, is_settled) is TransferState.DONE
        assert np.array_equal(np.frombuffer(pair.near, np.uint8), np.frombuffer(pair.far, np.uint8))


def test_shared_memory_is_not_copied_after_it_was_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    with pair_of("shared_memory") as pair:
        handle = pair.left.submit(pair.peer, pair.whole)
        assert gate.has_begun.wait(10)
        pair.left.disconnect(pair.peer)
        assert pair.left.poll(handle) is TransferState.FAILED_UNSETTLED
        before = Snapshot(pair.near)
        gate.is_open.set()
        assert pair.state_after(handle, is_settled) is TransferState.FAILED_SETTLED
        assert before.is_unchanged()


def test_closing_an_endpoint_waits_for_the_copies_of_its_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    with pair_of("shared_memory") as pair:
        handle = pair.left.submit(pair.peer, pair.whole)
        assert gate.has_begun.wait(10)
        closing = threading.Thread(target=pair.right.close)
        closing.start()
        lost = TransferState.FAILED_UNSETTLED
        assert pair.state_after(handle, lambda state: state is lost) is lost
        closing.join(0.3)
        assert closing.is_alive()
        gate.is_open.set()
        closing.join(10)
        assert not closing.is_alive()
        assert pair.left.poll(handle) is TransferState.FAILED_SETTLED


def test_the_memory_of_a_peer_is_mapped_for_reading_only() -> None:
    with pair_of("shared_memory") as pair:
        (lane,) = cast(Any, pair.left)._peers[pair.peer].lanes
        address = lane._remote.segments(np.array([[0, 1]], np.int64))[0, 0]
        lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
        (rights,) = {line[1] for line in lines if int(line[0].split("-")[0], 16) == address}
        assert rights == "r--s"
        assert pair.state_after(pair.left.submit(pair.peer, pair.whole), is_settled) is TransferState.DONE
