"""The sending half: which KV is held for other engines, which of them may read it, and for how long (sans-IO).

A finished request's blocks are held until a consumer has read them, has reported that it does not need them, or has not
come in time. A hold is given to one reader, once: a repeated ticket is refused. A fetch that names a rendezvous may
come before its request has ended; it is parked until then, with a deadline.

    held -> attesting -> granted -> released
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.kv_transfer.p2p.messages import (
    Abort,
    Done,
    DoneAck,
    Fetch,
    Grant,
    Message,
    Reason,
    Refuse,
    Renew,
    ShardDigests,
)
from penstock.kv_transfer.p2p.session import PeerKey, Send
from penstock.kv_transfer.p2p.ticket import Ticket, TicketOffice
from penstock.messages.kv_transfer import TransferId
from penstock.messages.scheduler_output import BlockIds
from penstock.utils.errors import PeerError


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerRules:
    """All times are in seconds. `hold_seconds`: how long blocks are held for a reader that has not come;
    `park_seconds`: how long a reader waits for a request that has not ended. Without `is_attested` blocks are not
    digested."""

    hold_seconds: float
    lease_seconds: float
    park_seconds: float
    max_parked: int
    is_attested: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A finished request whose blocks are held under `hold_id`; they have the KV of its first `num_tokens` tokens."""

    hold_id: TransferId
    prompt_digest: bytes
    num_tokens: int
    block_ids: BlockIds
    rendezvous: str = ""


@dataclass(frozen=True, slots=True)
class Attest:
    """Requests that the workers digest what `peer` is going to get."""

    job_id: TransferId
    peer: PeerKey
    block_ids: BlockIds
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Release:
    hold_id: TransferId


@dataclass(frozen=True, slots=True)
class Sent:
    """A peer has read `num_tokens` tokens, `seconds` after it was granted them."""

    peer: PeerKey
    num_tokens: int
    seconds: float


ProducerAction = Send | Attest | Release | Sent

_GrantKey = tuple[PeerKey, TransferId]


@dataclass(slots=True)
class _Held:
    offer: Offer
    deadline: float
    is_taken: bool = False


@dataclass(slots=True)
class _Parked:
    fetch: Fetch
    deadline: float


@dataclass(slots=True)
class _Closed:
    """A rendezvous that one side has given up: its reader, or else the request of this engine."""

    is_by_reader: bool
    deadline: float


@dataclass(slots=True)
class _Grant:
    held: _Held
    fetch: Fetch
    job_id: TransferId
    deadline: float
    granted_at: float = 0.0
    is_granted: bool = False
    # The workers are reading the blocks.
    is_busy: bool = False
    # Meanwhile the reader has disconnected, cancelled, or exceeded its lease.
    is_abandoned: bool = False

    @property
    def is_live(self) -> bool:
        return self.is_granted and not self.is_abandoned


@dataclass(slots=True)
class ProducerCounts:
    num_offered: int = 0
    num_granted: int = 0
    num_completed: int = 0
    num_not_needed: int = 0
    num_expired: int = 0
    num_refused: int = 0


@dataclass(slots=True)
class _State:
    held: dict[TransferId, _Held] = field(default_factory=dict[TransferId, _Held])
    at_rendezvous: dict[str, _Held] = field(default_factory=dict[str, _Held])
    parked: dict[_GrantKey, _Parked] = field(default_factory=dict[_GrantKey, _Parked])
    grants: dict[_GrantKey, _Grant] = field(default_factory=dict[_GrantKey, _Grant])
    jobs: dict[TransferId, _GrantKey] = field(default_factory=dict[TransferId, _GrantKey])
    closed: dict[str, _Closed] = field(default_factory=dict[str, _Closed])


