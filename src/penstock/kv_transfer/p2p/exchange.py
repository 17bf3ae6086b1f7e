"""Connects sessions, producer and consumer with connections and workers.

The three decide what to do, as actions, and an `Exchange` executes the actions. The engine core's thread calls it for
requests and steps: `take_metadata` once for every step, `apply` with every step's reports. The thread of the
connections calls it for messages and deadlines, so that peers are answered however long a step takes. A lock makes the
calls atomic; none of them blocks.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

from penstock.kv_transfer.connector import ConnectorEvent, LoadEnded, Released
from penstock.kv_transfer.p2p.channel import Channel, ChannelEvent, Connected, Lost
from penstock.kv_transfer.p2p.consumer import (
    CANCELLED,
    Cancel,
    Consumer,
    ConsumerAction,
    ConsumerCounts,
    Dial,
    Ended,
    Read,
)
from penstock.kv_transfer.p2p.jobs import Digested, ReadEnded, WorkerJobs
from penstock.kv_transfer.p2p.messages import (
    VERSION,
    Bye,
    Hello,
    Message,
    P2PHandshake,
    P2PMetadata,
    P2PSetup,
    Shard,
)
from penstock.kv_transfer.p2p.params import Address, RemotePrefill
from penstock.kv_transfer.p2p.producer import (
    Digest,
    Offer,
    Producer,
    ProducerAction,
    ProducerCounts,
    Release,
    Sent,
    StopDigest,
)
from penstock.kv_transfer.p2p.session import Close, PeerKey, Send, Sessions, cut_reason
from penstock.kv_transfer.p2p.traffic import Traffic
from penstock.messages.kv_transfer import BadRange, HandshakePayload, KVConnectorOutput, ShardId, TransferId
from penstock.messages.scheduler_output import BlockIds, BlockTable
from penstock.utils.clock import Clock
from penstock.utils.errors import PeerError, RequestError
from penstock.utils.hosts import in_url
from penstock.utils.logging import get_logger

logger = get_logger(__name__)

_PRODUCER_COUNTS = [(field.name, f"p2p_producer_{field.name[4:]}") for field in fields(ProducerCounts)]
_CONSUMER_COUNTS = [(field.name, f"p2p_consumer_{field.name[4:]}") for field in fields(ConsumerCounts)]


@dataclass(frozen=True, slots=True, kw_only=True)
class P2PSettings:
    """This engine's identity and its requirements. `ignored` names parts of the meaning of KV that may differ; `setup`
    is for the workers. With `requires_digests` KV without digests is not used."""

    engine_id: str
    epoch: str
    role: str
    meaning: Mapping[str, str]
    setup: P2PSetup
    num_groups: int
    ignored: frozenset[str] = frozenset()
    requires_digests: bool = True


class Exchange:
    """Has no ranks until `introduce_as` is called, before the first step."""

    def __init__(
        self, settings: P2PSettings, channel: Channel, producer: Producer, consumer: Consumer, clock: Clock
    ) -> None:
        self._settings = settings
        self._channel = channel
        self._producer = producer
        self._consumer = consumer
        self._clock = clock
        self._traffic = Traffic()
        self._bytes_per_token = 0.0
        self._bytes_of_states = 0
        self._events: list[ConnectorEvent] = []
        self._num_steps_in_flight = 0
        self._lock = threading.RLock()
        self._news = threading.Event()
        self._waker: Callable[[], None] = lambda: None
        self._sessions = Sessions(self._hello(()), settings.ignored)
        self._jobs = WorkerJobs(settings.epoch, {}, settings.num_groups)

    @property
    def address(self) -> Address:
        """Returns the address at which peers reach this engine."""
        return self._channel.address

    def introduce_as(self, payloads: Mapping[ShardId, HandshakePayload | None]) -> None:
        """Takes the handshakes of all ranks, and begins to answer peers."""
        shards: dict[ShardId, Shard] = {}
        for shard, payload in sorted(payloads.items()):
            assert isinstance(payload, P2PHandshake), f"rank {shard} sent {payload} as its handshake"
            shards[shard] = Shard(shard, payload.layout, payload.descriptor)
        self._sessions = Sessions(self._hello(tuple(shards.values())), self._settings.ignored)
        self._jobs = WorkerJobs(self._settings.epoch, shards, self._settings.num_groups)
        layers = [layer for each in shards.values() for layer in each.layout.layers]
        self._bytes_of_states = sum(layer.block_bytes for layer in layers if layer.is_recurrent)
        blocks = sum(layer.block_bytes for layer in layers if not layer.is_recurrent)
        self._bytes_per_token = blocks / self._jobs.block_size
        host, port = self._channel.address
        by_rank: dict[str, dict[str, str]] = {}
        for pp_rank, tp_rank in shards:
            by_rank.setdefault(str(tp_rank), {})[str(pp_rank)] = f"tcp://{in_url(host)}:{port}"
        self._producer.expected = self._jobs.own_reading
        # The keys are data-parallel ranks, as Mooncake-style proxies expect.
        self._channel.answer_queries({"0": {"engine_id": self._settings.engine_id, "worker_addr": by_rank}})
        self._channel.start(self)

    def _hello(self, shards: tuple[Shard, ...]) -> Hello:
        settings = self._settings
        return Hello(
            version=VERSION,
            engine_id=settings.engine_id,
            epoch=settings.epoch,
            meaning=dict(settings.meaning),
            transport=settings.setup.transport,
            shards=shards,
        )

    def set_waker(self, callback: Callable[[], None]) -> None:
        self._waker = callback

    def wait(self, seconds: float) -> None:
        """Waits for peers; not while jobs are open, because steps with time wait for their transfers."""
        if self._jobs.is_idle:
            self._news.wait(seconds)

    def shutdown(self) -> None:
        with self._lock:
            self._sessions.say_bye()
            self._perform()
        self._channel.close()

    # ---- Requests of this engine ----

    def want(self, name: TransferId, source: RemotePrefill, prompt_digest: bytes) -> None:
        """Begins a request whose prompt another engine computes. Every such request ends in `cancel`."""
        with self._lock:
            self._consumer.want(name, source, prompt_digest)

    def wanted(self, name: TransferId) -> RemotePrefill | None:
        """Returns where such a request's KV is, None for others, and once its load has begun or was cancelled."""
        with self._lock:
            return self._consumer.wanted(name)

    def begin_load(self, name: TransferId, transfer_id: TransferId, block_ids: BlockIds, first: int, end: int) -> None:
        """Begins to load tokens [first, end) of the prompt, which ends in a `LoadEnded`."""
        with self._lock:
            self._consumer.begin(name, transfer_id, block_ids, first, end, now=self._clock.now())
            self._perform()

    def cancel(self, name: TransferId) -> None:
        """Called when a request needs nothing, or nothing more, from the other engine."""
        with self._lock:
            self._consumer.cancel(name)
            self._perform()

    def expect(self, hold_id: TransferId, rendezvous: str) -> None:
        """Begins a request that another engine will decode. Raises RequestError if the rendezvous is in use."""
        with self._lock:
            if rendezvous and not self._producer.can_be_met(rendezvous):
                raise RequestError(f"transfer_id {rendezvous!r} is already in use", "kv_transfer_params")
            self._producer.expect(hold_id, rendezvous)

    def restart(self, hold_id: TransferId) -> None:
        """Called when a request that another engine will decode gets new blocks."""
        with self._lock:
            self._producer.restart(hold_id)
            self._perform()

    def on_computed(self, hold_id: TransferId, table: BlockTable, first: int, end: int) -> None:
        """Tokens [first, end) of such a request's prompt are in its blocks."""
        with self._lock:
            self._producer.on_computed(hold_id, table, first, end)
            self._perform()

    def offer(self, offer: Offer) -> str:
        """Offers a request's held blocks to another engine. Returns its ticket; "" if the blocks are not held."""
        with self._lock:
            ticket = self._producer.offer(offer, self._clock.now())
            self._perform()
            return ticket

    def withdraw(self, hold_id: TransferId) -> None:
        """Called when a request that another engine may wait for has ended without KV."""
        with self._lock:
            self._producer.withdraw(hold_id, self._clock.now())
            self._perform()

    # ---- Steps ----

    def take_metadata(self, *, computes: bool) -> P2PMetadata:
        """`computes`: whether the step has tokens to compute. A step has time if neither it nor one before it does."""
        with self._lock:
            self._channel.check()
            self._news.clear()
            has_time = not computes and not self._num_steps_in_flight
            self._num_steps_in_flight += 1
            return self._jobs.take(self._sessions.engines(), has_time)

    def apply(self, output: KVConnectorOutput) -> list[ConnectorEvent]:
        """Applies the reports of a step. Returns the events since the last call."""
        with self._lock:
            self._num_steps_in_flight -= 1
            for report in output.reports:
                match self._jobs.apply(report):
                    case Digested(job_id, digests):
                        self._producer.on_digested(job_id, digests, self._clock.now())
                    case ReadEnded(load, bad, is_complete):
                        self._consumer.on_read(load, bad, is_complete)
                    case None:
                        pass
            self._perform()
            return self.poll()

    def poll(self) -> list[ConnectorEvent]:
        """Returns the events since the last call."""
        with self._lock:
            events, self._events = self._events, []
            return events

    @property
    def has_pending_work(self) -> bool:
        """Returns whether steps are needed. KV that is merely held, or awaited from a peer, needs none."""
        self._channel.check()
        return not self._jobs.is_idle or bool(self._events)

    def counters(self) -> Mapping[str, float]:
        with self._lock:
            counts = {"p2p_held": self._producer.num_held, **self._jobs.counters, **self._traffic.counters}
            # Called in every step, so the names are precomputed.
            for names, of in ((_PRODUCER_COUNTS, self._producer.counts), (_CONSUMER_COUNTS, self._consumer.counts)):
                counts.update((name, getattr(of, field)) for field, name in names)
            return counts

    def check_integrity(self) -> None:
        with self._lock:
            self._producer.check_integrity()
            self._consumer.check_integrity()
            self._jobs.check_integrity()

    # ---- Peers, on the thread of the connections ----

    def on_event(self, event: ChannelEvent) -> None:
        with self._lock:
            now = self._clock.now()
            match event:
                case Connected(peer, is_outgoing):
                    self._sessions.on_connected(peer, is_outgoing, now)
                case Lost(peer, reason):
                    self._forget(peer, reason)
                case _:
                    self._receive(event.peer, event.message, now)
            self._perform()
        self._wake_core()

    def on_time(self) -> None:
        """Called when the time set by `wake_at` has come."""
        with self._lock:
            now = self._clock.now()
            for peer in self._sessions.poll(now):
                self._forget(peer, "the peer has not introduced itself in time")
            self._producer.poll(now)
            self._consumer.poll(now)
            self._perform()
        self._wake_core()

    def _wake_core(self) -> None:
        try:
            needs_step = self.has_pending_work
        except RuntimeError:
            needs_step = True  # the core is to notice that the channel has ended
        if needs_step:
            self._news.set()
            self._waker()

    def _receive(self, peer: PeerKey, message: Message, now: float) -> None:
        """Applies a message. A peer that violates the protocol loses its session; nothing else is affected."""
        if not self._sessions.has(peer):
            return  # the session has ended, and the message arrived later
        hello = self._sessions.hello_of(peer)
        try:
            if isinstance(message, Bye):
                self._end_session(peer, message.reason or "the peer has ended the session")
            elif hello is None:
                self._introduce(peer, message)
            elif self._sessions.is_outgoing(peer):
                self._consumer.receive(peer, message, now)
            else:
                self._producer.receive(peer, message, now, self._jobs.reading_of(hello))
        except PeerError as error:
            logger.warning("the session with %s ends: %s", peer, cut_reason(str(error)))
            self._end_session(peer, str(error))

    def _introduce(self, peer: PeerKey, message: Message) -> None:
        problem = self._sessions.introduce(peer, message)
        hello = self._sessions.hello_of(peer)
        if problem is not None or hello is None:
            raise PeerError(problem or "the peer has not introduced itself")
        self._traffic.introduce(hello.engine_id)
        self._jobs.register(hello, is_source=self._sessions.is_outgoing(peer))
        if self._sessions.is_outgoing(peer):
            self._consumer.on_open(peer, hello.engine_id)

    def _end_session(self, peer: PeerKey, reason: str) -> None:
        self._perform()  # sends a refusal first
        self._channel.hang_up(peer)
        self._forget(peer, reason)

    def _forget(self, peer: PeerKey, reason: str) -> None:
        self._sessions.on_lost(peer)
        self._jobs.forget_unused(self._sessions.engines())
        self._producer.on_lost(peer)
        self._consumer.on_lost(peer, cut_reason(reason))

    # ---- Actions ----

    def _perform(self) -> None:
        """Executes all actions, and those that follow from them."""
        while actions := self._take_actions():
            for action in actions:
                self._do(action)
        deadlines = [each.next_deadline for each in (self._sessions, self._producer, self._consumer)]
        self._channel.wake_at(min((each for each in deadlines if each is not None), default=None))

    def _take_actions(self) -> Sequence[Close | ProducerAction | ConsumerAction]:
        return (*self._sessions.take_actions(), *self._producer.take_actions(), *self._consumer.take_actions())

    def _do(self, action: Close | ProducerAction | ConsumerAction) -> None:
        match action:
            case Send(peer, message):
                self._channel.send(peer, message)
            case Close(peer):
                self._channel.hang_up(peer)
            case Dial(address):
                self._consumer.on_dialled(address, self._channel.dial(address))
            case Digest():
                self._digest(action)
            case StopDigest(job_id):
                self._jobs.drop_digest(job_id)
            case Release(hold_id):
                self._events.append(Released(hold_id))
            case Sent(peer, num_tokens, seconds):
                reader = self._sessions.hello_of(peer)
                name = "" if reader is None else reader.engine_id
                self._traffic.on_moved("to", name, num_tokens, self._bytes_of(num_tokens), seconds)
            case Read():
                self._read(action)
            case Cancel(load):
                self._jobs.cancel_read(load)
            case Ended():
                self._end_load(action)

    def _digest(self, action: Digest) -> None:
        try:
            self._jobs.digest(action)
        except PeerError as error:
            logger.debug("KV is not digested: %s", error)
            self._producer.expected = self._jobs.own_reading
            self._producer.on_digested(action.job_id, None, self._clock.now())

    def _read(self, action: Read) -> None:
        source = self._sessions.hello_of(action.load.peer)
        try:
            if source is None:
                raise PeerError("the connection has ended")
            if self._settings.requires_digests and not action.grant.digests:
                raise PeerError("the KV has no digests: set the same attestation on both engines")
            self._jobs.read(action.load, action.grant, source)
        except PeerError as error:
            self._consumer.on_read_refused(action.load, str(error))

    def _end_load(self, ended: Ended) -> None:
        load, bad = ended.load, ended.load.bad_ranges
        if ended.reason:
            bad = tuple(BadRange(group, load.first, load.end) for group in range(self._settings.num_groups))
        reason = ended.reason or ("blocks are missing there, or differ from their digests" if bad else "")
        if bad:
            level = logging.DEBUG if reason == CANCELLED else logging.WARNING
            logger.log(level, "KV of %s is not loaded from another engine: %s", load.name, reason)
            self._traffic.on_failed("from", load.source.engine_id)
        else:
            num_tokens, seconds = load.end - load.first, self._clock.now() - load.began
            self._traffic.on_moved("from", load.source.engine_id, num_tokens, self._bytes_of(num_tokens), seconds)
        self._events.append(LoadEnded(load.transfer_id, bad, reason))

    def _bytes_of(self, num_tokens: int) -> int:
        return self._bytes_of_states + round(num_tokens * self._bytes_per_token)
