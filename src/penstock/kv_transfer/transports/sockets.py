"""A transport over TCP, without a transfer library.

Every endpoint listens. A thread of the reader sends the ranges, and a thread of the peer answers with the bytes,
directly from its registered memory; the reader's thread receives them directly into its own. So registered memory is
only written by threads of its own process: once such a thread has ended, nothing can land any more. Connections are
authenticated with the cluster key, and the messages on them are sealed; the transferred bytes are neither sealed nor
encrypted.

A connection that breaks ends the transfer that it carries. When the last one breaks, or an idle one has broken too, the
peer is lost until `connect` is called again. Its transfers in progress become FAILED_UNSETTLED until the thread that
receives has noticed, which takes no longer than a system call, and then FAILED_SETTLED.

`close` waits for all threads. A peer that violates the protocol, or that stalls, loses only its connection.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock.kv_transfer.transports.base import PeerId, TransferHandle, TransferState
from penstock.kv_transfer.transports.dial import dial
from penstock.kv_transfer.transports.flat_memory import FlatMemory, check_runs, merged
from penstock.kv_transfer.transports.polled_transport import PolledTransport, Transfer
from penstock.kv_transfer.transports.socket_protocol import (
    EPOCH_BYTES,
    Address,
    Answer,
    Request,
    SocketLimits,
    decode,
    encode,
)
from penstock.kv_transfer.transports.socket_server import SocketServer
from penstock.kv_transfer.transports.stream import Stream
from penstock.kv_transfer.transports.threads import ThreadGroup
from penstock.utils.errors import PeerError
from penstock.utils.logging import get_logger

_logger = get_logger(__name__)

_CLOSE_SECONDS = 30.0


@dataclass(slots=True, eq=False)
class _Link:
    """One connection to a peer. `transfer` is the one in progress."""

    stream: Stream
    transfer: Transfer | None = None


@dataclass(slots=True, eq=False)
class _Peer:
    """A peer and its queue of transfers, from which idle links take. `num_links` includes links being connected."""

    address: Address
    num_bytes: int
    queue: deque[Transfer] = field(default_factory=deque[Transfer])
    links: list[_Link] = field(default_factory=list[_Link])
    num_links: int = 1
    is_lost: bool = False


class SocketsTransport(PolledTransport):
    """One life of one endpoint (`DataTransport`).

    Peers connect to `host`; if that is an IP address, the endpoint listens only there. Raises ConfigError if the host
    has no such address.
    """

    def __init__(self, host: str, key: bytes, limits: SocketLimits | None = None) -> None:
        super().__init__()
        self._key = key
        self._limits = limits or SocketLimits()
        self._memory = FlatMemory()
        self._peers: dict[PeerId, _Peer] = {}
        self._is_closed = False
        epoch = os.urandom(EPOCH_BYTES)
        self._server = SocketServer(host, key, epoch, self._limits, self._lock)
        self._address = Address(host, self._server.port, epoch)
        self._threads = ThreadGroup(f"kv-data-{self._server.port}-link")

    def register(self, regions: Sequence[memoryview]) -> None:
        assert not self._memory.num_bytes, "memory is registered once"
        self._memory = self._server.memory = FlatMemory(regions)

    def descriptor(self) -> bytes:
        return encode(self._address)

    def connect(self, descriptor: bytes) -> PeerId:
        if self._is_closed:
            raise PeerError("this endpoint has been closed")
        address = decode(Address, descriptor)
        known = self._peers.get(address.peer_id)
        if known is not None:
            if self._is_alive(known):
                return address.peer_id
            self._lose(known)
        stream, num_bytes = self._dial(address)
        peer = _Peer(address, num_bytes)
        with self._lock:
            try:
                self._threads.start(self._serve_link, peer, _Link(stream))
            except PeerError:
                stream.close()
                raise
            self._peers[address.peer_id] = peer
        return address.peer_id

    def submit(self, peer: PeerId, runs: np.ndarray) -> TransferHandle:
        limits = self._limits
        with self._lock:
            target = self._peers.get(peer)
            if target is None:
                raise PeerError(f"{peer} is not connected")
            check_runs(runs, self._memory.num_bytes, target.num_bytes)
            if len(runs) > limits.max_runs:
                raise PeerError(f"a transfer has {len(runs)} runs; the limit is {limits.max_runs}")
            transfer = Transfer(runs)
            target.queue.append(transfer)
            num_idle = target.num_links - sum(link.transfer is not None for link in target.links)
            needs_link = num_idle < len(target.queue) and target.num_links < limits.connections_per_peer
            if needs_link:
                with contextlib.suppress(PeerError):
                    self._threads.start(self._add_link, target)
                    target.num_links += 1
            self._lock.notify_all()
        return transfer

    def disconnect(self, peer: PeerId) -> None:
        known = self._peers.get(peer)
        if known is not None:
            self._lose(known)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            peers = list(self._peers.values())
        for peer in peers:
            self._lose(peer)
        assert self._threads.join(_CLOSE_SECONDS), f"a thread has not ended within {_CLOSE_SECONDS} seconds"
        self._server.close(_CLOSE_SECONDS)
        self._memory = FlatMemory()

    def _dial(self, address: Address) -> tuple[Stream, int]:
        """Returns a connection to that life of the peer, and the size of its memory. Raises PeerError."""
        stream, answer = dial(address, Answer, self._key, self._limits.connect_seconds)
        stream.allow_stalls(self._limits.stall_seconds)
        return stream, answer.num_bytes

    def _is_alive(self, peer: _Peer) -> bool:
        """Returns whether the peer seems to be alive; connections with a transfer in progress are not checked."""
        with self._lock:
            is_connected = peer.num_links > 0 and not peer.is_lost
            return is_connected and all(link.transfer is not None or link.stream.is_alive() for link in peer.links)

    def _add_link(self, peer: _Peer) -> None:
        """Makes one more connection, so that another transfer can run at once. If that fails, transfers wait."""
        try:
            stream, _ = self._dial(peer.address)
        except PeerError as error:
            _logger.debug("no further connection: %s", error)
            self._count_out(peer)
            return
        self._serve_link(peer, _Link(stream))

    def _serve_link(self, peer: _Peer, link: _Link) -> None:
        """Runs in the thread of a link: executes transfers until the peer is lost."""
        with self._lock:
            peer.links.append(link)
        try:
            while self._take(peer, link):
                self._execute(link)
        except PeerError as error:
            _logger.info("the connection to %s has ended: %s", peer.address.peer_id, error)
        except Exception:
            _logger.exception("the connection to %s has ended because of a bug", peer.address.peer_id)
        finally:
            with self._lock:
                peer.links.remove(link)
            self._count_out(peer)
            if link.transfer is not None:
                self._set_state([link.transfer], TransferState.FAILED_SETTLED)
            link.stream.close()

    def _count_out(self, peer: _Peer) -> None:
        """Counts a link that has ended, or could not be made; the peer is lost with the last one."""
        with self._lock:
            peer.num_links -= 1
        if not self._is_alive(peer):
            self._lose(peer)

    def _take(self, peer: _Peer, link: _Link) -> bool:
        """Waits for the link's next transfer; False when the peer has been given up."""
        with self._lock:
            link.transfer = None
            self._lock.wait_for(lambda: peer.queue or peer.is_lost)
            if peer.is_lost:
                return False
            link.transfer = peer.queue.popleft()
            return True

    def _execute(self, link: _Link) -> None:
        """Executes the link's transfer. Raises PeerError if the connection is no longer usable."""
        stream, transfer = link.stream, link.transfer
        assert transfer is not None
        segments = merged(self._memory.segments(transfer.runs[:, [0, 2]]))
        stream.send(encode(Request(transfer.runs[:, 1:].astype("<i8").tobytes())))
        answer = decode(Answer, stream.receive())
        if answer.refusal:
            _logger.warning("the peer refuses a transfer: %s", answer.refusal)
            self._set_state([transfer], TransferState.FAILED_SETTLED)
            return
        stream.receive_segments(segments)
        self._finish(transfer)

    def _lose(self, peer: _Peer) -> None:
        """Gives the peer up. Its transfers settle now, or when their threads have noticed."""
        with self._lock:
            if peer.is_lost:
                return
            peer.is_lost = True
            self._peers.pop(peer.address.peer_id, None)
            queued = list(peer.queue)
            peer.queue.clear()
            running = [link.transfer for link in peer.links if link.transfer is not None]
            for link in peer.links:
                link.stream.cut()
            self._lock.notify_all()
        self._set_state(queued, TransferState.FAILED_SETTLED)
        self._set_state(running, TransferState.FAILED_UNSETTLED)