class Producer:
    """`epoch` differs in every life of the engine. Every call may add actions; `take_actions` returns them."""

    def __init__(self, engine_id: str, epoch: str, rules: ProducerRules, office: TicketOffice) -> None:
        self._engine_id = engine_id
        self._epoch = epoch
        self._rules = rules
        self._office = office
        self._state = _State()
        self._actions: list[ProducerAction] = []
        self._num_jobs = 0
        self.counts = ProducerCounts()

    @property
    def num_held(self) -> int:
        return len(self._state.held)

    # ---- Requests of this engine ----

    def expect(self, rendezvous: str) -> None:
        """Called when a request with this rendezvous begins: a reader waits, though an earlier one ended without KV."""
        closed = self._state.closed.get(rendezvous)
        if closed is not None and not closed.is_by_reader:
            del self._state.closed[rendezvous]

    def offer(self, offer: Offer, now: float) -> str:
        """Offers the held blocks of a request that has ended. Returns its ticket."""
        held = _Held(offer, now + self._rules.hold_seconds)
        self._state.held[offer.hold_id] = held
        self.counts.num_offered += 1
        if offer.rendezvous:
            self._state.at_rendezvous[offer.rendezvous] = held
            closed = self._state.closed.pop(offer.rendezvous, None)
            if closed is not None and closed.is_by_reader:
                self._drop(held)
            for key in self._waiting_at(offer.rendezvous):
                self._answer(key, self._state.parked.pop(key).fetch, now)
        return self._office.issue(
            Ticket(self._engine_id, self._epoch, offer.hold_id, offer.prompt_digest, offer.num_tokens)
        )

    def withdraw(self, rendezvous: str, now: float) -> None:
        """Called when the request with this rendezvous has ended without KV."""
        if rendezvous:
            self._close(rendezvous, now, is_by_reader=False)
        for key in self._waiting_at(rendezvous):
            del self._state.parked[key]
            self._refuse(key, Reason.PREFILL_FAILED, "the request has ended before its prompt was computed")

    def can_be_met(self, rendezvous: str) -> bool:
        """Returns whether a request may use this rendezvous: no other one is held under it."""
        return rendezvous not in self._state.at_rendezvous

    # ---- Peers ----

    def receive(self, peer: PeerKey, message: Message, now: float) -> None:
        """Applies a message. Raises PeerError for one that no consumer sends."""
        match message:
            case Fetch():
                self._on_fetch((peer, message.transfer_id), message, now)
            case Renew():
                grant = self._state.grants.get((peer, message.transfer_id))
                if grant is not None and grant.is_live and now < grant.deadline:
                    grant.deadline = now + self._rules.lease_seconds
            case Done():
                self._on_done((peer, message.transfer_id), now)
            case Abort():
                parked = self._state.parked.get((peer, message.transfer_id))
                self._give_up((peer, message.transfer_id))
                if parked is not None and not self._waiting_at(parked.fetch.rendezvous):
                    self._close(parked.fetch.rendezvous, now, is_by_reader=True)
            case _:
                raise PeerError(f"the peer sent {type(message).__name__}, which a consumer does not send")

    def on_lost(self, peer: PeerKey) -> None:
        """Called when the connection has ended: its grants can no longer be confirmed."""
        for key in [key for key in (*self._state.parked, *self._state.grants) if key[0] == peer]:
            self._give_up(key)

    def on_attested(self, job_id: TransferId, digests: Sequence[ShardDigests] | None, now: float) -> None:
        """Called when the workers have digested the blocks; None if they could not."""
        key = self._state.jobs.pop(job_id, None)
        if key is None:
            return
        grant = self._state.grants[key]
        grant.is_busy = False
        if grant.is_abandoned:
            self._release(key)
        elif digests is None:
            self._release(key)
            self._refuse(key, Reason.PREFILL_FAILED, "the blocks cannot be read")
        else:
            self._grant(key, grant, tuple(digests), now)

    # ---- Time ----

    def poll(self, now: float) -> None:
        """Ends everything whose deadline has passed."""
        state = self._state
        for key in [key for key, each in state.parked.items() if each.deadline <= now]:
            del state.parked[key]
            self._refuse(key, Reason.UNKNOWN_REQUEST, "the request has not been prefilled in time")
        for key in [key for key, each in state.grants.items() if each.is_live and each.deadline <= now]:
            self.counts.num_expired += 1
            self._give_up(key)
        for name in [name for name, each in state.closed.items() if each.deadline <= now]:
            del state.closed[name]
        for each in [each for each in state.held.values() if not each.is_taken and each.deadline <= now]:
            self.counts.num_expired += 1
            self._drop(each)

    @property
    def next_deadline(self) -> float | None:
        state = self._state
        deadlines = [each.deadline for each in state.parked.values()]
        deadlines += [each.deadline for each in state.grants.values() if each.is_live]
        deadlines += [each.deadline for each in state.held.values() if not each.is_taken]
        return min(deadlines, default=None)

    def take_actions(self) -> list[ProducerAction]:
        actions, self._actions = self._actions, []
        return actions

    # ---- Transitions ----

    def _on_fetch(self, key: _GrantKey, fetch: Fetch, now: float) -> None:
        if key in self._state.grants or key in self._state.parked:
            return
        if fetch.rendezvous and fetch.rendezvous not in self._state.at_rendezvous:
            closed = self._state.closed.pop(fetch.rendezvous, None)
            if closed is not None and not closed.is_by_reader:
                self._refuse(key, Reason.PREFILL_FAILED, "the request has ended before its prompt was computed")
                return
            if len(self._state.parked) >= self._rules.max_parked:
                self._refuse(key, Reason.OVERLOADED, f"{self._rules.max_parked} readers already wait for requests")
                return
            self._state.parked[key] = _Parked(fetch, now + self._rules.park_seconds)
            return
        self._answer(key, fetch, now)

    def _waiting_at(self, rendezvous: str) -> list[_GrantKey]:
        return [key for key, each in self._state.parked.items() if each.fetch.rendezvous == rendezvous]

    def _close(self, rendezvous: str, now: float, *, is_by_reader: bool) -> None:
        """Records, up to a limit, that one side has given up, so that the other need not wait for its deadline."""
        if len(self._state.closed) < self._rules.max_parked:
            self._state.closed[rendezvous] = _Closed(is_by_reader, now + self._rules.park_seconds)

    def _answer(self, key: _GrantKey, fetch: Fetch, now: float) -> None:
        """Grants or refuses a fetch of a request that has ended."""
        try:
            held = self._find(fetch)
        except PeerError as error:
            self._refuse(key, Reason.INVALID_TICKET, str(error))
            return
        if held is None or held.is_taken:
            self._refuse(key, Reason.UNKNOWN_REQUEST, "the KV is no longer held, or has been read already")
        elif fetch.prompt_digest != held.offer.prompt_digest:
            what = "the prompts or their salts differ: both engines need the same chat template and API keys"
            self._refuse(key, Reason.OTHER_PROMPT, what)
        elif not 0 <= fetch.first <= fetch.end <= held.offer.num_tokens:
            what = f"tokens [{fetch.first}, {fetch.end}) are not within the {held.offer.num_tokens} that are held"
            self._refuse(key, Reason.INVALID_RANGE, what)
        elif fetch.first == fetch.end:
            self.counts.num_not_needed += 1
            self._drop(held)
        else:
            self._take(key, held, fetch, now)

    def _find(self, fetch: Fetch) -> _Held | None:
        """Returns what a fetch names. Raises PeerError for a ticket that was not issued in this life of this engine."""
        if not fetch.ticket:
            return self._state.at_rendezvous.get(fetch.rendezvous)
        ticket = self._office.read(fetch.ticket)
        if (ticket.engine_id, ticket.epoch) != (self._engine_id, self._epoch):
            raise PeerError("the ticket was issued by another engine, or before this engine restarted")
        return self._state.held.get(ticket.hold_id)

    def _take(self, key: _GrantKey, held: _Held, fetch: Fetch, now: float) -> None:
        held.is_taken = True
        self._num_jobs += 1
        grant = _Grant(held, fetch, f"attest-{self._num_jobs}", now + self._rules.lease_seconds)
        self._state.grants[key] = grant
        if not self._rules.is_attested:
            self._grant(key, grant, (), now)
            return
        grant.is_busy = True
        self._state.jobs[grant.job_id] = key
        self._actions.append(Attest(grant.job_id, key[0], held.offer.block_ids, fetch.first, fetch.end))

    def _grant(self, key: _GrantKey, grant: _Grant, digests: tuple[ShardDigests, ...], now: float) -> None:
        grant.is_granted, grant.granted_at = True, now
        grant.deadline = now + self._rules.lease_seconds
        self.counts.num_granted += 1
        answer = Grant(
            transfer_id=grant.fetch.transfer_id,
            lease=self._rules.lease_seconds,
            block_ids=grant.held.offer.block_ids,
            digests=digests,
        )
        self._actions.append(Send(key[0], answer))

    def _on_done(self, key: _GrantKey, now: float) -> None:
        grant = self._state.grants.get(key)
        is_valid = grant is not None and grant.is_live and now < grant.deadline
        if grant is not None and grant.is_live:
            self._give_up(key)
        if grant is not None and is_valid:
            self.counts.num_completed += 1
            self._actions.append(Sent(key[0], grant.fetch.end - grant.fetch.first, now - grant.granted_at))
        self._actions.append(Send(key[0], DoneAck(key[1], is_valid)))

    def _give_up(self, key: _GrantKey) -> None:
        """Called when the reader has cancelled, disconnected or exceeded its lease."""
        self._state.parked.pop(key, None)
        grant = self._state.grants.get(key)
        if grant is None:
            return
        if not grant.is_busy:
            self._release(key)
        else:
            grant.is_abandoned = True

    def _release(self, key: _GrantKey) -> None:
        self._drop(self._state.grants.pop(key).held)

    def _drop(self, held: _Held) -> None:
        del self._state.held[held.offer.hold_id]
        if held.offer.rendezvous:
            del self._state.at_rendezvous[held.offer.rendezvous]
        self._actions.append(Release(held.offer.hold_id))

    def _refuse(self, key: _GrantKey, reason: Reason, detail: str) -> None:
        self.counts.num_refused += 1
        self._actions.append(Send(key[0], Refuse(key[1], reason, detail)))

    def check_integrity(self) -> None:
        """Recomputes derived state; raises AssertionError if it is inconsistent."""
        state = self._state
        taken = {each.offer.hold_id for each in state.held.values() if each.is_taken}
        granted = {grant.held.offer.hold_id for grant in state.grants.values()}
        assert taken == granted, f"taken {sorted(taken)}, granted {sorted(granted)}"
        busy = {key for key, grant in state.grants.items() if grant.is_busy}
        assert busy == set(state.jobs.values()), f"busy {busy}, jobs {state.jobs}"
        waiting = [key for key, grant in state.grants.items() if not grant.is_granted and not grant.is_busy]
        assert not waiting, f"nothing is done for {waiting}"
        at_rendezvous = {each.offer.rendezvous for each in state.held.values() if each.offer.rendezvous}
        assert at_rendezvous == state.at_rendezvous.keys(), at_rendezvous ^ state.at_rendezvous.keys()
        awaited = {each.fetch.rendezvous for each in state.parked.values()}
        assert awaited.isdisjoint(state.closed), f"one side has gone from {awaited & state.closed.keys()}"
