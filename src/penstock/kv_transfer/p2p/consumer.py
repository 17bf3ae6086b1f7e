"""The receiving half: from a request's parameters to KV of another engine that may be used (sans-IO).

A request whose prompt another engine computes has one record, from its start to the end of its load:

    wanted -> asked -> reading -> confirming -> ended
                              \\-> cancelling -> ended
    wanted or asked -> declined -> ended

A load succeeds only if all shards have landed, every compared digest is equal, and the producer has confirmed that its
blocks were held through the whole read. It never ends while bytes may still move: a load that is given up while it is
being read is cancelled, and ends with the workers' reports. A load has no deadline here: its owner cancels it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf

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
from penstock.messages.scheduler_output import BlockIds
from penstock.utils.errors import PeerError
from penstock.utils.logging import get_logger

logger = get_logger(__name__)

CANCELLED = "the request no longer waits for it"
_RENEWALS_PER_LEASE = 3
_MIN_LEASE, _MAX_LEASE = 0.01, 86400.0


class LoadState(enum.Enum):
    WANTED = "wanted"
    ASKED = "asked"
    """The producer has been asked, or will be as soon as it is connected."""
    READING = "reading"
    CONFIRMING = "confirming"
    CANCELLING = "cancelling"
    DECLINED = "declined"
    """The producer will be told that nothing is needed, as soon as it is connected."""


_NEXT = {
    LoadState.WANTED: {LoadState.ASKED, LoadState.DECLINED},
    LoadState.ASKED: {LoadState.READING, LoadState.DECLINED},
    LoadState.READING: {LoadState.CONFIRMING, LoadState.CANCELLING},
    LoadState.CONFIRMING: set[LoadState](),
    LoadState.CANCELLING: set[LoadState](),
    LoadState.DECLINED: set[LoadState](),
}


@dataclass(slots=True, eq=False)
class Load:
    """What this engine wants from another one for a request, and how far it is.

    `name` is the request's, and once it has begun, `transfer_id` is that of the load of tokens [first, end) into
    `block_ids`, which the request has needed since `began`. `peer` has been asked; the workers know it as `engine`.
    """

    name: TransferId
    transfer_id: TransferId
    source: RemotePrefill
    prompt_digest: bytes
    state: LoadState = LoadState.WANTED
    block_ids: BlockIds = ()
    first: int = 0
    end: int = 0
    began: float = 0.0
    peer: PeerKey = ""
    engine: str = ""
    lease: float = 0.0
    renew_at: float = float("inf")
    bad_ranges: tuple[BadRange, ...] = ()
    reason: str = ""

    def set_state(self, state: LoadState) -> None:
        assert state in _NEXT[self.state], f"a load goes from {self.state} to {state}"
        self.state = state


@dataclass(frozen=True, slots=True)
class Dial:
    """Requests a connection to this address; `Consumer.on_dialled` takes its name."""

    address: Address


@dataclass(frozen=True, slots=True)
class Read:
    """Requests that the workers read the granted blocks."""

    load: Load
    grant: Grant


@dataclass(frozen=True, slots=True)
class Cancel:
    """Requests that the workers end the read as soon as possible. The load ends with their reports."""

    load: Load


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a load. With a `reason` all tokens are missing, without one only the load's `bad_ranges`."""

    load: Load
    reason: str = ""


ConsumerAction = Send | Dial | Read | Cancel | Ended


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
    """A connection to an address."""

    peer: PeerKey = ""
    is_open: bool = False


