"""The life of a peer that all transports share, with lanes that do what a test says."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from penstock.kv_transfer.transports.base import TransferHandle, TransferState
from penstock.kv_transfer.transports.listener import listen_on
from penstock.kv_transfer.transports.peers import Lane, Peer, PeerTransport, Transfer
from penstock.kv_transfer.transports.socket_protocol import EPOCH_BYTES, Address, SocketLimits
from penstock.simulation.conformance import runs_of
from penstock.utils.errors import PeerError

SETTLED, UNSETTLED = TransferState.FAILED_SETTLED, TransferState.FAILED_UNSETTLED


class ScriptedLane(Lane):
    """Reads until `answer` is set: to what `read` returns, or to what it raises."""

    def __init__(self) -> None:
        self.is_reading, self.is_told = threading.Event(), threading.Event()
        self.may_open, self.may_end = threading.Event(), threading.Event()
        self.answer: bool | Exception = True
        self.was_stopped = False
        self.may_open.set()
        self.may_end.set()

    def open(self) -> None:
        assert self.may_open.wait(10)
        if isinstance(self.answer, Exception):
            raise self.answer

    def read(self, runs: np.ndarray) -> bool:
        self.is_reading.set()
        assert self.is_told.wait(10)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def tell(self, answer: bool | Exception) -> None:
        self.answer = answer
        self.is_told.set()

    def stop(self) -> None:
        self.was_stopped = True

    def end(self) -> None:
        assert self.may_end.wait(10)


class ScriptedTransport(PeerTransport[Address]):
    def __init__(self) -> None:
        limits = SocketLimits()
        super().__init__(listen_on("127.0.0.1", limits), Address("127.0.0.1", 1, os.urandom(EPOCH_BYTES)), b"", limits)
        self.register([memoryview(bytearray(64))])
        self.lane = ScriptedLane()
        self.peer = Peer(Address("127.0.0.1", 2, b"e"), 64)
        self._begin(self.peer, self.lane)

    def add_lane(self) -> ScriptedLane:
        lane = ScriptedLane()
        lane.may_open.clear()
        with self._lock:
            self._start(self.peer, lane)
        return lane

    def read(self) -> Transfer:
        handle = self.submit(self.peer.address.peer_id, runs_of((0, 0, 64)))
        assert isinstance(handle, Transfer)
        return handle

    def end_of(self, handle: TransferHandle) -> TransferState:
        deadline = time.monotonic() + 10
        while not self.poll(handle).is_settled and time.monotonic() < deadline:
            self.wait([handle], 0.1)
        return self.poll(handle)


@pytest.fixture
def transport() -> Iterator[ScriptedTransport]:
    made = ScriptedTransport()
    yield made
    made.lane.tell(False)
    made.lane.may_end.set()
    made.close()


def test_a_transfer_of_a_lost_peer_settles_when_its_lane_has_ended(transport: ScriptedTransport) -> None:
    lane = transport.lane
    lane.may_end.clear()
    running, queued = transport.read(), transport.read()
    assert lane.is_reading.wait(10)
    transport.disconnect(transport.peer.address.peer_id)
    assert lane.was_stopped
    assert (transport.poll(running), transport.poll(queued)) == (UNSETTLED, SETTLED)
    lane.tell(PeerError("stopped"))
    transport.wait([running], 0.1)
    assert transport.poll(running) is UNSETTLED, "its lane has not ended"
    lane.may_end.set()
    assert transport.end_of(running) is SETTLED


def test_a_read_that_ends_after_its_peer_was_lost_is_not_done(transport: ScriptedTransport) -> None:
    handle = transport.read()
    assert transport.lane.is_reading.wait(10)
    transport.disconnect(transport.peer.address.peer_id)
    transport.lane.tell(True)
    assert transport.end_of(handle) is SETTLED


def test_a_refused_read_leaves_the_lane_usable(transport: ScriptedTransport) -> None:
    transport.lane.tell(False)
    assert transport.end_of(transport.read()) is SETTLED
    transport.lane.tell(True)
    assert transport.end_of(transport.read()) is TransferState.DONE


def test_a_bug_in_a_lane_ends_its_transfer(transport: ScriptedTransport) -> None:
    handle = transport.read()
    transport.lane.tell(AssertionError("a bug"))
    assert transport.end_of(handle) is SETTLED
    with pytest.raises(PeerError, match="not connected"):
        transport.read()


def test_no_transfer_waits_for_lanes_that_could_not_be_opened(transport: ScriptedTransport) -> None:
    """The lanes fail at the same time, and each could take the others to be alive."""
    others = [transport.add_lane() for _ in range(4)]
    running, queued = transport.read(), transport.read()
    assert transport.lane.is_reading.wait(10)
    transport.lane.tell(PeerError("broken"))
    assert transport.end_of(running) is SETTLED
    assert transport.poll(queued) is TransferState.PENDING, "another lane may still open"
    for lane in others:
        lane.answer = PeerError("unreachable")
    for lane in others:
        lane.may_open.set()
    assert transport.end_of(queued) is SETTLED
    assert transport.peer.is_lost


def test_a_peer_that_two_threads_connect_at_once_is_connected_once(transport: ScriptedTransport) -> None:
    again, lane = Peer(transport.peer.address, 64), ScriptedLane()
    transport._begin(again, lane)
    assert again.is_lost
    assert not transport.peer.is_lost
    transport.lane.tell(True)
    assert transport.end_of(transport.read()) is TransferState.DONE
