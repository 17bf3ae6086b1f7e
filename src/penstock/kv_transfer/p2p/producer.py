r"""The sending half: which KV is held for other engines, which of them may read it, and for how long (sans-IO).

A request that another engine will decode has one record, from its start to the release of its blocks:

    prefilling -> held -> digesting -> granted -> released
                      \-> granted

Its blocks are digested as they are completed, so that most readers are granted at once. They are held until a reader
has read them, has reported that it does not need them, or has not come in time, and until a lease has ended. A hold is
given to one reader, once: a repeated ticket is refused. A fetch that names a rendezvous may come before its request has
ended; it is parked until then, with a deadline.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import msgspec

from penstock.kv_transfer.p2p.known_digests import KnownDigests, Reading
from penstock.kv_transfer.p2p.messages import (
    MAX_MESSAGE_BYTES,
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
from penstock.messages.kv_cache_spec import NULL_BLOCK
from penstock.messages.kv_transfer import TransferId
from penstock.messages.scheduler_output import BlockIds, BlockTable
from penstock.utils.errors import PeerError


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerRules:
    """In seconds: `hold_seconds` for which blocks are held for a reader that has not come; `park_seconds` for which a
    reader waits for a request that has not ended. States are the blocks from the id `first_state` on."""

    hold_seconds: float
    lease_seconds: float
    park_seconds: float
    max_parked: int
    max_held_blocks: int
    first_state: int
    max_held_states: int
    is_attested: bool  # else blocks are not digested


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A finished request whose blocks are held under `hold_id`; they have the KV of its first `num_tokens` tokens."""

    hold_id: TransferId
    prompt_digest: bytes
    num_tokens: int
    block_ids: BlockIds


@dataclass(frozen=True, slots=True)
class Digest:
    """Requests digests of tokens [first, end) as they will be read. `block_ids` are the block tables."""

    job_id: TransferId
    reading: Reading
    block_ids: BlockIds
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class StopDigest:
    """Requests that the workers drop the job. No report is needed."""

    job_id: TransferId


@dataclass(frozen=True, slots=True)
class Release:
    hold_id: TransferId


@dataclass(frozen=True, slots=True)
class Sent:
    """A peer has read `num_tokens` tokens, `seconds` after it was granted them."""

    peer: PeerKey
    num_tokens: int
    seconds: float


ProducerAction = Send | Digest | StopDigest | Release | Sent

_ENDED = "the request has ended, and its KV is not held"
_MAX_DIGESTS = MAX_MESSAGE_BYTES // 32  # each has 16 bytes, and its frame
_ReaderKey = tuple[PeerKey, TransferId]


class HoldState(enum.Enum):
    PREFILLING = "prefilling"
    HELD = "held"
    DIGESTING = "digesting"
    GRANTED = "granted"


_NEXT = {
    HoldState.PREFILLING: {HoldState.HELD},
    HoldState.HELD: {HoldState.DIGESTING, HoldState.GRANTED},
    HoldState.DIGESTING: {HoldState.GRANTED},
    HoldState.GRANTED: set[HoldState](),
}


@dataclass(slots=True)
class _Reader:
    """An engine that has asked for a hold. Until there is one, it is parked up to the `deadline`."""

    key: _ReaderKey
    fetch: Fetch
    reading: Reading
    deadline: float


@dataclass(slots=True)
class _Hold:
    """`deadline` is that of the state: for a reader to come, or of the lease."""

    hold_id: TransferId
    rendezvous: str
    digests: KnownDigests
    state: HoldState = HoldState.PREFILLING
    deadline: float = float("inf")
    offer: Offer | None = None
    reader: _Reader | None = None
    granted_at: float = 0.0

    def set_state(self, state: HoldState, deadline: float) -> None:
        assert state in _NEXT[self.state], f"a hold goes from {self.state} to {state}"
        self.state, self.deadline = state, deadline


@dataclass(slots=True)
class _Closed:
    """A rendezvous that one side has given up: the request of this engine, or its reader. Then `hold_seconds` says how
    long a request that still ends is held, in case the reader comes again."""

    hold_seconds: float | None
    deadline: float