class Consumer:
    """Every call may add actions; `take_actions` returns them. `resolve` turns the address in a request into one that
    may be dialled, or raises PeerError. The core cancels a load at `load_timeout`, in seconds, or some steps later:
    after ten of them it no longer runs, and the lease is not renewed, because the producer needs its blocks."""

    def __init__(self, office: TicketOffice, resolve: Callable[[Address], Address], load_timeout: float) -> None:
        self._office = office
        self._resolve, self._max_seconds = resolve, 10 * load_timeout
        self._loads: dict[TransferId, Load] = {}
        self._lines: dict[Address, _Line] = {}
        self._address_of: dict[PeerKey, Address] = {}
        self._actions: list[ConsumerAction] = []
        self.counts = ConsumerCounts()

    @property
    def num_loads(self) -> int:
        """Returns the number of loads that have begun and not ended."""
        return sum(load.state not in (LoadState.WANTED, LoadState.DECLINED) for load in self._loads.values())

    # ---- Requests of this engine ----

    def want(self, name: TransferId, source: RemotePrefill, prompt_digest: bytes) -> None:
        """Records where a request's KV is. Every such request ends in `cancel`."""
        self._loads[name] = Load(name, name, source, prompt_digest)

    def wanted(self, name: TransferId) -> RemotePrefill | None:
        """Returns where the request's KV is, None if it has none or a load has begun."""
        load = self._loads.get(name)
        return load.source if load is not None and load.state is LoadState.WANTED else None

    def begin(
        self, name: TransferId, transfer_id: TransferId, block_ids: BlockIds, first: int, end: int, *, now: float
    ) -> None:
        """Begins to load tokens [first, end) of the prompt from the other engine. Every load ends in an `Ended`."""
        self.counts.num_loads += 1
        load = self._loads[name]
        load.transfer_id, load.block_ids, load.first, load.end, load.began = transfer_id, block_ids, first, end, now
        try:
            self._check_ticket(load)
            self._ask(load, LoadState.ASKED)
        except PeerError as error:
            self._end(load, str(error))

    def cancel(self, name: TransferId) -> None:
        """Ends what a request wants: a load, or, before it has begun, what the other engine holds for the request."""
        load = self._loads.get(name)
        if load is None:
            return
        if load.state is not LoadState.WANTED:
            self._fail(load, CANCELLED)
            return
        self.counts.num_not_needed += 1
        try:
            self._ask(load, LoadState.DECLINED)
        except PeerError as error:
            logger.warning("the prefill of %s is not used: %s", name, error)
            del self._loads[name]

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
        self._lines[address].is_open = True
        for load in self._waiting_for(address):
            # A proxy may know the engine id of an earlier life; a rendezvous is identified by its own name.
            is_other = bool(load.source.ticket) and load.source.engine_id != engine_id
            if is_other and load.state is LoadState.ASKED:
                self._end(load, f"the engine there is {engine_id}, not {load.source.engine_id}")
            else:
                self._fetch(load, peer)

    def on_lost(self, peer: PeerKey, reason: str) -> None:
        """Called when the connection has ended, or could not be made."""
        address = self._address_of.pop(peer, None)
        if address is None:
            return
        del self._lines[address]
        for load in [*self._waiting_for(address), *(each for each in self._loads.values() if each.peer == peer)]:
            load.peer = ""
            if load.state is LoadState.DECLINED:
                del self._loads[load.name]
            else:
                self._stop(load, reason)

    def receive(self, peer: PeerKey, message: Message, now: float) -> None:
        """Applies a message, if its load has not ended. Raises PeerError for a message that no producer sends."""
        if not isinstance(message, Grant | Refuse | DoneAck):
            raise PeerError(f"the peer sent {type(message).__name__}, which a producer does not send")
        load = None if message.transfer_id is None else self._loads.get(message.transfer_id)
        if load is None or load.peer != peer:
            return
        match message:
            case Grant() if load.state is LoadState.ASKED:
                self._on_grant(load, message, now)
            case Refuse() if load.state is LoadState.ASKED:
                self.counts.num_refused += 1
                self._end(load, cut_reason(message.detail))
            case DoneAck() if load.state is LoadState.CONFIRMING:
                self._on_confirmed(load, is_valid=message.is_valid)
            case _:
                pass

    # ---- Workers ----

    def on_read(self, load: Load, bad_ranges: tuple[BadRange, ...], is_complete: bool) -> None:
        """Called when all shards have reported, so that nothing of the read moves any more."""
        if load.state is LoadState.CANCELLING:
            self._end(load, load.reason)
        elif not is_complete:
            self.on_read_refused(load, "the KV could not be read")
        else:
            load.set_state(LoadState.CONFIRMING)
            load.bad_ranges = bad_ranges
            self.counts.num_bad_ranges += len(bad_ranges)
            self._actions.append(Send(load.peer, Done(load.name)))

    def on_read_refused(self, load: Load, reason: str) -> None:
        """Called when nothing is read, nor will be."""
        self._abort(load)
        self._end(load, reason)

    # ---- Time ----

    def poll(self, now: float) -> None:
        """Renews the leases of reads."""
        for load in self._loads.values():
            if load.state is LoadState.READING and load.renew_at <= now:
                load.renew_at = now + load.lease / _RENEWALS_PER_LEASE if now < load.began + self._max_seconds else inf
                self._actions.append(Send(load.peer, Renew(load.name)))

    @property
    def next_deadline(self) -> float | None:
        times = (load.renew_at for load in self._loads.values() if load.state is LoadState.READING)
        return min(times, default=None)

    def take_actions(self) -> list[ConsumerAction]:
        actions, self._actions = self._actions, []
        return actions

    # ---- Transitions ----

    def _check_ticket(self, load: Load) -> None:
        """Raises PeerError for a ticket that the producer would refuse, so that it need not be asked."""
        source = load.source
        if not source.ticket:
            return
        ticket = self._office.read(source.ticket)
        if ticket.engine_id != source.engine_id:
            raise PeerError(f"the ticket was issued by engine {ticket.engine_id}, not by {source.engine_id}")
        if ticket.prompt_digest != load.prompt_digest:
            problem = "the ticket is for another prompt or salt"
            raise PeerError(f"{problem}: both engines need the same chat template and API keys")

    def _ask(self, load: Load, state: LoadState) -> None:
        """Sends the load's fetch, as soon as the producer is connected. Raises PeerError for an unknown address."""
        address = self._resolve(load.source.address)
        load.source = replace(load.source, address=address)
        load.set_state(state)
        if address not in self._lines:
            self._lines[address] = _Line()
            self._actions.append(Dial(address))
        elif self._lines[address].is_open:
            self._fetch(load, self._lines[address].peer)

    def _waiting_for(self, address: Address) -> list[Load]:
        """Returns the loads whose fetch has not been sent, because there is no connection."""
        states = (LoadState.ASKED, LoadState.DECLINED)
        loads = self._loads.values()
        return [each for each in loads if not each.peer and each.state in states and each.source.address == address]

    def _fetch(self, load: Load, peer: PeerKey) -> None:
        is_declined = load.state is LoadState.DECLINED
        fetch = Fetch(
            transfer_id=load.name,
            first=0 if is_declined else load.first,
            end=0 if is_declined else load.end,
            prompt_digest=load.prompt_digest,
            ticket=load.source.ticket,
            rendezvous=load.source.rendezvous,
        )
        self._actions.append(Send(peer, fetch))
        load.peer = peer
        if is_declined:
            del self._loads[load.name]

    def _on_grant(self, load: Load, grant: Grant, now: float) -> None:
        if not _MIN_LEASE <= grant.lease <= _MAX_LEASE:
            raise PeerError(f"a lease of {grant.lease:g} seconds is not between {_MIN_LEASE:g} and {_MAX_LEASE:g}")
        load.set_state(LoadState.READING)
        load.lease = grant.lease
        load.renew_at = now + grant.lease / _RENEWALS_PER_LEASE
        self._actions.append(Read(load, grant))

    def _on_confirmed(self, load: Load, *, is_valid: bool) -> None:
        if is_valid:
            self.counts.num_completed += 1
            del self._loads[load.name]
            self._actions.append(Ended(load))
        else:
            self.counts.num_unconfirmed += 1
            self._end(load, "the lease ended before everything was read")

    def _fail(self, load: Load, reason: str) -> None:
        """Ends a load that is no longer wanted. The producer is told, so that it holds nothing for it."""
        if load.state in (LoadState.CANCELLING, LoadState.DECLINED):
            return
        if load.state is LoadState.ASKED and not load.peer:
            load.set_state(LoadState.DECLINED)
            self._actions.append(Ended(load, reason))
        else:
            self._abort(load)
            self._stop(load, reason)

    def _abort(self, load: Load) -> None:
        if load.peer:
            self._actions.append(Send(load.peer, Abort(load.name)))

    def _stop(self, load: Load, reason: str) -> None:
        """Ends a load, at once if nothing of it moves."""
        if load.state is LoadState.READING:
            self.counts.num_cancelled += 1
            load.set_state(LoadState.CANCELLING)
            load.reason = reason
            self._actions.append(Cancel(load))
        elif load.state is not LoadState.CANCELLING:
            self._end(load, reason)

    def _end(self, load: Load, reason: str) -> None:
        """Ends a load without KV. The reason may be a peer's, and may be empty."""
        del self._loads[load.name]
        self._actions.append(Ended(load, reason or "no reason was given"))

    def check_integrity(self) -> None:
        """Recomputes derived state; raises AssertionError if it is inconsistent."""
        for address, line in self._lines.items():
            assert not line.peer or self._address_of[line.peer] == address, address
            waiting = self._waiting_for(address)
            assert not (line.is_open and waiting), f"{address} is open and {len(waiting)} fetches wait"
        for load in self._loads.values():
            assert load.peer or load.state not in (LoadState.READING, LoadState.CONFIRMING), f"{load.name} has no peer"
