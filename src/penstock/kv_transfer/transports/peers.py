"""The life of a peer and of its transfers, which is the same in all transports.

A peer has a queue of transfers and one or more lanes. A lane is a thread that takes transfers from the queue and
executes them one after the other. When the peer is lost, the transfers in the queue settle at once, and those that
lanes execute when the lane has ended:

    PENDING -> DONE                                 the last byte has landed
            -> FAILED_SETTLED                       it was not begun, the peer refuses it, or its lane has ended
            -> FAILED_UNSETTLED -> FAILED_SETTLED   the peer is lost -> the lane has ended

Transports differ in their lanes: how a read is executed, and how one is ended. A transport with a `control` connection
also learns of the end of a peer while nothing is read from it.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from penstock.kv_transfer.transports.base import PeerId, TransferHandle, TransferState
from penstock.kv_transfer.transports.flat_memory import FlatMemory, check_runs
from penstock.kv_transfer.transports.listener import Listener
from penstock.kv_transfer.transports.socket_protocol import (
    FRAME_BYTES,
    PeerAddress,
    SocketLimits,
    decode,
    encode,
)
from penstock.kv_transfer.transports.stream import Stream
from penstock.kv_transfer.transports.threads import ThreadGroup
from penstock.utils.errors import PeerError, PenstockError
from penstock.utils.logging import get_logger
from penstock.utils.memory_ahead import AHEAD_BYTES, MemoryAhead
from penstock.utils.shared_memory import populate_memory

_logger = get_logger(__name__)

_CLOSE_SECONDS = 30.0
_NEXT = {
    TransferState.PENDING: (TransferState.DONE, TransferState.FAILED_UNSETTLED, TransferState.FAILED_SETTLED),
    TransferState.FAILED_UNSETTLED: (TransferState.FAILED_SETTLED,),
    TransferState.FAILED_SETTLED: (),
    TransferState.DONE: (),
}

_Address = TypeVar("_Address", bound=PeerAddress)


@dataclass(slots=True, eq=False)
class Transfer:
    """A handle. `state` changes under the transport's lock; `polled` is the state that the owner last saw."""

    runs: np.ndarray  # [n, 3] int64
    state: TransferState = TransferState.PENDING
    polled: TransferState = TransferState.PENDING


class Lane:
    """What a transport does for a thread that executes transfers. `transfer` is the one in progress.

    The thread calls `open` first, then `read` for each transfer, and `end` last.
    """

    transfer: Transfer | None = None

    def open(self) -> None:
        """Raises PeerError if the lane cannot be used."""

    def read(self, runs: np.ndarray) -> bool:
        """Returns True when all bytes have landed, or False, when nothing moves any more, if the peer refuses.

        Raises PeerError if the lane cannot be used any more; bytes may then land until `end` has returned.
        """
        raise NotImplementedError

    def is_alive(self) -> bool:
        """Returns whether the peer seems to be alive."""
        return True

    def stop(self) -> None:
        """Called when the peer is lost, from any thread, with the lock held: `read` then soon returns or raises."""

    def end(self) -> None:
        """Returns when nothing that `read` began moves any more, and frees what the lane has."""


@dataclass(slots=True, eq=False)
class Peer:
    """`lanes` are those whose threads run; a peer with `control` has one. Its end means the end of the peer."""

    address: PeerAddress
    num_bytes: int
    control: Stream | None = None
    queue: deque[Transfer] = field(default_factory=deque[Transfer])
    lanes: list[Lane] = field(default_factory=list[Lane])
    is_lost: bool = False

    def is_alive(self) -> bool:
        """Returns whether the peer seems to be alive."""
        is_connected = bool(self.lanes) and not self.is_lost and not self.has_left()
        return is_connected and all(lane.is_alive() for lane in self.lanes)

    def has_left(self) -> bool:
        return self.control is not None and not self.control.is_alive()


