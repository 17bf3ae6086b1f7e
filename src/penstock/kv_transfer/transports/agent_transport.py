"""A transport over a transfer library, such as NIXL or Mooncake, which runs in helper processes.

The KV memory has a name, so that a helper can map it. One helper serves it to peers for as long as the endpoint lives;
for each peer that this endpoint is connected to there is another one, which reads from that peer or writes to it. No
library is trusted to cancel a transfer: one that is not DONE is over when the helper that began it has ended, which the
kernel confirms. So a transfer that fails, and a `disconnect`, end the helper for that peer, and no other; the next
`connect` starts a new one. A library that aborts, as some do when a peer dies at the wrong moment, ends a helper and
not the engine.

    READ     FAILED_UNSETTLED until the helper has ended, then FAILED_SETTLED
    WRITE    bytes may still be on their way into the peer's memory: FAILED_UNSETTLED until the peer has ended the
             agent that receives them, or its process has ended. While the peer is stopped, the state does not change

Endpoints have an authenticated control connection (`agent_protocol.py`). It tells a peer which agent serves now and
carries notifications, and its end means the end of that agent. What the libraries themselves send is neither
authenticated nor encrypted.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock.kv_transfer.transports.agent_protocol import FRAME_BYTES, AgentAddress, AgentAnswer, EndAgent
from penstock.kv_transfer.transports.agent_server import AgentServer
from penstock.kv_transfer.transports.agents import AgentSettings, helper_environment
from penstock.kv_transfer.transports.base import Operation, PeerId, TransferHandle, TransferState
from penstock.kv_transfer.transports.board import MAX_NOTIFY_BYTES, OnBoard, Transfer
from penstock.kv_transfer.transports.dial import dial
from penstock.kv_transfer.transports.flat_memory import AddressSpace, FlatMemory, check_runs
from penstock.kv_transfer.transports.helper import HelperProcess
from penstock.kv_transfer.transports.helper_messages import NamedRegion, OpenAgent, ServedMemory
from penstock.kv_transfer.transports.socket_protocol import (
    EPOCH_BYTES,
    Landed,
    SocketLimits,
    decode,
    encode,
)
from penstock.kv_transfer.transports.stream import Stream
from penstock.kv_transfer.transports.threads import ThreadGroup
from penstock.messages.kv_layout import MemoryRegion
from penstock.utils.errors import ConfigError, PeerError
from penstock.utils.logging import get_logger

_logger = get_logger(__name__)

_OPEN_SECONDS = 120.0  # to load a library and to register the memory
_GRACE_SECONDS = 1.0  # for peers to confirm the end of writes, in `close`
_CLOSE_SECONDS = 30.0


@dataclass(slots=True, eq=False)
class _Peer:
    """`is_confirmed`: the peer itself has ended the control connection. `has_left` is set when it has ended."""

    address: AgentAddress
    memory: AddressSpace
    control: Stream
    helper: HelperProcess
    queue: deque[Transfer] = field(default_factory=deque[Transfer])
    running: Transfer | None = None
    is_lost: bool = False
    is_confirmed: bool = False
    has_left: threading.Event = field(default_factory=threading.Event)


class AgentTransport(OnBoard):
    """One life of one endpoint (`DataTransport`). `regions` have the paths by which registered regions can be mapped.

    Raises ConfigError if the host has no such address, or a region has no path.
    """

    def __init__(
        self, settings: AgentSettings, regions: Sequence[MemoryRegion], key: bytes, limits: SocketLimits | None = None
    ) -> None:
        super().__init__()
        named = [NamedRegion(region.path, region.num_bytes) for region in regions if region.path is not None]
        if len(named) != len(regions):
            raise ConfigError(
                f"the {settings.library} transport needs memory that other processes can map, and some of the KV cache "
                "has no path: choose transport=sockets"
            )
        self._settings = settings
        self._regions = tuple(named)
        self._key = key
        self._limits = limits or SocketLimits()
        self._memory = FlatMemory()
        self._peers: dict[PeerId, _Peer] = {}
        self._all_peers: set[_Peer] = set()
        self._helpers: set[HelperProcess] = set()
        self._closing = threading.Event()
        epoch = os.urandom(EPOCH_BYTES)
        self._server = AgentServer(settings.host, key, epoch, self._limits, self._board)
        self._address = AgentAddress(settings.library, settings.host, self._server.port, epoch)
        self._threads = ThreadGroup(f"kv-{settings.library}-{self._server.port}")

    @property
    def serving_pid(self) -> int | None:
        """Returns the process id of the helper that serves the memory to peers, None while there is none."""
        return self._server.helper_pid

    def register(self, regions: Sequence[memoryview]) -> None:
        """Raises ConfigError if the library cannot be loaded, or cannot be used as it is configured."""
        assert not self._memory.num_bytes, "memory is registered once"
        sizes = [region.nbytes for region in regions]
        assert sizes == [region.num_bytes for region in self._regions], (sizes, self._regions)
        self._memory = FlatMemory(regions)
        self._server.serve(lambda: self._open_helper(None))

    def descriptor(self) -> bytes:
        return encode(self._address)

    def connect(self, descriptor: bytes) -> PeerId:
        if self._closing.is_set():
            raise PeerError("this endpoint has been closed")
        address = decode(AgentAddress, descriptor)
        if address.library != self._settings.library:
            raise PeerError(f"{address.peer_id} uses the {address.library} transport, not {self._settings.library}")
        known = self._peers.get(address.peer_id)
        if known is not None:
            return address.peer_id
        control, memory = self._dial(address)
        try:
            helper, _ = self._open_helper(memory)
        except (ConfigError, PeerError) as error:
            control.close()
            raise PeerError(f"no helper process for {address.peer_id}: {error}") from error
        self._begin(_Peer(address, AddressSpace(memory.regions), control, helper))
        return address.peer_id

    def submit(
        self, operation: Operation, peer: PeerId, runs: np.ndarray, notify: bytes = b"", window: bytes = b""
    ) -> TransferHandle:
        assert len(notify) <= MAX_NOTIFY_BYTES, len(notify)
        with self._board.lock:
            target = self._peers.get(peer)
            if target is None:
                raise PeerError(f"{peer} is not connected")
            check_runs(runs, self._memory.num_bytes, target.memory.num_bytes)
            if len(runs) > self._limits.max_runs:
                raise PeerError(f"a transfer has {len(runs)} runs; the limit is {self._limits.max_runs}")
            transfer = Transfer(operation, runs, notify, window)
            target.queue.append(transfer)
            self._board.lock.notify_all()
        return transfer

    def disconnect(self, peer: PeerId) -> None:
        known = self._peers.get(peer)
        if known is not None:
            self._lose(known)

    def close(self) -> None:
        self._server.begin_to_close()
        with self._board.lock:
            self._closing.set()
            peers = list(self._peers.values())
            for helper in self._helpers:
                helper.kill()
        for peer in peers:
            self._lose(peer)
        self._threads.join(_GRACE_SECONDS)
        with self._board.lock:
            for peer in self._all_peers:
                peer.control.cut()
        assert self._threads.join(_CLOSE_SECONDS), f"a thread has not ended within {_CLOSE_SECONDS} seconds"
        self._server.close()
        self._memory = FlatMemory()

    def _open_helper(self, peer: ServedMemory | None) -> tuple[HelperProcess, ServedMemory]:
        """Starts a helper that serves or, with a `peer`, one for that peer. Raises ConfigError or PeerError."""
        with self._board.lock:
            if self._closing.is_set():
                raise PeerError("this endpoint has been closed")
            helper = HelperProcess(helper_environment(self._settings))
            self._helpers = {each for each in self._helpers if each.is_running} | {helper}
        try:
            return helper, helper.open(OpenAgent(self._settings, self._regions, peer), _OPEN_SECONDS)
        except (ConfigError, PeerError):
            helper.end()
            raise

    def _dial(self, address: AgentAddress) -> tuple[Stream, ServedMemory]:
        """Returns a connection to that life of the peer, and its agent. Raises PeerError."""
        seconds = self._limits.connect_seconds
        stream, answer = dial(address, AgentAnswer, self._address.peer_id, self._key, seconds, FRAME_BYTES)
        if answer.memory is None:
            stream.close()
            raise PeerError(f"{address.peer_id} sent an invalid answer: it names no memory")
        return stream, answer.memory

    def _begin(self, peer: _Peer) -> None:
        """Adds the peer and starts its threads. Raises PeerError."""
        with self._board.lock:
            self._peers[peer.address.peer_id] = peer
            self._all_peers.add(peer)
        try:
            self._threads.start(self._watch, peer)
        except PeerError:
            peer.has_left.set()
            self._end(peer)
            raise
        try:
            self._threads.start(self._drive, peer)
        except PeerError:
            self._end(peer)
            raise
        if self._closing.is_set():
            self._lose(peer)
            raise PeerError("this endpoint has been closed")

    def _watch(self, peer: _Peer) -> None:
        """Runs in a thread per peer: waits for the end of the peer's agent."""
        is_confirmed = peer.control.wait_for_end()
        with self._board.lock:
            peer.is_confirmed = is_confirmed
        peer.has_left.set()
        self._lose(peer)

    def _drive(self, peer: _Peer) -> None:
        """Runs in a thread per peer: lets the helper execute transfers in order, and ends it when the peer is lost."""
        try:
            while (transfer := self._take(peer)) is not None:
                peer.helper.move(transfer.operation, transfer.runs)
                # Bytes from an agent that has ended meanwhile are not reliable.
                if peer.has_left.is_set():
                    break
                if transfer.notify:
                    peer.control.send(encode(Landed(transfer.notify)))
                self._board.finish(transfer)
        except (ConfigError, PeerError) as error:
            if not peer.is_lost:
                _logger.info("the connection to %s has ended: %s", peer.address.peer_id, error)
        except Exception:
            _logger.exception("the connection to %s has ended because of a bug", peer.address.peer_id)
        finally:
            self._end(peer)

    def _take(self, peer: _Peer) -> Transfer | None:
        """Waits for the next transfer; None when the peer has been given up."""
        with self._board.lock:
            self._board.lock.wait_for(lambda: peer.queue or peer.is_lost)
            peer.running = None if peer.is_lost else peer.queue.popleft()
            return peer.running

    def _end(self, peer: _Peer) -> None:
        """Ends the helper and settles its transfer; a write only if the peer confirms that it has ended."""
        self._lose(peer)
        peer.helper.end()
        transfer = peer.running
        if transfer is not None and (transfer.operation is Operation.READ or self._end_write(peer, transfer)):
            self._board.set_state([transfer], TransferState.FAILED_SETTLED)
        peer.control.cut()
        peer.has_left.wait()
        peer.control.close()
        with self._board.lock:
            self._all_peers.discard(peer)

    def _end_write(self, peer: _Peer, transfer: Transfer) -> bool:
        """Returns whether the write has ended in the peer's memory; waits until that is known, or never will be."""
        if transfer.state.is_settled:
            return True
        try:
            peer.control.send(encode(EndAgent()))
        except PeerError as error:
            _logger.debug("the peer cannot be notified of the end of a write: %s", error)
        peer.has_left.wait()
        return peer.is_confirmed

    def _lose(self, peer: _Peer) -> None:
        """Gives the peer up. Its transfers settle now, or when its helper has ended."""
        with self._board.lock:
            if peer.is_lost:
                return
            peer.is_lost = True
            if self._peers.get(peer.address.peer_id) is peer:
                self._peers.pop(peer.address.peer_id)
            queued, running = list(peer.queue), [] if peer.running is None else [peer.running]
            peer.queue.clear()
            self._board.lock.notify_all()
        peer.helper.kill()
        self._board.set_state(queued, TransferState.FAILED_SETTLED)
        self._board.set_state(running, TransferState.FAILED_UNSETTLED)
