"""The receiving half: from a request's parameters to KV of another engine that may be used (sans-IO).

    asking -> reading -> confirming -> ended
                     \\-> cancelling -> ended

A load succeeds only if all shards have landed, every compared digest is equal, and the producer has confirmed that its
blocks were held through the whole read. It never ends while bytes may still move: a load that is given up while it is
being read is cancelled, and ends with the workers' reports.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import msgspec

from penstock.kv_transfer.p2p.messages import (
    Abort,
    Done,
    DoneAck,
    Fetch,
    Grant,
    Message,
    Refuse,
    Renew,
)
from penstock.kv_transfer.p2p.params import Address, RemotePrefill
from penstock.kv_transfer.p2p.session import PeerKey, Send, cut_reason
from penstock.kv_transfer.p2p.ticket import TicketOffice
from penstock.messages.kv_transfer import BadRange, TransferId
from penstock.utils.errors import PeerError

_RENEWALS_PER_LEASE = 3
_MIN_LEASE, _MAX_LEASE = 0.01, 86400.0


class LoadState(enum.Enum):
    ASKING = "asking"
    READING = "reading"
    CONFIRMING = "confirming"
    CANCELLING = "cancelling"


_NEXT = {
    LoadState.ASKING: {LoadState.READING},
    LoadState.READING: {LoadState.CONFIRMING, LoadState.CANCELLING},
    LoadState.CONFIRMING: set[LoadState](),
    LoadState.CANCELLING: set[LoadState](),
}


@dataclass(frozen=True, slots=True)
class Dial:
    """Requests a connection to this address; `Consumer.on_dialled` takes its name."""

    address: Address


@dataclass(frozen=True, slots=True)
class Read:
    """Requests that the workers read the granted blocks."""

    transfer_id: TransferId
    peer: PeerKey
    grant: Grant
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """Requests that the workers end the read as soon as possible. The load ends with their reports."""

    transfer_id: TransferId


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a load. With a `reason` all tokens are missing, without one only `bad_ranges`."""

    transfer_id: TransferId
    bad_ranges: tuple[BadRange, ...] = ()
    reason: str = ""


ConsumerAction = Send | Dial | Read | Cancel | Ended


@dataclass(slots=True)
class _Load:
    source: RemotePrefill
    prompt_digest: bytes
    first: int
    end: int
    deadline: float
    state: LoadState = LoadState.ASKING
    peer: PeerKey = ""
    is_asked: bool = False
    renew_at: float = float("inf")
    lease: float = 0.0
    bad_ranges: tuple[BadRange, ...] = ()
    reason: str = ""

    @property
    def may_move(self) -> bool:
        """Returns whether bytes may land in its blocks."""
        return self.state is LoadState.READING

    def set_state(self, state: LoadState) -> None:
        assert state in _NEXT[self.state], f"a load goes from {self.state} to {state}"
        self.state = state


@dataclass(slots=True)
class ConsumerCounts:
    num_loads: int = 0
    num_completed: int = 0
    num_refused: int = 0
    num_cancelled: int = 0
    num_unconfirmed: int = 0
    num_not_needed: int = 0
    num_bad_ranges: int = 0


@dataclass(slots=True)
class _Line:
    """A connection to an address, and the fetches to be sent when it is open."""

    peer: PeerKey = ""
    is_open: bool = False
    waiting: list[Fetch] = field(default_factory=list[Fetch])