class PeerTransport(Generic[_Address]):
    """The common part of transports with threads (`DataTransport`). `_lock` guards all that the threads share.

    `listening` is the socket at which peers reach `address`.
    """

    _grace_seconds = 0.0
    """How long `close` waits for peers to disconnect before it ends their connections."""

    def __init__(
        self,
        listening: socket.socket,
        address: _Address,
        key: bytes,
        limits: SocketLimits,
        max_frame_bytes: int = FRAME_BYTES,
    ) -> None:
        self._address = address
        self._key = key
        self._limits = limits
        self._hold(FlatMemory())
        self._peers: dict[PeerId, Peer] = {}
        self._lock = threading.Condition()
        self._closing = threading.Event()
        self._threads = ThreadGroup("kv-data", self._closing)
        self._listener = Listener(listening, key, address.epoch, limits, self._serve, max_frame_bytes)

    def _serve(self, stream: Stream) -> None:
        """Runs in a thread for a connection of a peer that has asked for this endpoint, until it ends."""
        raise NotImplementedError

    def _connect(self, address: _Address) -> None:
        """Connects to a peer that is not connected, and calls `_begin`. Raises PeerError."""
        raise NotImplementedError

    # ---- `DataTransport` ----

    def register(self, regions: Sequence[memoryview]) -> None:
        assert not self._memory.num_bytes, "memory is registered once"
        self._hold(FlatMemory(regions))

    def descriptor(self) -> bytes:
        return encode(self._address)

    def connect(self, descriptor: bytes) -> PeerId:
        self._threads.check_open()
        address = decode(type(self._address), descriptor)
        with self._lock:
            known = self._peers.get(address.peer_id)
            if known is not None:
                if known.is_alive():
                    return address.peer_id
                self._lose(known)
        self._connect(address)
        return address.peer_id

    def submit(self, peer: PeerId, runs: np.ndarray) -> TransferHandle:
        with self._lock:
            target = self._peers.get(peer)
            if target is None:
                raise PeerError(f"{peer} is not connected")
            check_runs(runs, self._memory.num_bytes, target.num_bytes)
            if len(runs) > self._limits.max_runs:
                raise PeerError(f"a transfer has {len(runs)} runs; the limit is {self._limits.max_runs}")
            for region, end in self._memory.ends(runs[:, [0, 2]]).items():
                self._ahead.use(region, end)
            transfer = Transfer(runs)
            target.queue.append(transfer)
            self._lock.notify_all()
        return transfer

    def poll(self, handle: TransferHandle) -> TransferState:
        assert isinstance(handle, Transfer), handle
        with self._lock:
            handle.polled = handle.state
            return handle.state

    def wait(self, handles: Sequence[TransferHandle], seconds: float) -> None:
        transfers = [handle for handle in handles if isinstance(handle, Transfer)]
        with self._lock:
            self._lock.wait_for(lambda: any(each.state is not each.polled for each in transfers), max(0.0, seconds))

    def disconnect(self, peer: PeerId) -> None:
        known = self._peers.get(peer)
        if known is not None:
            self._lose(known)

    def close(self) -> None:
        with self._lock:
            self._closing.set()
            for peer in list(self._peers.values()):
                self._lose(peer)
        self._threads.join(_CLOSE_SECONDS)
        self._listener.close(_CLOSE_SECONDS, self._grace_seconds)
        self._ahead.close()
        self._memory = FlatMemory()

    def _hold(self, memory: FlatMemory) -> None:
        """Takes the memory into which transfers write, at first from the beginning of every region on."""
        areas = memory.areas(AHEAD_BYTES)
        self._memory, self._ahead = memory, MemoryAhead(areas, populate_memory)
        for region in range(len(areas)):
            self._ahead.use(region, 0)

    # ---- The life of a peer ----

    def _begin(self, peer: Peer, lane: Lane) -> None:
        """Adds a peer with its first lane. After a PeerError the lane ends, and the control connection is closed."""
        with self._lock:
            try:
                self._start(peer, lane)
                if peer.control is not None:
                    self._threads.start(self._watch, peer)
            except PeerError:
                self._lose(peer)
                if peer.control is not None:
                    peer.control.close()
                raise
            if self._peers.setdefault(peer.address.peer_id, peer) is not peer:
                self._lose(peer)  # another thread has connected meanwhile

    def _start(self, peer: Peer, lane: Lane) -> None:
        """Starts the thread of a lane, which ends at once after a PeerError. Called with the lock held."""
        try:
            self._threads.start(self._execute, peer, lane)
        except PeerError:
            lane.end()
            raise
        peer.lanes.append(lane)

    def _watch(self, peer: Peer) -> None:
        """Runs in a thread per control connection: waits for its end, and closes it when nothing is read any more."""
        assert peer.control is not None
        # The peer sends nothing: it has closed the connection, or it violates the protocol.
        peer.control.wait_for_data()
        self._lose(peer)
        with self._lock:
            self._lock.wait_for(lambda: not peer.lanes)
        peer.control.close()

    def _execute(self, peer: Peer, lane: Lane) -> None:
        """Runs in the thread of a lane: executes transfers until the peer or the lane is lost."""
        try:
            lane.open()
            while (transfer := self._take(peer, lane)) is not None:
                has_landed = lane.read(transfer.runs)
                # Bytes from an endpoint that has ended meanwhile are not reliable.
                if peer.has_left():
                    raise PeerError("it has left")
                if has_landed:
                    self._advance(transfer, TransferState.DONE)
                self._advance(transfer, TransferState.FAILED_SETTLED)
        except PenstockError as error:
            level = logging.DEBUG if peer.is_lost else logging.INFO
            _logger.log(level, "a connection to %s has ended: %s", peer.address.peer_id, error)
        except Exception:
            _logger.exception("a connection to %s has ended because of a bug", peer.address.peer_id)
        finally:
            if peer.control is not None:
                self._lose(peer)  # it has no other lane
            lane.end()
            with self._lock:
                peer.lanes.remove(lane)
                self._advance(lane.transfer, TransferState.FAILED_SETTLED)
                if not peer.is_alive():
                    self._lose(peer)
                self._lock.notify_all()

    def _take(self, peer: Peer, lane: Lane) -> Transfer | None:
        """Waits for the lane's next transfer; None when the peer has been lost."""
        with self._lock:
            lane.transfer = None
            self._lock.wait_for(lambda: peer.queue or peer.is_lost)
            if not peer.is_lost:
                lane.transfer = peer.queue.popleft()
            return lane.transfer

    def _lose(self, peer: Peer) -> None:
        """Gives the peer up. Its transfers settle now, or when their lanes have ended. Idempotent."""
        with self._lock:
            if peer.is_lost:
                return
            peer.is_lost = True
            if self._peers.get(peer.address.peer_id) is peer:
                del self._peers[peer.address.peer_id]
            for transfer in peer.queue:
                self._advance(transfer, TransferState.FAILED_SETTLED)
            peer.queue.clear()
            for lane in peer.lanes:
                self._advance(lane.transfer, TransferState.FAILED_UNSETTLED)
                lane.stop()
            if peer.control is not None:
                # Only the receiving direction: a peer may take the end of the other one for the end of all reads.
                peer.control.cut(socket.SHUT_RD)
            self._lock.notify_all()

    def _advance(self, transfer: Transfer | None, state: TransferState) -> None:
        """Changes the state of a transfer if it can still have this one."""
        with self._lock:
            if transfer is not None and state in _NEXT[transfer.state]:
                transfer.state = state
                self._lock.notify_all()
