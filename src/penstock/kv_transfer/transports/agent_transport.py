"""A transport over a transfer library, such as NIXL or Mooncake, which runs in helper processes.

The KV memory has a name, so that a helper can map it. One helper serves it to peers for as long as the endpoint lives;
for each peer that this endpoint is connected to there is another one, which reads from that peer. No library is trusted
to cancel a transfer: one that is not DONE is over when the helper that began it has ended, which the kernel confirms.
So a transfer that fails, and a `disconnect`, end the helper for that peer, and no other; the next `connect` starts a
new one. A library that aborts, as some do when a peer dies at the wrong moment, ends a helper and not the engine.

A transfer that fails is FAILED_UNSETTLED until its helper has ended, and then FAILED_SETTLED.

Endpoints have an authenticated control connection (`agent_protocol.py`). It tells a peer which agent serves now, and
its end means the end of that agent. What the libraries themselves send is neither authenticated nor encrypted.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock.kv_transfer.transports.agent_protocol import FRAME_BYTES, AgentAddress, AgentAnswer
from penstock.kv_transfer.transports.agent_server import AgentServer
from penstock.kv_transfer.transports.agents import AgentSettings, helper_environment
from penstock.kv_transfer.transports.base import PeerId, TransferHandle, TransferState
from penstock.kv_transfer.transports.dial import dial
from penstock.kv_transfer.transports.flat_memory import AddressSpace, FlatMemory, check_runs
from penstock.kv_transfer.transports.helper import HelperProcess
from penstock.kv_transfer.transports.helper_messages import NamedRegion, OpenAgent, ServedMemory
from penstock.kv_transfer.transports.polled_transport import PolledTransport, Transfer
from penstock.kv_transfer.transports.socket_protocol import EPOCH_BYTES, SocketLimits, decode, encode
from penstock.kv_transfer.transports.stream import Stream
from penstock.kv_transfer.transports.threads import ThreadGroup
from penstock.messages.kv_layout import MemoryRegion
from penstock.utils.errors import ConfigError, PeerError
from penstock.utils.logging import get_logger

_logger = get_logger(__name__)

_OPEN_SECONDS = 120.0  # to load a library and to register the memory
_CLOSE_SECONDS = 30.0


@dataclass(slots=True, eq=False)
class _Peer:
    """`has_left` is set when the control connection has ended."""

    address: AgentAddress
    memory: AddressSpace
    control: Stream
    helper: HelperProcess
    queue: deque[Transfer] = field(default_factory=deque[Transfer])
    running: Transfer | None = None
    is_lost: bool = False
    has_left: threading.Event = field(default_factory=threading.Event)


class AgentTransport(PolledTransport):
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
        self._helpers: set[HelperProcess] = set()
        self._closing = threading.Event()
        epoch = os.urandom(EPOCH_BYTES)
        self._server = AgentServer(settings.host, key, epoch, self._limits, self._lock)
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

    def submit(self, peer: PeerId, runs: np.ndarray) -> TransferHandle:
        with self._lock:
            target = self._peers.get(peer)
            if target is None:
                raise PeerError(f"{peer} is not connected")
            check_runs(runs, self._memory.num_bytes, target.memory.num_bytes)
            if len(runs) > self._limits.max_runs:
                raise PeerError(f"a transfer has {len(runs)} runs; the limit is {self._limits.max_runs}")
            transfer = Transfer(runs)
            target.queue.append(transfer)
            self._lock.notify_all()
        return transfer

    def disconnect(self, peer: PeerId) -> None:
        known = self._peers.get(peer)
        if known is not None:
            self._lose(known)

    def close(self) -> None:
        self._server.begin_to_close()
        with self._lock:
            self._closing.set()
            peers = list(self._peers.values())
            for helper in self._helpers:
                helper.kill()
        for peer in peers:
            self._lose(peer)
        assert self._threads.join(_CLOSE_SECONDS), f"a thread has not ended within {_CLOSE_SECONDS} seconds"
        self._server.close()
        self._memory = FlatMemory()

    def _open_helper(self, peer: ServedMemory | None) -> tuple[HelperProcess, ServedMemory]:
        """Starts a helper that serves or, with a `peer`, one for that peer. Raises ConfigError or PeerError."""
        with self._lock:
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
        stream, answer = dial(address, AgentAnswer, self._key, seconds, FRAME_BYTES)
        if answer.memory is None:
            stream.close()
            raise PeerError(f"{address.peer_id} sent an invalid answer: it names no memory")
        return stream, answer.memory

    def _begin(self, peer: _Peer) -> None:
        """Adds the peer and starts its threads. Raises PeerError."""
        with self._lock:
            self._peers[peer.address.peer_id] = peer
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
        # The peer sends nothing more: it has closed the connection, or it violates the protocol.
        peer.control.wait_for_data()
        peer.has_left.set()
        self._lose(peer)

    def _drive(self, peer: _Peer) -> None:
        """Runs in a thread per peer: lets the helper execute transfers in order, and ends it when the peer is lost."""
        try:
            while (transfer := self._take(peer)) is not None:
                peer.helper.read(transfer.runs)
                # Bytes from an agent that has ended meanwhile are not reliable.
                if peer.has_left.is_set():
                    break
                self._finish(transfer)
        except (ConfigError, PeerError) as error:
            if not peer.is_lost:
                _logger.info("the connection to %s has ended: %s", peer.address.peer_id, error)
        except Exception:
            _logger.exception("the connection to %s has ended because of a bug", peer.address.peer_id)
        finally:
            self._end(peer)

    def _take(self, peer: _Peer) -> Transfer | None:
        """Waits for the next transfer; None when the peer has been given up."""
        with self._lock:
            self._lock.wait_for(lambda: peer.queue or peer.is_lost)
            peer.running = None if peer.is_lost else peer.queue.popleft()
            return peer.running

    def _end(self, peer: _Peer) -> None:
        """Ends the helper, and settles its transfer."""
        self._lose(peer)
        peer.helper.end()
        if peer.running is not None:
            self._set_state([peer.running], TransferState.FAILED_SETTLED)
        peer.control.cut()
        peer.has_left.wait()
        peer.control.close()

    def _lose(self, peer: _Peer) -> None:
        """Gives the peer up. Its transfers settle now, or when its helper has ended."""
        with self._lock:
            if peer.is_lost:
                return
            peer.is_lost = True
            if self._peers.get(peer.address.peer_id) is peer:
                self._peers.pop(peer.address.peer_id)
            queued, running = list(peer.queue), [] if peer.running is None else [peer.running]
            peer.queue.clear()
            self._lock.notify_all()
        peer.helper.kill()
        self._set_state(queued, TransferState.FAILED_SETTLED)
        self._set_state(running, TransferState.FAILED_UNSETTLED)