class Consumer:
    """Every call may add actions; `take_actions` returns them. `timeout` limits the duration of a load, in seconds."""

    def __init__(self, timeout: float, office: TicketOffice) -> None:
        self._timeout = timeout
        self._office = office
        self._loads: dict[TransferId, _Load] = {}
        self._lines: dict[Address, _Line] = {}
        self._address_of: dict[PeerKey, Address] = {}
        self._actions: list[ConsumerAction] = []
        self.counts = ConsumerCounts()

    @property
    def num_loads(self) -> int:
        return len(self._loads)

    # ---- Requests of this engine ----

    def begin(
        self, transfer_id: TransferId, source: RemotePrefill, prompt_digest: bytes, first: int, end: int, *, now: float
    ) -> None:
        """Begins to load tokens [first, end) of a prompt from another engine. Every load ends in an `Ended`."""
        self.counts.num_loads += 1
        load = _Load(source, prompt_digest, first, end, now + self._timeout)
        self._loads[transfer_id] = load
        try:
            self._check_ticket(source, prompt_digest)
        except PeerError as error:
            self._end(transfer_id, str(error))
            return
        self._ask(transfer_id, load)

    def dismiss(self, name: TransferId, source: RemotePrefill, prompt_digest: bytes) -> None:
        """Tells another engine that nothing it holds for a request is needed. There is no answer."""
        self.counts.num_not_needed += 1
        self._send_when_open(source.address, _fetch(name, source, prompt_digest, 0, 0))

    def fail(self, transfer_id: TransferId, reason: str) -> None:
        """Ends a load that cannot succeed, for a reason that its owner has found, or that is no longer wanted."""
        load = self._loads.get(transfer_id)
        if load is None or load.state is LoadState.CANCELLING:
            return
        if load.peer:
            self._actions.append(Send(load.peer, Abort(transfer_id)))
        self._stop(transfer_id, load, reason)

    # ---- Peers ----

    def on_dialled(self, address: Address, peer: PeerKey) -> None:
        """Called when the requested connection is being made."""
        self._lines[address].peer = peer
        self._address_of[peer] = address

    def on_open(self, peer: PeerKey, engine_id: str) -> None:
        """Called when both ends have introduced themselves."""
        address = self._address_of.get(peer)
        if address is None:
            return
        line = self._lines[address]
        line.is_open = True
        waiting, line.waiting = line.waiting, []
        for fetch in waiting:
            load = self._loads.get(fetch.transfer_id)
            if load is None or load.state is LoadState.CANCELLING:
                # It has been cancelled meanwhile, or has never needed anything: the producer need not hold anything.
                self._actions.append(Send(peer, msgspec.structs.replace(fetch, first=0, end=0)))
                continue
            # A proxy may know the engine id of an earlier life; a rendezvous is identified by its own name.
            if load.source.ticket and load.source.engine_id != engine_id:
                self._stop(fetch.transfer_id, load, f"the engine there is {engine_id}, not {load.source.engine_id}")
                continue
            load.is_asked, load.peer = True, peer
            self._actions.append(Send(peer, fetch))

    def on_lost(self, peer: PeerKey, reason: str) -> None:
        """Called when the connection has ended, or could not be made."""
        address = self._address_of.pop(peer, None)
        if address is None:
            return
        line = self._lines.pop(address)
        lost = [fetch.transfer_id for fetch in line.waiting]
        lost += [name for name, load in self._loads.items() if load.peer == peer]
        for transfer_id in lost:
            if transfer_id in self._loads:
                self._loads[transfer_id].peer = ""
                self.fail(transfer_id, reason)

    def receive(self, peer: PeerKey, message: Message, now: float) -> None:
        """Applies a message, if its load has not ended. Raises PeerError for a message that no producer sends."""
        if not isinstance(message, Grant | Refuse | DoneAck):
            raise PeerError(f"the peer sent {type(message).__name__}, which a producer does not send")
        load = self._loads.get(message.transfer_id)
        if load is None or load.peer != peer:
            return
        match message:
            case Grant() if load.state is LoadState.ASKING:
                self._on_grant(load, message, now)
            case Refuse() if load.state is LoadState.ASKING:
                self.counts.num_refused += 1
                self._stop(message.transfer_id, load, cut_reason(message.detail))
            case DoneAck() if load.state is LoadState.CONFIRMING:
                self._on_confirmed(message, load)
            case _:
                pass

    # ---- Workers ----

    def on_read(self, transfer_id: TransferId, bad_ranges: tuple[BadRange, ...], is_complete: bool) -> None:
        """Called when all shards have reported, so that nothing of the read moves any more."""
        load = self._loads.get(transfer_id)
        if load is None:
            return
        if load.state is LoadState.CANCELLING:
            self._end(transfer_id, load.reason)
        elif not is_complete:
            if load.peer:
                self._actions.append(Send(load.peer, Abort(transfer_id)))
            self._end(transfer_id, "the KV could not be read")
        else:
            load.set_state(LoadState.CONFIRMING)
            load.bad_ranges = bad_ranges
            self.counts.num_bad_ranges += len(bad_ranges)
            self._actions.append(Send(load.peer, Done(transfer_id)))

    def on_read_refused(self, transfer_id: TransferId, reason: str) -> None:
        """Called when the workers have not begun to read, and will not."""
        load = self._loads[transfer_id]
        if load.peer:
            self._actions.append(Send(load.peer, Abort(transfer_id)))
        self._end(transfer_id, reason)

    # ---- Time ----

    def poll(self, now: float) -> None:
        for transfer_id, load in list(self._loads.items()):
            if load.state is LoadState.READING and load.renew_at <= now:
                load.renew_at = now + load.lease / _RENEWALS_PER_LEASE
                self._actions.append(Send(load.peer, Renew(transfer_id)))
            if load.deadline <= now:
                self.fail(transfer_id, f"the KV has not arrived within {self._timeout:g} seconds")

    @property
    def next_deadline(self) -> float | None:
        times = [
            min(load.deadline, load.renew_at if load.state is LoadState.READING else load.deadline)
            for load in self._loads.values()
            if load.state is not LoadState.CANCELLING
        ]
        return min(times, default=None)

    def take_actions(self) -> list[ConsumerAction]:
        actions, self._actions = self._actions, []
        return actions

    # ---- Transitions ----

    def _check_ticket(self, source: RemotePrefill, prompt_digest: bytes) -> None:
        """Raises PeerError for a ticket that the producer would refuse, so that it need not be asked."""
        if not source.ticket:
            return
        ticket = self._office.read(source.ticket)
        if ticket.engine_id != source.engine_id:
            raise PeerError(f"the ticket was issued by engine {ticket.engine_id}, not by {source.engine_id}")
        if ticket.prompt_digest != prompt_digest:
            problem = "the ticket is for another prompt or salt"
            raise PeerError(f"{problem}: both engines need the same chat template and API keys")

    def _ask(self, transfer_id: TransferId, load: _Load) -> None:
        fetch = _fetch(transfer_id, load.source, load.prompt_digest, load.first, load.end)
        line = self._send_when_open(load.source.address, fetch)
        if line.is_open:
            load.is_asked, load.peer = True, line.peer

    def _send_when_open(self, address: Address, fetch: Fetch) -> _Line:
        if address not in self._lines:
            self._lines[address] = _Line()
            self._actions.append(Dial(address))
        line = self._lines[address]
        if line.is_open:
            self._actions.append(Send(line.peer, fetch))
        else:
            line.waiting.append(fetch)
        return line

    def _on_grant(self, load: _Load, grant: Grant, now: float) -> None:
        if not _MIN_LEASE <= grant.lease <= _MAX_LEASE:
            raise PeerError(f"a lease of {grant.lease:g} seconds is not between {_MIN_LEASE:g} and {_MAX_LEASE:g}")
        load.set_state(LoadState.READING)
        load.lease = grant.lease
        load.renew_at = now + grant.lease / _RENEWALS_PER_LEASE
        self._actions.append(Read(grant.transfer_id, load.peer, grant, load.first, load.end))

    def _on_confirmed(self, message: DoneAck, load: _Load) -> None:
        if message.is_valid:
            self.counts.num_completed += 1
            del self._loads[message.transfer_id]
            self._actions.append(Ended(message.transfer_id, load.bad_ranges))
        else:
            self.counts.num_unconfirmed += 1
            self._end(message.transfer_id, "the lease ended before everything was read")

    def _stop(self, transfer_id: TransferId, load: _Load, reason: str) -> None:
        if load.state is LoadState.CANCELLING:
            return
        if load.may_move:
            self._cancel(transfer_id, load, reason)
        else:
            self._end(transfer_id, reason)

    def _cancel(self, transfer_id: TransferId, load: _Load, reason: str) -> None:
        self.counts.num_cancelled += 1
        load.set_state(LoadState.CANCELLING)
        load.reason = reason
        self._actions.append(Cancel(transfer_id))

    def _end(self, transfer_id: TransferId, reason: str) -> None:
        """Ends a load without KV. The reason may be a peer's, and may be empty."""
        del self._loads[transfer_id]
        self._actions.append(Ended(transfer_id, reason=reason or "no reason was given"))

    def check_integrity(self) -> None:
        """Recomputes derived state; raises AssertionError if it is inconsistent."""
        for address, line in self._lines.items():
            assert not line.peer or self._address_of[line.peer] == address, address
            assert not (line.is_open and line.waiting), f"{address} is open and {len(line.waiting)} fetches wait"
        for transfer_id, load in self._loads.items():
            is_late = load.state in (LoadState.READING, LoadState.CONFIRMING)
            assert load.is_asked or not is_late, f"{transfer_id}: {load.state}, but it was never requested"


def _fetch(name: TransferId, source: RemotePrefill, prompt_digest: bytes, first: int, end: int) -> Fetch:
    return Fetch(
        transfer_id=name,
        first=first,
        end=end,
        prompt_digest=prompt_digest,
        ticket=source.ticket,
        rendezvous=source.rendezvous,
    )