@dataclass(slots=True)
class ProducerCounts:
    num_offered: int = 0
    num_granted: int = 0
    num_completed: int = 0
    num_not_needed: int = 0
    num_expired: int = 0
    num_refused: int = 0
    num_without_room: int = 0


@dataclass(slots=True)
class _State:
    """`holds` has every request, by its hold id; the other tables find them by what peers name."""

    holds: dict[TransferId, _Hold] = field(default_factory=dict[TransferId, _Hold])
    at_rendezvous: dict[str, _Hold] = field(default_factory=dict[str, _Hold])
    by_reader: dict[_ReaderKey, _Hold] = field(default_factory=dict[_ReaderKey, _Hold])
    jobs: dict[TransferId, _Hold] = field(default_factory=dict[TransferId, _Hold])
    parked: dict[_ReaderKey, _Reader] = field(default_factory=dict[_ReaderKey, _Reader])
    closed: dict[str, _Closed] = field(default_factory=dict[str, _Closed])
    held_blocks: Counter[int] = field(default_factory=Counter[int])


class Producer:
    """`epoch` differs in every life of the engine. Every call may add actions; `take_actions` returns them.

    `expected` is the reading for which blocks are digested before a reader has come: that of the last reader.
    """

    def __init__(self, engine_id: str, epoch: str, rules: ProducerRules, office: TicketOffice) -> None:
        self._engine_id = engine_id
        self._epoch = epoch
        self._rules = rules
        self._office = office
        self.expected = Reading(1)
        self._state = _State()
        self._actions: list[ProducerAction] = []
        self._num_jobs = 0
        self.counts = ProducerCounts()

    @property
    def num_held(self) -> int:
        return sum(hold.state is not HoldState.PREFILLING for hold in self._state.holds.values())

    # ---- Requests of this engine ----

    def expect(self, hold_id: TransferId, rendezvous: str) -> None:
        """Begins a request that will be held. A reader waits for its rendezvous, though an earlier request with the
        same one ended without KV."""
        self._state.holds[hold_id] = _Hold(hold_id, rendezvous, KnownDigests(self.expected))
        if self._is_over(rendezvous):
            del self._state.closed[rendezvous]

    def restart(self, hold_id: TransferId) -> None:
        """Called when a request gets new blocks, for the first time or after a preemption."""
        self._digest_anew(self._state.holds[hold_id], self.expected)

    def on_computed(self, hold_id: TransferId, table: BlockTable, first: int, end: int) -> None:
        """Called when tokens [first, end) of the request's prompt are in its blocks, which are complete."""
        hold = self._state.holds[hold_id]
        if self._rules.is_attested and hold.digests.can_serve(hold.digests.reading, first, end):
            self._digest(hold, tuple(tuple(blocks) for blocks in table), first, end)

    def _has_room(self, held: Collection[int]) -> bool:
        num_states = sum(block >= self._rules.first_state for block in held)
        return len(held) - num_states <= self._rules.max_held_blocks and num_states <= self._rules.max_held_states

    def offer(self, offer: Offer, now: float) -> str:
        """Holds the blocks of a request that has ended. Returns its ticket; "" if there is no room for its blocks."""
        blocks = _blocks_of(offer)
        if not self._has_room({*self._state.held_blocks, *blocks}):
            self.counts.num_without_room += 1
            self.withdraw(offer.hold_id, now)
            return ""
        self._state.held_blocks.update(blocks)
        hold = self._state.holds[offer.hold_id]
        hold.offer = offer
        hold.set_state(HoldState.HELD, now + self._rules.hold_seconds)
        self.counts.num_offered += 1
        if hold.rendezvous:
            self._state.at_rendezvous[hold.rendezvous] = hold
            closed = self._state.closed.pop(hold.rendezvous, None)
            if closed is not None and closed.hold_seconds:
                hold.deadline = now + closed.hold_seconds
            elif closed is not None:
                self._release(hold)
            for key in self._waiting_at(hold.rendezvous):
                self._answer(self._state.parked.pop(key), now)
        ticket = Ticket(self._engine_id, self._epoch, offer.hold_id, offer.prompt_digest, offer.num_tokens)
        return self._office.issue(ticket)

    def withdraw(self, hold_id: TransferId, now: float) -> None:
        """Called when a request has ended and its blocks are not held."""
        hold = self._state.holds.pop(hold_id)
        self._stop_digests(hold)
        for key in self._waiting_at(hold.rendezvous):
            del self._state.parked[key]
            self._refuse(key, Reason.PREFILL_FAILED, _ENDED)
        self._close(hold.rendezvous, now, hold_seconds=None)

    def can_be_met(self, rendezvous: str) -> bool:
        """Returns whether a request may use this rendezvous: no other one does."""
        return all(hold.rendezvous != rendezvous for hold in self._state.holds.values())

    # ---- Peers ----

    def receive(self, peer: PeerKey, message: Message, now: float, reading: Reading | None = None) -> None:
        """Applies a message. `reading` is the peer's. Raises PeerError for a message that no consumer sends."""
        match message:
            case Fetch():
                until = now + self._rules.park_seconds
                self._on_fetch(_Reader((peer, message.transfer_id), message, reading or self.expected, until), now)
            case Renew():
                hold = self._state.by_reader.get((peer, message.transfer_id))
                if hold is not None and hold.state is HoldState.GRANTED and now < hold.deadline:
                    hold.deadline = now + self._rules.lease_seconds
            case Done():
                self._on_done((peer, message.transfer_id), now)
            case Abort():
                parked = self._state.parked.get((peer, message.transfer_id))
                self._give_up((peer, message.transfer_id))
                if parked is not None:
                    self._close(parked.fetch.rendezvous, now, hold_seconds=0.0)
            case _:
                raise PeerError(f"the peer sent {type(message).__name__}, which a consumer does not send")

    def on_lost(self, peer: PeerKey) -> None:
        """Called when the connection has ended: its grants can no longer be confirmed."""
        for key in [key for key in (*self._state.parked, *self._state.by_reader) if key[0] == peer]:
            self._give_up(key)

    def on_digested(self, job_id: TransferId, digests: Sequence[ShardDigests] | None, now: float) -> None:
        """Called when the workers have digested a piece; None if they could not."""
        hold = self._state.jobs.pop(job_id, None)
        if hold is None:
            return
        hold.digests.finish(job_id, tuple(digests) if digests is not None else None)
        if hold.state is not HoldState.DIGESTING or hold.reader is None:
            return
        if digests is None:
            self._release(hold)
            self._refuse(hold.reader.key, Reason.PREFILL_FAILED, "the blocks cannot be read")
        else:
            self._grant_if_digested(hold, hold.reader, now)

    # ---- Time ----

    def poll(self, now: float) -> None:
        """Ends everything whose deadline has passed."""
        state = self._state
        for key in [key for key, each in state.parked.items() if each.deadline <= now]:
            self._refuse(key, Reason.UNKNOWN_REQUEST, "the request has not been prefilled in time")
            self._close(state.parked.pop(key).fetch.rendezvous, now, hold_seconds=self._rules.lease_seconds)
        state.closed = {name: each for name, each in state.closed.items() if each.deadline > now}
        for hold in [hold for hold in state.holds.values() if hold.deadline <= now]:
            self.counts.num_expired += 1
            self._release(hold)
            self._close(hold.rendezvous, now, hold_seconds=None)

    @property
    def next_deadline(self) -> float | None:
        state = self._state
        timed = (*state.parked.values(), *state.closed.values(), *state.holds.values())
        return min((each.deadline for each in timed if each.deadline != float("inf")), default=None)

    def take_actions(self) -> list[ProducerAction]:
        actions, self._actions = self._actions, []
        return actions

    # ---- Transitions ----

    def _on_fetch(self, reader: _Reader, now: float) -> None:
        if reader.key in self._state.by_reader or reader.key in self._state.parked:
            return
        rendezvous = reader.fetch.rendezvous
        if rendezvous and rendezvous not in self._state.at_rendezvous:
            if self._is_over(rendezvous):
                self._refuse(reader.key, Reason.PREFILL_FAILED, _ENDED)
            elif len(self._state.parked) >= self._rules.max_parked:
                self._refuse(reader.key, Reason.OVERLOADED, "too many readers already wait for requests")
            else:
                self._state.parked[reader.key] = reader
            self._state.closed.pop(rendezvous, None)
            return
        self._answer(reader, now)

    def _waiting_at(self, rendezvous: str) -> list[_ReaderKey]:
        parked = self._state.parked
        return [key for key, each in parked.items() if rendezvous and each.fetch.rendezvous == rendezvous]

    def _close(self, rendezvous: str, now: float, *, hold_seconds: float | None) -> None:
        """Records, up to a limit, that one side has given up, so that the other need not wait for its deadline."""
        has_room = len(self._state.closed) < self._rules.max_parked
        if rendezvous and has_room and not self._waiting_at(rendezvous):
            self._state.closed[rendezvous] = _Closed(hold_seconds, now + self._rules.park_seconds)

    def _is_over(self, rendezvous: str) -> bool:
        """Returns whether the request has recently ended without KV, or its blocks were held in vain."""
        return rendezvous in self._state.closed and self._state.closed[rendezvous].hold_seconds is None

    def _answer(self, reader: _Reader, now: float) -> None:
        """Grants or refuses a fetch of a request that has ended."""
        fetch = reader.fetch
        try:
            hold = self._find(fetch)
        except PeerError as error:
            self._refuse(reader.key, Reason.INVALID_TICKET, str(error))
            return
        if hold is None or hold.offer is None or hold.state is not HoldState.HELD:
            self._refuse(reader.key, Reason.UNKNOWN_REQUEST, "the KV is no longer held, or has been read already")
        elif fetch.prompt_digest != hold.offer.prompt_digest:
            what = "the prompts or their salts differ: both engines need the same chat template and API keys"
            self._refuse(reader.key, Reason.OTHER_PROMPT, what)
        elif not 0 <= fetch.first <= fetch.end <= hold.offer.num_tokens:
            what = f"tokens [{fetch.first}, {fetch.end}) are not within the {hold.offer.num_tokens} that are held"
            self._refuse(reader.key, Reason.INVALID_RANGE, what)
        elif fetch.first == fetch.end:
            self.counts.num_not_needed += 1
            self._release(hold)
        elif reader.reading.num_digests(fetch.end - fetch.first, len(hold.offer.block_ids)) > _MAX_DIGESTS:
            self._refuse(reader.key, Reason.OVERLOADED, "its ranks and its block size need too many digests")
        else:
            self._take(hold, hold.offer, reader, now)

    def _find(self, fetch: Fetch) -> _Hold | None:
        """Returns what a fetch names. Raises PeerError for a ticket that was not issued in this life of this engine."""
        if not fetch.ticket:
            return self._state.at_rendezvous.get(fetch.rendezvous)
        ticket = self._office.read(fetch.ticket)
        if (ticket.engine_id, ticket.epoch) != (self._engine_id, self._epoch):
            raise PeerError("the ticket was issued by another engine, or before this engine restarted")
        return self._state.holds.get(ticket.hold_id)

    def _take(self, hold: _Hold, offer: Offer, reader: _Reader, now: float) -> None:
        hold.reader = reader
        self._state.by_reader[reader.key] = hold
        if not self._rules.is_attested:
            self._grant(hold, reader, (), now)
            return
        self.expected = reader.reading
        first, end = reader.fetch.first, reader.fetch.end
        if not hold.digests.can_serve(reader.reading, first, end):
            self._digest_anew(hold, reader.reading)
        self._digest(hold, offer.block_ids, first, end)
        hold.set_state(HoldState.DIGESTING, float("inf"))  # the reader's deadline ends it
        self._grant_if_digested(hold, reader, now)

    def _digest_anew(self, hold: _Hold, reading: Reading) -> None:
        self._stop_digests(hold)
        hold.digests = KnownDigests(reading)

    def _stop_digests(self, hold: _Hold) -> None:
        for job_id in hold.digests.jobs:
            del self._state.jobs[job_id]
            self._actions.append(StopDigest(job_id))

    def _digest(self, hold: _Hold, block_ids: BlockIds, first: int, end: int) -> None:
        """Begins to digest what is missing of tokens [first, end)."""
        for start, stop in hold.digests.missing(first, end):
            self._num_jobs += 1
            job_id = msgspec.structs.replace(hold.hold_id, part=self._num_jobs)
            hold.digests.begin(job_id, start, stop)
            self._state.jobs[job_id] = hold
            self._actions.append(Digest(job_id, hold.digests.reading, block_ids, start, stop))

    def _grant_if_digested(self, hold: _Hold, reader: _Reader, now: float) -> None:
        digests = hold.digests.of(reader.fetch.first, reader.fetch.end)
        if digests is not None:
            self._grant(hold, reader, digests, now)

    def _grant(self, hold: _Hold, reader: _Reader, digests: tuple[ShardDigests, ...], now: float) -> None:
        assert hold.offer is not None, hold
        hold.set_state(HoldState.GRANTED, now + self._rules.lease_seconds)
        hold.granted_at = now
        self.counts.num_granted += 1
        answer = Grant(
            transfer_id=reader.fetch.transfer_id,
            lease=self._rules.lease_seconds,
            block_ids=hold.offer.block_ids,
            digests=digests,
        )
        self._actions.append(Send(reader.key[0], answer))

    def _on_done(self, key: _ReaderKey, now: float) -> None:
        hold = self._state.by_reader.get(key)
        is_valid = hold is not None and hold.state is HoldState.GRANTED and now < hold.deadline
        if hold is not None and hold.reader is not None and hold.state is HoldState.GRANTED:
            self._release(hold)
            if is_valid:
                fetch = hold.reader.fetch
                self.counts.num_completed += 1
                self._actions.append(Sent(key[0], fetch.end - fetch.first, now - hold.granted_at))
        self._actions.append(Send(key[0], DoneAck(key[1], is_valid)))

    def _give_up(self, key: _ReaderKey) -> None:
        """Called when the reader has cancelled or disconnected."""
        self._state.parked.pop(key, None)
        if (hold := self._state.by_reader.get(key)) is not None:
            self._release(hold)

    def _release(self, hold: _Hold) -> None:
        """Ends a hold in any state."""
        assert hold.offer is not None, hold
        self._stop_digests(hold)
        for block in _blocks_of(hold.offer):
            self._state.held_blocks[block] -= 1
            if not self._state.held_blocks[block]:
                del self._state.held_blocks[block]
        del self._state.holds[hold.hold_id]
        if hold.rendezvous:
            del self._state.at_rendezvous[hold.rendezvous]
        if hold.reader is not None:
            del self._state.by_reader[hold.reader.key]
        self._actions.append(Release(hold.hold_id))

    def _refuse(self, key: _ReaderKey, reason: Reason, detail: str) -> None:
        self.counts.num_refused += 1
        self._actions.append(Send(key[0], Refuse(key[1], reason, detail)))

    def check_integrity(self) -> None:
        """Recomputes derived state; raises AssertionError if it is inconsistent."""
        state = self._state
        holds = list(state.holds.values())
        by_reader = {hold.reader.key: hold for hold in holds if hold.reader is not None}
        assert by_reader == state.by_reader, (by_reader.keys(), state.by_reader.keys())
        jobs = {job_id: hold for hold in holds for job_id in hold.digests.jobs}
        assert jobs == state.jobs, jobs.keys() ^ state.jobs.keys()
        idle = [hold.hold_id for hold in holds if hold.state is HoldState.DIGESTING and not hold.digests.jobs]
        assert not idle, idle
        at_rendezvous = {hold.rendezvous: hold for hold in holds if hold.offer is not None and hold.rendezvous}
        assert at_rendezvous == state.at_rendezvous, at_rendezvous.keys() ^ state.at_rendezvous.keys()
        held = Counter(block for hold in holds if hold.offer is not None for block in _blocks_of(hold.offer))
        assert held == state.held_blocks and self._has_room(held), (held, state.held_blocks)
        assert not state.closed.keys() & {each.fetch.rendezvous for each in state.parked.values()}, "one side has gone"


def _blocks_of(offer: Offer) -> set[int]:
    return {block for table in offer.block_ids for block in table if block != NULL_BLOCK}
