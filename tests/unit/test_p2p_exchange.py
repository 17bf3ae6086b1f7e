"""The scheduler side of the `P2PConnector` without a network: peers say what the test says."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import replace as replace_dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.kv_transfer.connector import FREED, NO_MATCH, FinishAction, FinishResult, LoadEnded, Released
from penstock.kv_transfer.p2p.channel import (
    Channel,
    ChannelEvent,
    ChannelHandler,
    Connected,
    Lost,
    Received,
)
from penstock.kv_transfer.p2p.consumer import CANCELLED, Consumer
from penstock.kv_transfer.p2p.exchange import Exchange, P2PSettings
from penstock.kv_transfer.p2p.messages import (
    VERSION,
    Abort,
    Bye,
    DigestJob,
    Done,
    DoneAck,
    Fetch,
    Grant,
    Hello,
    Message,
    P2PHandshake,
    P2PMetadata,
    P2PSetup,
    PeerShards,
    ReadJob,
    Reason,
    Refuse,
    Renew,
    Shard,
    ShardDigests,
)
from penstock.kv_transfer.p2p.params import Address, RemotePrefill
from penstock.kv_transfer.p2p.producer import Offer, Producer, ProducerRules
from penstock.kv_transfer.p2p.scheduler import P2PScheduler
from penstock.kv_transfer.p2p.session import MAX_REASON_LENGTH, Close, PeerKey, Send, Sessions, engine_key
from penstock.kv_transfer.p2p.socket_channel import SocketChannel
from penstock.kv_transfer.p2p.ticket import digest_prompt
from penstock.messages.kv_layout import KVLayout
from penstock.messages.kv_transfer import (
    NO_OUTPUT,
    BadRange,
    KVConnectorOutput,
    TransferId,
    TransferReport,
    TransferStatus,
)
from penstock.messages.outputs import FinishReason
from penstock.messages.scheduler_output import BlockIds
from penstock.utils.clock import Clock, ManualClock, SystemClock
from penstock.utils.errors import PeerError, RequestError
from tests.unit.kv_memory_fakes import make_layout, model
from tests.unit.test_p2p_protocol import ADDRESS, HOLD, LOAD, OFFICE, PROMPT, RULES, resolve
from tests.unit.transfer_names import named

PEER = "peer"
LAYOUT = make_layout(model(2), 4)
MEANING = {"weights": "abc"}
LONG = "x" * 100_000
SECONDS = 10.0


class ScriptedChannel:
    """Connects to everything as `PEER`, and keeps what is sent."""

    def __init__(self) -> None:
        self.address: Address = ("127.0.0.1", 1)
        self.sent: list[Message] = []
        self.ended: list[tuple[PeerKey, int]] = []
        """The connections that were hung up, and how many messages had been sent by then."""
        self.wake_time: float | None = None
        self.failure: Exception | None = None

    def answer_queries(self, answer: Mapping[str, Any]) -> None: ...
    def dial(self, address: Address) -> PeerKey:
        return PEER

    def send(self, peer: PeerKey, message: Message) -> None:
        self.sent.append(message)

    def hang_up(self, peer: PeerKey) -> None:
        self.ended.append((peer, len(self.sent)))

    def wake_at(self, when: float | None) -> None:
        self.wake_time = when

    def start(self, handler: ChannelHandler) -> None: ...
    def check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def close(self) -> None: ...


class Core:
    """The scheduler side of an engine named `name`."""

    def __init__(
        self,
        name: str,
        channel: Channel,
        clock: Clock,
        rules: ProducerRules = RULES,
        *,
        digests_next_step: bool = False,
    ) -> None:
        setup = P2PSetup("memory", "127.0.0.1", b"key")
        settings = P2PSettings(engine_id=name, epoch="1", role="kv_both", meaning=MEANING, setup=setup, num_groups=2)
        producer, consumer = Producer(name, "1", rules, OFFICE), Consumer(OFFICE, resolve, 30.0)
        self.exchange = Exchange(settings, channel, producer, consumer, clock)
        self.scheduler = P2PScheduler(settings, 4, self.exchange, digests_next_step=digests_next_step)
        self.scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): P2PHandshake(LAYOUT, b"")})


class Engine(Core):
    """One without a network."""

    def __init__(self) -> None:
        self.channel, self.clock = ScriptedChannel(), ManualClock()
        super().__init__("d", self.channel, self.clock)

    def hear(self, *events: ChannelEvent) -> list[str]:
        """Returns why loads have ended."""
        for event in events:
            self.exchange.on_event(event)
        self.exchange.take_metadata(computes=False)
        ended = [each for each in self.exchange.apply(KVConnectorOutput()) if isinstance(each, LoadEnded)]
        return [each.reason for each in ended]


def begin(engine: Core, name: str = "load", tables: BlockIds = ((1, 2), (1, 2))) -> None:
    """The scheduler's name for the load is `named(NAME, 1)`."""
    engine.exchange.want(named(name), RemotePrefill(ADDRESS, "p", rendezvous="x"), PROMPT)
    engine.exchange.begin_load(named(name), named(name, 1), tables, 0, 4)


