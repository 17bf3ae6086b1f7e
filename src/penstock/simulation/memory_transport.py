"""A transport within one process, on a manual clock, with faults that a script decides.

Bytes are copied when their time has come, in two parts, from memory as it is at that moment: code that reuses a source
or reads a destination too early gets what a one-sided transfer would give it.
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock.kv_transfer.transports.base import PeerId, TransferHandle, TransferState
from penstock.kv_transfer.transports.flat_memory import FlatMemory, check_runs
from penstock.utils.clock import ManualClock
from penstock.utils.errors import PeerError


class FaultKind(enum.StrEnum):
    NONE = "none"
    DROP = "drop"
    """Nothing moves, and no completion is reported."""
    LOST_COMPLETION = "lost_completion"
    """Everything arrives, and no completion is reported."""
    DIE = "die"
    """Ends as FAILED_SETTLED after the first part of the bytes."""
    DIE_UNSETTLED = "die_unsettled"
    """Ends as FAILED_UNSETTLED after the first part; the rest lands `late_by` seconds later."""
    CORRUPT = "corrupt"
    """Ends as DONE with one wrong byte."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to one transfer: it takes `delay` seconds, and the fraction `at` of its bytes lands first."""

    kind: FaultKind = FaultKind.NONE
    delay: float = 0.0
    at: float = 0.5
    late_by: float = 0.0


NO_FAULT = Fault()

FaultScript = Callable[[], Fault]
"""Returns what happens to the next transfer."""


@dataclass(slots=True, eq=False)
class _Transfer:
    owner: MemoryTransport
    peer: MemoryTransport
    runs: list[tuple[int, int, int]]  # local offset, remote offset, bytes
    state: TransferState = TransferState.PENDING
    is_cut: bool = False
    num_events: int = 0

    def settle(self, state: TransferState) -> None:
        if not self.state.is_settled:
            self.state = state
        self.is_cut = True

    def copy(self, start: int, end: int) -> None:
        """Copies bytes [start, end) of all runs, one after the other."""
        position = 0
        for local, remote, num_bytes in self.runs:
            first, last = max(start - position, 0), min(end - position, num_bytes)
            position += num_bytes
            if first < last and not self.is_cut:
                self.owner.memory.write(local + first, self.peer.memory.read(remote + first, last - first))

    def corrupt(self, at: int) -> None:
        """Flips a bit of byte `at` at its destination."""
        memory = self.owner.memory
        for local, _, num_bytes in self.runs:
            if at < num_bytes:
                memory.write(local + at, bytes([memory.read(local + at, 1)[0] ^ 1]))
                return
            at -= num_bytes


@dataclass(order=True, slots=True)
class _Event:
    time: float
    number: int
    action: Callable[[], None] = field(compare=False)


