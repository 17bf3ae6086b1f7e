"""A transport within one host: the reader maps the memory of the other side by its name, and copies.

The reader has a thread for each peer. Copies are divided into pieces, so that giving a peer up takes no longer than one
piece, and after its thread has ended nothing can move.

Every endpoint also listens on a Unix socket without a file (an abstract address, which contains a random epoch). A peer
keeps a connection to it open for as long as it has the memory mapped. The end of the connection means the end of that
life, because the kernel closes it however the process ends. Both sides verify with the kernel that the other process
belongs to the same user or to root, which could open the memory anyway, so there is no key. `close` shuts the
connections of peers down and waits until they have ended their copies.

It works if processes share /proc and the network namespace: on one host, and not in different containers.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from penstock.kv_transfer.transports.base import PeerId, TransferHandle, TransferState
from penstock.kv_transfer.transports.flat_memory import FlatMemory, check_runs, pair_segments
from penstock.kv_transfer.transports.listener import incoming
from penstock.kv_transfer.transports.memory_copy import copy_in_pieces
from penstock.kv_transfer.transports.polled_transport import PolledTransport, Transfer
from penstock.kv_transfer.transports.threads import ThreadGroup
from penstock.messages.kv_layout import MemoryRegion
from penstock.utils.errors import ConfigError, PeerError
from penstock.utils.logging import get_logger
from penstock.utils.shared_memory import attach_memory

_logger = get_logger(__name__)

_HELLO = b"penstock"  # the first message of a peer; it is sent back to it
_MAX_PEERS = 256
_ANSWER_SECONDS = 5.0
_CLOSE_SECONDS = 10.0
_CREDENTIALS = struct.Struct("3i")  # `struct ucred`: process, user, group


class _Region(msgspec.Struct, frozen=True):
    path: str
    num_bytes: int


class _Endpoint(msgspec.Struct, frozen=True, tag="shared_memory", forbid_unknown_fields=True):
    """The descriptor of one life of an endpoint."""

    epoch: bytes
    regions: tuple[_Region, ...]

    @property
    def peer_id(self) -> PeerId:
        return f"shared_memory#{self.epoch.hex()}"

    @property
    def address(self) -> bytes:
        return b"\0penstock-kv-" + self.epoch.hex().encode()


_encode = msgspec.msgpack.encode
_decode_endpoint = msgspec.msgpack.Decoder(_Endpoint).decode


@dataclass(slots=True, eq=False)
class _Peer:
    endpoint: _Endpoint
    control: socket.socket
    memory: FlatMemory
    queue: deque[Transfer] = field(default_factory=deque[Transfer])
    running: Transfer | None = None
    is_lost: bool = False
    has_left: threading.Event = field(default_factory=threading.Event)  # the thread that watches it


class SharedMemoryTransport(PolledTransport):
    """One life of one endpoint (`DataTransport`). `regions` have the paths by which the registered ones are mapped."""

    def __init__(self, regions: Sequence[MemoryRegion]) -> None:
        super().__init__()
        named = [_Region(region.path, region.num_bytes) for region in regions if region.path is not None]
        if len(named) != len(regions):
            raise ConfigError(
                "the shared_memory transport needs memory that other processes can map, and some of the KV cache has "
                "no path: choose transport=sockets"
            )
        self._endpoint = _Endpoint(os.urandom(16), tuple(named))
        self._memory = FlatMemory()
        self._peers: dict[PeerId, _Peer] = {}
        self._served: set[socket.socket] = set()
        self._threads = ThreadGroup(f"kv-shared-{self._endpoint.epoch.hex()[:8]}")
        self._closing = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(self._endpoint.address)
        self._listener.listen(_MAX_PEERS)
        self._threads.start(self._accept)

    def register(self, regions: Sequence[memoryview]) -> None:
        assert not self._memory.num_bytes, "memory is registered once"
        sizes = [region.nbytes for region in regions]
        assert sizes == [region.num_bytes for region in self._endpoint.regions], (sizes, self._endpoint.regions)
        self._memory = FlatMemory(regions)

    def descriptor(self) -> bytes:
        return _encode(self._endpoint)

    def connect(self, descriptor: bytes) -> PeerId:
        if self._closing.is_set():
            raise PeerError("this endpoint has been closed")
        try:
            endpoint = _decode_endpoint(descriptor)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise PeerError(f"a descriptor is invalid: {error}") from None
        known = self._peers.get(endpoint.peer_id)
        if known is not None:
            if _is_open(known.control):
                return endpoint.peer_id
            self._lose(known)
        control = self._dial(endpoint)
        try:
            # While the connection exists, a path names memory of that life, and not of a later process.
            mappings = [attach_memory(region.path, region.num_bytes) for region in endpoint.regions]
            if not _is_open(control):
                raise PeerError(f"{endpoint.peer_id} has ended")
        except (OSError, ValueError, OverflowError, PeerError) as error:
            control.close()
            raise PeerError(f"the memory of {endpoint.peer_id} cannot be mapped: {error}") from error
        peer = _Peer(endpoint, control, FlatMemory([mapping.view for mapping in mappings]))
        with self._lock:
            self._peers[endpoint.peer_id] = peer
        try:
            self._threads.start(self._watch, peer)
            self._threads.start(self._copy_for, peer)
        except PeerError:
            self._lose(peer)
            control.close()
            raise
        return endpoint.peer_id

    def submit(self, peer: PeerId, runs: np.ndarray) -> TransferHandle:
        with self._lock:
            target = self._peers.get(peer)
            if target is None:
                raise PeerError(f"{peer} is not connected")
            check_runs(runs, self._memory.num_bytes, target.memory.num_bytes)
            transfer = Transfer(runs)
            target.queue.append(transfer)
            self._lock.notify_all()
        return transfer

    def disconnect(self, peer: PeerId) -> None:
        known = self._peers.get(peer)
        if known is not None:
            self._lose(known)

    def close(self) -> None:
        with self._lock:
            self._closing.set()
            peers, served = list(self._peers.values()), list(self._served)
        _shut(self._listener, socket.SHUT_RDWR)
        for peer in peers:
            self._lose(peer)
        for connection in served:
            _shut(connection, socket.SHUT_WR)
        if not self._threads.join(_CLOSE_SECONDS):
            _logger.error("a peer may still touch the KV memory %s seconds after it was told to stop", _CLOSE_SECONDS)
            with self._lock:
                for connection in self._served:
                    _shut(connection, socket.SHUT_RDWR)
            assert self._threads.join(_CLOSE_SECONDS), f"a thread has not ended within {_CLOSE_SECONDS} seconds"
        self._listener.close()
        self._memory = FlatMemory()

    def _dial(self, endpoint: _Endpoint) -> socket.socket:
        """Returns a connection to that life of the peer. Raises PeerError."""
        try:
            control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            raise PeerError(f"no connection to {endpoint.peer_id} can be made: {error}") from error
        try:
            control.settimeout(_ANSWER_SECONDS)
            control.connect(endpoint.address)
            _check_user(control)
            control.send(_HELLO)
            if control.recv(len(_HELLO)) != _HELLO:
                raise PeerError("it refuses the connection")
            control.settimeout(None)
        except (OSError, PeerError) as error:
            control.close()
            raise PeerError(f"{endpoint.peer_id} cannot be reached, or has ended: {error}") from error
        return control

    def _watch(self, peer: _Peer) -> None:
        """Runs in a thread per peer: waits for the peer's end."""
        try:
            while peer.control.recv(1):
                pass
        except OSError as error:
            _logger.debug("the connection to %s has ended: %s", peer.endpoint.peer_id, error)
        self._lose(peer)
        peer.has_left.set()

    def _copy_for(self, peer: _Peer) -> None:
        """Runs in a thread per peer: executes transfers in order, and closes the connection when it copies no more."""
        try:
            while (transfer := self._take(peer)) is not None:
                self._execute(peer, transfer)
                self._set_state([transfer], TransferState.FAILED_SETTLED)
        except Exception:
            _logger.exception("transfers with %s have ended because of a bug", peer.endpoint.peer_id)
        finally:
            self._lose(peer)
            if peer.running is not None:
                self._set_state([peer.running], TransferState.FAILED_SETTLED)
            peer.memory = FlatMemory()
            peer.has_left.wait()
            peer.control.close()

    def _take(self, peer: _Peer) -> Transfer | None:
        """Waits for the next transfer; None when the peer has been given up."""
        with self._lock:
            self._lock.wait_for(lambda: peer.queue or peer.is_lost)
            peer.running = None if peer.is_lost else peer.queue.popleft()
            return peer.running

    def _execute(self, peer: _Peer, transfer: Transfer) -> None:
        """Executes a transfer. Returns early, without completing it, if the peer is lost."""
        if not self._is_alive(peer):
            return
        runs = pair_segments(self._memory, peer.memory, transfer.runs)
        for _ in copy_in_pieces(runs):
            if peer.is_lost:
                return
        # Bytes from a process that has died meanwhile are not reliable.
        if self._is_alive(peer):
            self._finish(transfer)

    def _is_alive(self, peer: _Peer) -> bool:
        is_alive = not peer.is_lost and _is_open(peer.control)
        if not is_alive:
            self._lose(peer)
        return is_alive

    def _lose(self, peer: _Peer) -> None:
        """Gives the peer up. Its transfers settle now, or when its thread has noticed."""
        with self._lock:
            if peer.is_lost:
                return
            peer.is_lost = True
            self._peers.pop(peer.endpoint.peer_id, None)
            queued, running = list(peer.queue), [] if peer.running is None else [peer.running]
            peer.queue.clear()
            # Only the receiving direction: the peer takes the end of the other one for the end of all copies.
            _shut(peer.control, socket.SHUT_RD)
            self._lock.notify_all()
        self._set_state(queued, TransferState.FAILED_SETTLED)
        self._set_state(running, TransferState.FAILED_UNSETTLED)

    def _accept(self) -> None:
        for connection in incoming(self._listener, self._closing):
            with self._lock:
                is_wanted = not self._closing.is_set() and len(self._served) < _MAX_PEERS
                try:
                    if is_wanted:
                        self._threads.start(self._serve, connection)
                        self._served.add(connection)
                except PeerError as error:
                    _logger.warning("a connection is closed: %s", error)
                    is_wanted = False
            if not is_wanted:
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        """Runs in a thread per connection: waits until the peer has ended its copies."""
        try:
            self._receive(connection)
        except (OSError, PeerError) as error:
            _logger.debug("a connection has ended: %s", error)
        finally:
            with self._lock:
                self._served.remove(connection)
                connection.close()

    def _receive(self, connection: socket.socket) -> None:
        _check_user(connection)
        connection.settimeout(_ANSWER_SECONDS)
        if connection.recv(len(_HELLO)) != _HELLO:
            raise PeerError("the first message must be a hello")
        connection.send(_HELLO)
        connection.settimeout(None)
        while connection.recv(1):
            pass


def _check_user(connection: socket.socket) -> None:
    """Raises PeerError unless the other process belongs to the same user or to root."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user = _CREDENTIALS.unpack(credentials)[1]
    if user not in (os.geteuid(), 0):
        raise PeerError(f"the peer belongs to user {user}: both engines must run as the same user")


def _is_open(connection: socket.socket) -> bool:
    """Returns whether the other side has not ended. It sends no messages that stay unread and would hide its end."""
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def _shut(connection: socket.socket, how: int) -> None:
    with contextlib.suppress(OSError):  # it has ended
        connection.shutdown(how)