def hello(layout: KVLayout = LAYOUT, **changes: Any) -> Hello:
    given: dict[str, Any] = {"engine_id": "p", "epoch": "1", "meaning": MEANING, "transport": "memory", **changes}
    return Hello(version=VERSION, shards=(Shard((0, 0), layout, b""),), **given)


@pytest.mark.parametrize(
    "events",
    [
        [Received(PEER, hello(meaning={"weights": LONG}))],
        [Received(PEER, hello(meaning={**MEANING, LONG: ""}))],
        [Received(PEER, hello(transport=LONG))],
        [Received(PEER, hello(replace(LAYOUT, layers=(replace(LAYOUT.layers[0], name=LONG, dtype=LONG),))))],
        [Received(PEER, Refuse(None, Reason.OTHER_MODEL, LONG))],
        [Received(PEER, hello()), Received(PEER, Refuse(LOAD, Reason.OVERLOADED, LONG))],
        [Received(PEER, hello()), Received(PEER, Bye(LONG))],
        [Lost(PEER, LONG)],
    ],
    ids=["meaning", "name of a meaning", "transport", "layout", "refused session", "refused load", "bye", "lost"],
)
def test_what_a_peer_says_is_cut(events: list[ChannelEvent], caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine()
    begin(engine, "load", ((1,), (1,)))
    with caplog.at_level(logging.WARNING):
        (reason,) = engine.hear(Connected(PEER, is_outgoing=True), *events)
    said = [each.detail for each in engine.channel.sent if isinstance(each, Refuse)]
    for text in (reason, *said, *(record.getMessage() for record in caplog.records)):
        assert 0 < len(text) < MAX_REASON_LENGTH + 200


@dataclass
class Request:
    """A prompt that another engine will decode."""

    request_id: str
    kv_transfer_params: Mapping[str, Any]
    kv_scope: bytes = b""
    prompt_token_ids: tuple[int, ...] = (1, 2, 3, 4, 5)
    block_hashes: tuple[bytes, ...] = ()
    num_tokens: int = 5
    num_prompt_tokens: int = 5

    @property
    def hold_id(self) -> TransferId:
        return named(self.request_id)


def test_a_reader_waits_for_a_request_that_comes_again_after_an_abort() -> None:
    engine = Engine()
    params = {"do_remote_decode": True, "transfer_id": "x"}
    first, again = Request("first", params), Request("again", params)
    engine.scheduler.on_new_request(first)
    engine.scheduler.request_finished(first, (), FinishReason.ABORT)
    engine.scheduler.on_new_request(again)
    digest = digest_prompt(again.prompt_token_ids, b"")
    fetch = Fetch(transfer_id=LOAD, first=0, end=4, prompt_digest=digest, rendezvous="x")
    engine.hear(Connected(PEER, is_outgoing=False), Received(PEER, hello()), Received(PEER, fetch))
    assert not [each for each in engine.channel.sent if isinstance(each, Refuse)]
    engine.scheduler.request_finished(again, ((1, 2), (1, 2)), FinishReason.LENGTH)
    (job,) = engine.exchange.take_metadata(computes=False).digests
    assert job.block_ids == ((1,), (1,))


def with_tokens(request: Request, num_prompt_tokens: int) -> Request:
    return replace_dataclass(request, num_prompt_tokens=num_prompt_tokens, num_tokens=num_prompt_tokens)


def plan_of(request_id: str, num_tokens: int, num_computed_tokens: int = 0) -> Any:
    """Returns a step that computes tokens of a prompt in blocks 1, 2 and 3; the first such step admits it."""
    is_new = not num_computed_tokens
    new = SimpleNamespace(request_id=request_id, block_ids=((1, 2), (1, 2)), num_computed_tokens=0)
    return SimpleNamespace(
        new_requests=(new,) if is_new else (),
        new_block_ids={} if is_new else {request_id: ((3,), (3,))},
        num_scheduled_tokens={request_id: num_tokens, "another": 1},
        num_computed_tokens=(num_computed_tokens, 9),
        total_num_scheduled_tokens=num_tokens + 1,
    )


def test_blocks_are_digested_by_the_step_that_completes_them() -> None:
    engine = Engine()
    engine.scheduler.on_new_request(with_tokens(Request("a", {"do_remote_decode": True}), 11))
    jobs = [
        engine.scheduler.build_connector_meta(plan_of("a", num_tokens, computed)).digests
        for num_tokens, computed in ((3, 0), (3, 3), (6, 6))
    ]
    found = [[(job.block_ids, job.first, job.end) for job in each] for each in jobs]
    assert found == [[], [(((1,), (1,)), 0, 4)], [(((2,), (2,)), 0, 4)]], "the prompt's 11 tokens fill two blocks"


def test_blocks_with_draft_kv_are_digested_when_the_drafter_has_completed_them() -> None:
    core = Core("p", ScriptedChannel(), ManualClock(), digests_next_step=True)
    request = with_tokens(Request("a", {"do_remote_decode": True}), 11)
    core.scheduler.on_new_request(request)
    assert core.scheduler.build_connector_meta(plan_of("a", 8)).digests == ()
    core.scheduler.on_blocks_complete(request, ((1, 2), (1, 2)), 0, 1)
    (job,) = core.exchange.take_metadata(computes=True).digests
    assert (job.block_ids, job.first, job.end) == (((1,), (1,)), 0, 4)


def digests_of(job: DigestJob) -> TransferReport:
    """Returns a report of two groups of one unit each."""
    return TransferReport(job.job_id, (0, 0), TransferStatus.DONE, digests=(b"a", b"b"))


def test_a_producer_answers_everything_without_a_step() -> None:
    """However long P's step takes: the introduction, the grant of digested blocks, renewals and the confirmation."""
    rules = replace_dataclass(RULES, lease_seconds=1.5)
    with contextlib.ExitStack() as stack:
        cores: list[Core] = []
        for name in ("p", "d"):
            channel = SocketChannel("127.0.0.1", {"kv_port": 0}, b"a key that is long enough")
            cores.append(Core(name, channel, SystemClock(), rules))
            stack.callback(cores[-1].scheduler.shutdown)
        p, d = cores
        prefill = Request("prefill", {"do_remote_decode": True})
        p.scheduler.on_new_request(prefill)
        (job,) = p.scheduler.build_connector_meta(plan_of("prefill", 5)).digests
        p.exchange.apply(KVConnectorOutput((digests_of(job),)))
        params = p.scheduler.request_finished(prefill, ((1, 2), (1, 2)), FinishReason.LENGTH).kv_transfer_params
        # From here on P's core is busy.
        assert params is not None
        decode = Request("decode", params)
        d.scheduler.on_new_request(decode)
        assert d.scheduler.get_num_new_matched_tokens(decode, 0).num_tokens == 4
        d.scheduler.update_state_after_alloc(decode, named(decode.request_id, 1), ((5,), (5,)), 0, 4)
        reads: tuple[ReadJob, ...] = ()
        while not reads:
            d.exchange.wait(SECONDS)
            reads = d.exchange.take_metadata(computes=False).reads
            d.exchange.apply(NO_OUTPUT)
        (read,) = reads
        assert [each.digests for each in read.digests] == [((b"a",), (b"b",))]
        # The read takes longer than two leases.
        until = SystemClock().now() + 2.2 * rules.lease_seconds
        while (left := until - SystemClock().now()) > 0:
            d.exchange._news.wait(left)
        done = TransferReport(read.job_id, (0, 0), TransferStatus.DONE)
        d.exchange.take_metadata(computes=False)
        events = d.exchange.apply(KVConnectorOutput((done,)))
        while not events:
            d.exchange.wait(SECONDS)
            d.exchange.take_metadata(computes=False)
            events = d.exchange.apply(NO_OUTPUT)
        assert events == [LoadEnded(named("decode", 1))]
        assert p.scheduler.has_pending_work, "P's core is to release the blocks"
        assert p.exchange._events == [Released(named("prefill"))]
        for core in cores:
            core.scheduler.check_integrity()


def test_requests_beyond_the_share_of_the_pool_get_no_ticket_and_free_their_blocks() -> None:
    engine = Engine()
    results: list[FinishResult] = []
    for name in ("first", "second"):
        request = Request(name, {"do_remote_decode": True})
        engine.scheduler.on_new_request(request)
        block = len(results) * 4 + 1
        results.append(engine.scheduler.request_finished(request, ((block, block + 1),) * 2, FinishReason.LENGTH))
    assert results[0].action is FinishAction.HOLD
    assert results[1] == FinishResult(FinishAction.HOLD, results[1].kv_transfer_params)
    request = Request("third", {"do_remote_decode": True})
    engine.scheduler.on_new_request(request)
    assert engine.scheduler.request_finished(request, ((9, 10),) * 2, FinishReason.LENGTH) == FREED
    engine.scheduler.check_integrity()


class WatchedLock:
    """A lock that knows whether it is held."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.depth = 0

    def __enter__(self) -> None:
        self._lock.acquire()
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1
        self._lock.release()


class Guarded:
    """Stands for a part that both threads use. Whether there are jobs may be read at any time."""

    def __init__(self, part: object, lock: WatchedLock) -> None:
        self._part, self._lock = part, lock

    def __getattr__(self, name: str) -> Any:
        assert self._lock.depth or name == "is_idle", f"{name} is used without the lock"
        return getattr(self._part, name)


def test_every_call_uses_what_both_threads_share_under_the_lock() -> None:
    engine = Engine()
    exchange, lock = engine.exchange, WatchedLock()
    exchange._lock = lock  # type: ignore[assignment]
    for part in ("_producer", "_consumer", "_sessions", "_jobs", "_traffic"):
        setattr(exchange, part, Guarded(getattr(exchange, part), lock))
    tables = ((1, 2), (1, 2))
    begin(engine)
    exchange.wanted(LOAD)
    exchange.cancel(LOAD)
    for name in ("held", "withdrawn"):
        exchange.expect(named(name), name)
        exchange.restart(named(name))
        exchange.on_computed(named(name), tables, 0, 4)
    assert exchange.offer(Offer(hold_id=named("held"), prompt_digest=PROMPT, num_tokens=5, block_ids=tables))
    exchange.withdraw(named("withdrawn"))
    for event in (Connected(PEER, is_outgoing=True), Received(PEER, hello()), Lost(PEER, "gone")):
        exchange.on_event(event)
    exchange.on_time()
    exchange.take_metadata(computes=False)
    exchange.apply(NO_OUTPUT)
    exchange.counters()
    exchange.check_integrity()
    exchange.wait(0.0)
    assert exchange.has_pending_work
    exchange.shutdown()


OTHER_LAYOUT = make_layout(model(2), 8)
UNFIT_LAYOUT = make_layout(model(2, dim=4), 4)


@pytest.mark.parametrize("layout", [LAYOUT, UNFIT_LAYOUT], ids=["accepted", "refused"])
def test_an_idle_engine_forgets_engines_that_have_left(layout: KVLayout) -> None:
    engine = Engine()
    jobs = engine.exchange._jobs
    for number in range(3):
        name = f"peer {number}"
        engine.exchange.on_event(Connected(name, is_outgoing=False))
        engine.exchange.on_event(Received(name, hello(layout, engine_id=f"d{number}")))
        engine.exchange.on_event(Lost(name, "gone"))
    assert (jobs._known, list(jobs._readings)) == ({}, [""])
    assert [engine_id for engine_id, _ in jobs._topology._stages] == ["this engine"]


def test_an_engine_does_not_replace_another_one_of_the_same_name() -> None:
    engine = Engine()
    for name, layout in (("first", LAYOUT), ("second", OTHER_LAYOUT)):
        engine.exchange.on_event(Connected(name, is_outgoing=False))
        engine.exchange.on_event(Received(name, hello(layout)))
    assert engine.exchange._jobs._known == {"p/1": hello()}
    assert engine.exchange._sessions.has("first")
    assert not engine.exchange._sessions.has("second")


TABLES = ((1, 2), (1, 2))


def prefill(engine: Engine, name: str = "a", rendezvous: str = "") -> str:
    """Runs a request of which the first four tokens are in whole blocks. Returns its ticket."""
    params: dict[str, object] = {"do_remote_decode": True}
    request = Request(name, {**params, "transfer_id": rendezvous} if rendezvous else params)
    engine.scheduler.on_new_request(request)
    result = engine.scheduler.request_finished(request, TABLES, FinishReason.LENGTH)
    assert result.kv_transfer_params is not None
    return str(result.kv_transfer_params["ticket"])


def reader_of(ticket: str = "", rendezvous: str = "", end: int = 4) -> Fetch:
    digest = digest_prompt((1, 2, 3, 4, 5), b"")
    return Fetch(transfer_id=LOAD, first=0, end=end, prompt_digest=digest, ticket=ticket, rendezvous=rendezvous)


def meet(engine: Engine, layout: KVLayout = LAYOUT, *, is_outgoing: bool = False) -> None:
    engine.exchange.on_event(Connected(PEER, is_outgoing))
    engine.exchange.on_event(Received(PEER, hello(layout)))


def step(engine: Engine, *reports: TransferReport) -> P2PMetadata:
    metadata = engine.exchange.take_metadata(computes=False)
    engine.exchange.apply(KVConnectorOutput(reports))
    return metadata


def test_the_core_is_woken_by_events_and_jobs_and_by_nothing_else() -> None:
    engine, calls = Engine(), list[str]()
    news = engine.exchange._news
    engine.scheduler.set_waker(lambda: calls.append("woken"))
    ticket, other = prefill(engine, "a"), prefill(engine, "b")
    meet(engine)
    engine.exchange.on_time()
    assert not calls
    assert not engine.scheduler.has_pending_work
    # A job for the workers.
    engine.exchange.on_event(Received(PEER, reader_of(ticket)))
    assert (calls, news.is_set(), engine.scheduler.has_pending_work) == (["woken"], True, True)
    (job,) = engine.exchange.take_metadata(computes=False).digests
    assert not news.is_set()
    assert engine.scheduler.has_pending_work, "the job is not done"
    engine.exchange.apply(KVConnectorOutput((digests_of(job),)))
    assert isinstance(engine.channel.sent[-1], Grant), "it is sent at once"
    assert not engine.scheduler.has_pending_work
    # An event of a peer, and one of the time.
    calls.clear()
    engine.exchange.on_event(Received(PEER, Abort(LOAD)))
    assert (calls, news.is_set(), engine.scheduler.has_pending_work) == (["woken"], True, True)
    engine.exchange.take_metadata(computes=False)
    assert engine.exchange.apply(NO_OUTPUT) == [Released(named("a"))]
    assert not engine.scheduler.has_pending_work, "events are returned once"
    engine.clock.advance(100.0)
    engine.exchange.on_time()
    assert (calls, news.is_set(), engine.scheduler.has_pending_work) == (["woken"] * 2, True, True)
    assert engine.scheduler.update_connector_output(NO_OUTPUT) == [Released(named("b"))]
    assert other
    # The end of the channel, which an idle core would not notice.
    engine.channel.failure = RuntimeError("a bug")
    engine.exchange.on_time()
    assert calls == ["woken"] * 3


def test_the_core_waits_for_peers_only_without_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, waits = Engine(), list[float | None]()
    monkeypatch.setattr(engine.exchange._news, "wait", waits.append)
    engine.scheduler.wait(0.5)
    meet(engine)
    engine.exchange.on_event(Received(PEER, reader_of(prefill(engine))))
    engine.scheduler.wait(0.7)
    assert waits == [0.5]


def test_a_step_has_time_if_neither_it_nor_one_before_it_computes() -> None:
    exchange = Engine().exchange
    found = [exchange.take_metadata(computes=computes).has_time for computes in (True, False)]
    exchange.apply(NO_OUTPUT)
    found.append(exchange.take_metadata(computes=False).has_time)
    for _ in range(2):
        exchange.apply(NO_OUTPUT)
    found.append(exchange.take_metadata(computes=False).has_time)
    assert found == [False, False, False, True]


def test_the_core_ends_when_the_connections_have_ended_by_a_bug() -> None:
    engine = Engine()
    engine.channel.failure = RuntimeError("a bug")
    with pytest.raises(RuntimeError, match="a bug"):
        engine.exchange.take_metadata(computes=False)
    with pytest.raises(RuntimeError, match="a bug"):
        assert engine.scheduler.has_pending_work


def test_every_deadline_is_passed_on_to_the_channel_and_has_an_effect() -> None:
    engine = Engine()
    engine.exchange.on_event(Connected(PEER, is_outgoing=False))
    assert engine.channel.wake_time == 5.0
    engine.clock.advance(5.0)
    engine.exchange.on_time()
    assert engine.channel.ended == [(PEER, 0)]
    assert not engine.exchange._sessions.has(PEER)
    assert engine.channel.wake_time is None
    prefill(engine)
    assert engine.channel.wake_time == 105.0
    granted_load(engine, DIGESTS)
    assert engine.channel.wake_time == engine.clock.now() + 3.0, "the lease of 9 seconds is renewed"
    engine.clock.advance(3.0)
    engine.exchange.on_time()
    assert engine.channel.sent[-1] == Renew(LOAD)


@pytest.mark.parametrize("message", [Bye("enough"), DoneAck(LOAD, True), hello()], ids=["bye", "wrong half", "again"])
def test_a_session_that_has_ended_is_closed_and_its_later_messages_have_no_effect(message: Message) -> None:
    engine = Engine()
    ticket = prefill(engine)
    meet(engine)
    num_sent = len(engine.channel.sent)
    for each in (reader_of(ticket), message, Done(LOAD), reader_of(prefill(engine, "b"))):
        engine.exchange.on_event(Received(PEER, each))
    assert engine.channel.ended == [(PEER, num_sent)]
    assert not engine.exchange._sessions.has(PEER)
    assert len(engine.channel.sent) == num_sent
    assert engine.exchange._events == [Released(named("a"))]
    assert step(engine).dropped == (TransferId("a", 0, part=1, epoch="1"),), "nobody waits for the digests"
    engine.scheduler.check_integrity()


def test_a_peer_of_another_model_is_told_before_its_connection_ends() -> None:
    engine = Engine()
    engine.exchange.on_event(Connected(PEER, is_outgoing=False))
    engine.exchange.on_event(Received(PEER, hello(meaning={"weights": "other"})))
    (refusal,) = engine.channel.sent
    assert isinstance(refusal, Refuse)
    assert refusal.reason is Reason.OTHER_MODEL
    assert engine.channel.ended[0] == (PEER, 1)


def test_a_reader_with_other_blocks_is_introduced_to_the_workers_and_forgotten_by_them() -> None:
    engine, small = Engine(), make_layout(model(2), 2)
    meet(engine, small)
    engine.exchange.on_event(Received(PEER, reader_of(prefill(engine))))
    metadata = engine.exchange.take_metadata(computes=False)
    (job,) = metadata.digests
    assert metadata.peers == (PeerShards("p/1", (Shard((0, 0), small, b""),)),)
    # The next prompt is digested for the same ranks, of which the workers know.
    engine.scheduler.on_new_request(with_tokens(Request("b", {"do_remote_decode": True}), 11))
    metadata = engine.scheduler.build_connector_meta(plan_of("b", 4))
    assert ([each.peer for each in metadata.digests], metadata.peers) == (["p/1"], ())
    engine.exchange.on_event(Lost(PEER, "gone"))
    metadata = engine.exchange.take_metadata(computes=False)
    assert metadata.forgotten == ("p/1",)
    assert metadata.dropped == (job.job_id,)
    # Nobody has this reading any more: one piece is left out, and the next prompts are digested for equal ranks.
    engine.scheduler.build_connector_meta(plan_of("b", 4, 4))
    known = engine.exchange._producer._state.holds[named("b")].digests
    assert (len(known.jobs), known.missing(0, 8)) == (1, [(4, 8)]), "the piece is not awaited"
    assert engine.exchange._producer.expected is engine.exchange._jobs.own_reading
    engine.scheduler.on_new_request(with_tokens(Request("c", {"do_remote_decode": True}), 11))
    (job,) = engine.scheduler.build_connector_meta(plan_of("c", 4)).digests
    assert job.peer == ""
    engine.scheduler.check_integrity()


def granted_load(engine: Engine, digests: tuple[ShardDigests, ...]) -> None:
    begin(engine)
    meet(engine, is_outgoing=True)
    grant = Grant(transfer_id=LOAD, lease=9.0, block_ids=((7, 8), (7, 8)), digests=digests)
    engine.exchange.on_event(Received(PEER, grant))


DIGESTS = (ShardDigests((0, 0), (0, 0), ((b"a",), (b"b",))),)


def test_kv_without_digests_is_not_read() -> None:
    engine = Engine()
    granted_load(engine, ())
    assert engine.channel.sent[-1] == Abort(LOAD)
    assert engine.exchange.take_metadata(computes=False).reads == ()
    (ended,) = engine.exchange.apply(NO_OUTPUT)
    assert isinstance(ended, LoadEnded)
    assert "no digests" in ended.reason


def test_a_load_whose_request_has_ended_is_cancelled() -> None:
    engine = Engine()
    granted_load(engine, DIGESTS)
    (job,) = step(engine).reads
    assert job.remote_block_ids == ((7,), (7,)), "the blocks of the requested tokens"
    assert job.digests == DIGESTS
    engine.exchange.cancel(LOAD)
    assert engine.channel.sent[-1] == Abort(LOAD)
    assert step(engine).cancelled == (job.job_id,)
    assert step(engine).cancelled == ()
    engine.exchange.take_metadata(computes=False)
    failed = TransferReport(job.job_id, (0, 0), TransferStatus.FAILED)
    assert engine.exchange.apply(KVConnectorOutput((failed,))) == [
        LoadEnded(named("load", 1), (BadRange(0, 0, 4), BadRange(1, 0, 4)), CANCELLED)
    ]
    engine.scheduler.check_integrity()


def test_a_load_that_lacks_a_block_ends_with_a_reason_which_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine()
    granted_load(engine, DIGESTS)
    (job,) = step(engine).reads
    engine.exchange.take_metadata(computes=False)
    differs = (BadRange(1, 0, 4),)
    report = TransferReport(job.job_id, (0, 0), TransferStatus.FAILED, differs)
    assert engine.exchange.apply(KVConnectorOutput((report,))) == []
    with caplog.at_level(logging.WARNING):
        engine.exchange.on_event(Received(PEER, DoneAck(LOAD, True)))
    (ended,) = engine.exchange.poll()
    assert isinstance(ended, LoadEnded)
    assert ended.bad_ranges == differs
    assert "differ from their digests" in ended.reason
    assert ended.reason in caplog.text


def test_a_preempted_prompt_drops_its_digests_in_the_next_step() -> None:
    engine = Engine()
    engine.exchange.expect(HOLD, "")
    engine.exchange.on_computed(HOLD, TABLES, 0, 4)
    (job,) = step(engine).digests
    engine.exchange.restart(HOLD)
    assert engine.scheduler.has_pending_work, "the workers are to be told"
    assert step(engine).dropped == (job.job_id,)
    assert step(engine).dropped == ()
    assert not engine.scheduler.has_pending_work


def test_a_reader_of_a_request_that_ends_without_kv_is_refused_at_once() -> None:
    engine = Engine()
    engine.exchange.expect(HOLD, "x")
    with pytest.raises(RequestError, match="already in use"):
        engine.exchange.expect(named("again"), "x")
    meet(engine)
    engine.exchange.on_event(Received(PEER, reader_of(rendezvous="x")))
    engine.exchange.withdraw(HOLD)
    refusal = engine.channel.sent[-1]
    assert isinstance(refusal, Refuse)
    assert refusal.reason is Reason.PREFILL_FAILED
    engine.exchange.expect(named("again"), "x")


def test_an_engine_says_that_nothing_is_needed_and_that_it_shuts_down() -> None:
    engine = Engine()
    engine.exchange.want(named("none"), RemotePrefill(ADDRESS, "p", rendezvous="x"), PROMPT)
    engine.exchange.cancel(named("none"))
    meet(engine, is_outgoing=True)
    assert isinstance(engine.channel.sent[-1], Fetch)
    engine.exchange.want(named("none"), RemotePrefill(ADDRESS, "p", rendezvous="y"), PROMPT)
    engine.exchange.cancel(named("none"))
    last = engine.channel.sent[-1]
    assert isinstance(last, Fetch)
    assert (last.rendezvous, last.first, last.end) == ("y", 0, 0)
    engine.exchange.shutdown()
    assert engine.channel.sent[-1] == Bye("the engine shuts down")


# ---- Introductions ----


def shards_of(*ranks: tuple[int, int], layout: KVLayout = LAYOUT) -> tuple[Shard, ...]:
    return tuple(Shard(rank, layout, b"") for rank in ranks)


def introduced(message: Hello, *, is_outgoing: bool = False) -> tuple[str | None, list[Send | Close]]:
    """Returns why the peer cannot be used, and what follows."""
    sessions = Sessions(hello(engine_id="own"), frozenset({"arithmetic"}))
    sessions.on_connected(PEER, is_outgoing, 0.0)
    sessions.take_actions()
    problem = sessions.introduce(PEER, message)
    assert (sessions.hello_of(PEER) is None) == (problem is not None)
    assert (sessions.next_deadline is None) == (problem is None)
    assert sessions.engines() == (set() if problem else {"p/1"})
    assert sessions.poll(1000.0) == ([PEER] if problem else []), "an open session has no deadline"
    return problem, sessions.take_actions()


def test_only_the_accepting_side_answers_an_introduction() -> None:
    own = Send(PEER, hello(engine_id="own"))
    assert introduced(hello()) == (None, [own])
    assert introduced(hello(), is_outgoing=True) == (None, [])
    assert introduced(hello(meaning={**MEANING, "arithmetic": "other"})) == (None, [own])


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (replace(hello(), version=VERSION + 1), Reason.OTHER_VERSION),
        (hello(transport="other"), Reason.OTHER_TRANSPORT),
        (hello(meaning={}), Reason.OTHER_MODEL),
        (hello(meaning={**MEANING, "speculator": "mtp"}), Reason.OTHER_MODEL),
    ],
)
def test_a_difference_that_matters_is_answered_and_the_connection_closed(message: Hello, reason: Reason) -> None:
    problem, (refusal, closed, late) = introduced(message)
    assert problem
    assert isinstance(refusal, Send)
    assert isinstance(refusal.message, Refuse)
    assert refusal.message.reason is reason
    assert closed == late == Close(PEER)


@pytest.mark.parametrize(
    "message",
    [
        hello(engine_id=""),
        hello(engine_id="x" * 129),
        hello(engine_id="a\nb"),
        replace(hello(), shards=()),
        replace(hello(), shards=shards_of((0, 1))),
        replace(hello(), shards=shards_of((0, 0), (0, 0))),
        replace(hello(), shards=shards_of((0, 0), (1, 1))),
        replace(hello(), shards=shards_of((-2, -2))),
        replace(hello(), shards=shards_of((1 << 40, 1 << 40))),
        replace(hello(), shards=shards_of(*((0, rank) for rank in range(1025)))),
        replace(hello(), shards=(*shards_of((0, 0)), *shards_of((0, 1), layout=OTHER_LAYOUT))),
    ],
    ids=lambda message: f"{message.engine_id[:3]!r} {[each.shard for each in message.shards[:2]]}",
)
def test_a_peer_that_no_engine_can_be_is_refused(message: Hello) -> None:
    with pytest.raises(PeerError):
        introduced(message)


def test_another_life_of_an_engine_is_another_engine() -> None:
    assert engine_key(hello()) != engine_key(hello(epoch="2"))


# ---- Requests ----


@pytest.mark.parametrize(("role", "flag"), [("kv_consumer", "do_remote_decode"), ("kv_producer", "do_remote_prefill")])
def test_an_engine_refuses_requests_for_the_other_role(role: str, flag: str) -> None:
    engine = Engine()
    engine.scheduler._settings = replace_dataclass(engine.scheduler._settings, role=role)
    params = {flag: True, "transfer_id": "x", "remote_bootstrap_addr": "http://127.0.0.1:1"}
    with pytest.raises(RequestError, match=role):
        engine.scheduler.on_new_request(Request("a", params))


def remote_request(scope: bytes = b"", **changes: Any) -> Request:
    params = {"do_remote_prefill": True, "transfer_id": "x", "remote_bootstrap_addr": "http://127.0.0.1:1"}
    return Request("a", {**params, **changes}, kv_scope=scope)


def test_kv_of_another_engine_is_requested_once_and_without_the_last_token() -> None:
    engine, request = Engine(), remote_request(b"salt")
    engine.scheduler.on_new_request(request)
    for num_prompt_tokens, num_tokens in ((5, 4), (8, 4), (9, 8)):
        assert engine.scheduler.get_num_new_matched_tokens(with_tokens(request, num_prompt_tokens), 0).num_tokens == (
            num_tokens
        )
    engine.scheduler.update_state_after_alloc(request, named(request.request_id, 1), TABLES, 0, 4)
    assert engine.scheduler.get_num_new_matched_tokens(request, 0) == NO_MATCH
    meet(engine, is_outgoing=True)
    fetch = engine.channel.sent[-1]
    assert isinstance(fetch, Fetch)
    assert fetch.prompt_digest == digest_prompt(request.prompt_token_ids, b"salt")
    engine.scheduler.request_finished(request, (), FinishReason.ABORT)
    assert engine.channel.sent[-1] == Abort(named("a"))


def test_no_more_tokens_are_requested_than_the_prompt_has() -> None:
    serial: dict[str, Any] = {"remote_host": "127.0.0.1", "remote_port": 1, "remote_engine_id": "p", "ticket": "t"}
    for remote, expected in ((3, 0), (5, 4), (100, 4)):
        engine = Engine()
        request = Request("a", {"do_remote_prefill": True, **serial, "remote_num_tokens": remote})
        engine.scheduler.on_new_request(request)
        assert engine.scheduler.get_num_new_matched_tokens(request, 0).num_tokens == expected


def test_a_shared_beginning_is_compared_and_requested_alone() -> None:
    serial: dict[str, Any] = {"remote_host": "127.0.0.1", "remote_port": 1, "remote_engine_id": "p", "ticket": "t"}
    for remote, compared in ((3, 3), (5, 5), (100, 5)):
        engine = Engine()
        request = Request("a", {"do_remote_prefill": True, **serial, "remote_num_tokens": remote})
        engine.scheduler.on_new_request(request)
        found = engine.scheduler._exchange._consumer._loads[request.hold_id].prompt_digest
        assert found == digest_prompt(request.prompt_token_ids[:compared], b"")


@pytest.mark.parametrize("is_computed", [True, False])
def test_the_other_engine_is_told_that_a_request_needs_nothing(is_computed: bool) -> None:
    engine, request = Engine(), remote_request()
    engine.scheduler.on_new_request(request)
    if is_computed:
        engine.scheduler.build_connector_meta(plan_of("a", 5))
        assert engine.exchange._consumer.counts.num_not_needed == 1, "it is told when the request begins to compute"
    assert engine.scheduler.request_finished(request, TABLES, FinishReason.STOP) == FREED
    assert engine.exchange._consumer.counts.num_not_needed == 1
    meet(engine, is_outgoing=True)
    fetch = engine.channel.sent[-1]
    assert isinstance(fetch, Fetch)
    assert (fetch.first, fetch.end) == (0, 0)


@pytest.mark.parametrize(("reason", "tables"), [(FinishReason.ABORT, TABLES), (FinishReason.STOP, ())])
def test_kv_of_a_request_without_a_whole_prompt_is_not_held(reason: FinishReason, tables: Any) -> None:
    engine = Engine()
    request = Request("a", {"do_remote_decode": True})
    engine.scheduler.on_new_request(request)
    assert engine.scheduler.request_finished(request, tables, reason) == FREED
    assert not engine.scheduler._prefills
    engine.scheduler.on_new_request(request)
    engine.scheduler.check_integrity()


def test_digests_begin_after_the_blocks_that_were_found_and_again_after_a_preemption() -> None:
    engine = Engine()
    engine.scheduler.on_new_request(with_tokens(Request("a", {"do_remote_decode": True}), 12))
    found: list[list[int]] = []
    for num_computed in (5, 0):
        plan = plan_of("a", 4 if num_computed == 0 else 3)
        plan.new_requests[0].num_computed_tokens = num_computed
        plan.num_computed_tokens = (num_computed, 9)
        first = engine.scheduler.build_connector_meta(plan)
        second = engine.scheduler.build_connector_meta(plan_of("a", 8, 4))
        found.append(sorted(engine.exchange._producer._state.holds[named("a")].digests._pieces))
        assert second.digests[-1].block_ids[0][-1] == 3, "the blocks that were added are among them"
    assert found == [[4, 8], [0, 4]]
    assert len(first.dropped) == 2


def test_a_reset_succeeds_because_nothing_is_kept_elsewhere() -> None:
    """Otherwise clearing the tiers beside it in a MultiConnector would count as failed."""
    assert Engine().scheduler.reset_cache()


def test_blocks_are_not_digested_twice() -> None:
    core = Core("p", ScriptedChannel(), ManualClock(), digests_next_step=False)
    request = with_tokens(Request("a", {"do_remote_decode": True}), 11)
    core.scheduler.on_new_request(request)
    metadata = core.scheduler.build_connector_meta(plan_of("a", 4))
    assert (len(metadata.digests), metadata.has_time) == (1, False)
    core.scheduler.on_blocks_complete(request, TABLES, 0, 2)
    assert core.exchange.take_metadata(computes=True).digests == (), "only with drafts"


def test_a_load_from_an_engine_that_shuts_down_ends_for_its_reason() -> None:
    engine = Engine()
    granted_load(engine, DIGESTS)
    step(engine)
    engine.exchange.on_event(Received(PEER, Bye("the engine shuts down")))
    (job,) = engine.exchange._jobs._ledger._open
    engine.exchange.take_metadata(computes=False)
    (ended,) = engine.exchange.apply(KVConnectorOutput((TransferReport(job, (0, 0), TransferStatus.FAILED),)))
    assert isinstance(ended, LoadEnded)
    assert ended.reason == "the engine shuts down"