class MemoryFabric:
    """Connects the endpoints. `drain` is for how many seconds after a `disconnect` bytes may still land."""

    def __init__(self, clock: ManualClock, script: FaultScript = lambda: NO_FAULT, drain: float = 0.0):
        self.clock = clock
        self.script = script
        self.drain = drain
        self._endpoints: dict[str, MemoryTransport] = {}
        self._lives: dict[str, int] = {}
        self._transfers: dict[_Transfer, None] = {}
        self._events: list[_Event] = []
        self._num_events = 0
        # During an event this is the event's time, however far the clock has been moved.
        self._now = clock.now()

    def endpoint(self, name: str) -> MemoryTransport:
        """Makes a new life of the endpoint `name`; the one before it, if any, must have ended."""
        assert name not in self._endpoints, f"endpoint {name} is still alive"
        self._lives[name] = self._lives.get(name, 0) + 1
        self._endpoints[name] = MemoryTransport(self, name, self._lives[name])
        return self._endpoints[name]

    def find(self, name: str, life: int) -> MemoryTransport:
        found = self._endpoints.get(name)
        if found is None:
            raise PeerError(f"peer {name} is gone")
        if found.life != life:
            raise PeerError(f"peer {name} is in its life {found.life}, not {life}")
        return found

    def run(self) -> None:
        """Executes all events whose time has come."""
        while self._events and self._events[0].time <= self.clock.now():
            event = heapq.heappop(self._events)
            self._now = event.time
            event.action()
        self._now = self.clock.now()

    def run_next(self, deadline: float) -> None:
        """Moves the clock to the next event, at the latest to the deadline, and executes it."""
        then = min([deadline, *(event.time for event in self._events[:1])])
        self.clock.advance(max(0.0, then - self.clock.now()))
        self.run()

    def crash(self, transport: MemoryTransport) -> None:
        """Ends the endpoint's process. Reads of its memory fail."""
        self._endpoints.pop(transport.name, None)
        for transfer in self._transfers:
            if transfer.peer is transport:
                transfer.settle(TransferState.FAILED_SETTLED)

    def is_quiet(self, transport: MemoryTransport) -> bool:
        """Returns whether nothing that the endpoint has begun moves any more."""
        return not any(each.owner is transport and each.num_events and not each.is_cut for each in self._transfers)

    def touched(self, owner: MemoryTransport) -> Iterator[tuple[int, int]]:
        """Yields what its own transfers may still write: local offset and bytes."""
        for transfer in self._transfers:
            if transfer.owner is owner and not transfer.is_cut:
                yield from ((local, num_bytes) for local, _, num_bytes in transfer.runs)

    def begin(self, transfer: _Transfer) -> None:
        """Schedules a new transfer as the script decides."""
        self.run()
        size = sum(num_bytes for _, _, num_bytes in transfer.runs)
        fault = self.script()
        self._transfers[transfer] = None
        if fault.kind is FaultKind.DROP:
            return
        split = int(size * fault.at)
        self._at(fault.delay / 2, transfer, lambda: transfer.copy(0, split))
        match fault.kind:
            case FaultKind.DIE:
                self._at(fault.delay, transfer, lambda: transfer.settle(TransferState.FAILED_SETTLED))
            case FaultKind.DIE_UNSETTLED:
                self._at(fault.delay, transfer, lambda: self._lose(transfer, split, size, fault.late_by))
            case _:
                self._at(fault.delay, transfer, lambda: self._complete(transfer, split, size, fault))

    def settle_later(self, transfers: Sequence[_Transfer]) -> None:
        self.run()
        for transfer in transfers:
            self._at(self.drain, transfer, lambda each=transfer: each.settle(TransferState.FAILED_SETTLED))

    def transfers_of(self, owner: MemoryTransport) -> list[_Transfer]:
        return [each for each in self._transfers if each.owner is owner]

    def _lose(self, transfer: _Transfer, split: int, size: int, late_by: float) -> None:
        transfer.state = TransferState.FAILED_UNSETTLED

        def land() -> None:
            transfer.copy(split, size)
            transfer.settle(TransferState.FAILED_SETTLED)

        self._at(late_by, transfer, land)

    def _complete(self, transfer: _Transfer, split: int, size: int, fault: Fault) -> None:
        transfer.copy(split, size)
        if fault.kind is FaultKind.LOST_COMPLETION:
            return
        if fault.kind is FaultKind.CORRUPT and size:
            transfer.corrupt(split % size)
        transfer.settle(TransferState.DONE)

    def _at(self, delay: float, transfer: _Transfer, action: Callable[[], None]) -> None:
        def act() -> None:
            transfer.num_events -= 1
            if not transfer.is_cut:
                action()
            if transfer.is_cut:
                self._transfers.pop(transfer, None)

        transfer.num_events += 1
        self._num_events += 1
        heapq.heappush(self._events, _Event(self._now + delay, self._num_events, act))


class MemoryTransport:
    """One life of one endpoint (`DataTransport`)."""

    def __init__(self, fabric: MemoryFabric, name: str, life: int) -> None:
        self.name = name
        self.life = life
        self.memory = FlatMemory()
        self._fabric = fabric
        self._peers: dict[PeerId, MemoryTransport] = {}

    @property
    def peer_id(self) -> PeerId:
        return f"{self.name}#{self.life}"

    @property
    def peers(self) -> set[PeerId]:
        """Those that it is connected to."""
        return set(self._peers)

    def register(self, regions: Sequence[memoryview]) -> None:
        assert not self.memory.num_bytes, "memory is registered once"
        self.memory = FlatMemory(regions)

    def descriptor(self) -> bytes:
        return self.peer_id.encode()

    def connect(self, descriptor: bytes) -> PeerId:
        name, _, life = descriptor.decode(errors="replace").rpartition("#")
        if not life.isdigit():
            raise PeerError(f"{descriptor!r} is not a descriptor of an endpoint")
        peer = self._fabric.find(name, int(life))
        self._peers[peer.peer_id] = peer
        return peer.peer_id

    def submit(self, peer: PeerId, runs: np.ndarray) -> TransferHandle:
        if peer not in self._peers:
            raise PeerError(f"{peer} is not connected")
        target = self._peers[peer]
        self._fabric.find(target.name, target.life)
        check_runs(runs, self.memory.num_bytes, target.memory.num_bytes)
        transfer = _Transfer(self, target, runs.tolist())
        self._fabric.begin(transfer)
        self._fabric.run()
        return transfer

    def poll(self, handle: TransferHandle) -> TransferState:
        self._fabric.run()
        assert isinstance(handle, _Transfer), handle
        return handle.state

    def wait(self, handles: Sequence[TransferHandle], seconds: float) -> None:
        self._fabric.run_next(self._fabric.clock.now() + seconds)

    def disconnect(self, peer: PeerId) -> None:
        target = self._peers.pop(peer, None)
        self._fabric.settle_later([each for each in self._fabric.transfers_of(self) if each.peer is target])

    def close(self) -> None:
        for transfer in self._fabric.transfers_of(self):
            transfer.settle(TransferState.FAILED_SETTLED)
        self._fabric.crash(self)
        self._peers.clear()
