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

from penstock.kv_transfer.connector import FREED, FinishAction, FinishResult, LoadEnded, Released
from penstock.kv_transfer.p2p.channel import (
    Channel,
    ChannelEvent,
    ChannelHandler,
    Connected,
    Lost,
    Received,
)
from penstock.kv_transfer.p2p.consumer import Consumer
from penstock.kv_transfer.p2p.exchange import Exchange, Load, P2PSettings
from penstock.kv_transfer.p2p.messages import (
    VERSION,
    Bye,
    DigestJob,
    Fetch,
    Hello,
    Message,
    P2PHandshake,
    P2PSetup,
    ReadJob,
    Reason,
    Refuse,
    Shard,
)
from penstock.kv_transfer.p2p.params import Address, RemotePrefill
from penstock.kv_transfer.p2p.producer import Offer, Producer, ProducerRules
from penstock.kv_transfer.p2p.scheduler import P2PScheduler
from penstock.kv_transfer.p2p.session import MAX_REASON_LENGTH, PeerKey
from penstock.kv_transfer.p2p.socket_channel import SocketChannel
from penstock.kv_transfer.p2p.ticket import digest_prompt
from penstock.messages.kv_layout import KVLayout
from penstock.messages.kv_transfer import NO_OUTPUT, KVConnectorOutput, TransferReport, TransferStatus
from penstock.messages.outputs import FinishReason
from penstock.utils.clock import Clock, ManualClock, SystemClock
from tests.unit.kv_memory_fakes import make_layout, model
from tests.unit.test_p2p_protocol import ADDRESS, OFFICE, PROMPT, RULES

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

    def answer_queries(self, answer: Mapping[str, Any]) -> None: ...
    def dial(self, address: Address) -> PeerKey:
        return PEER

    def send(self, peer: PeerKey, message: Message) -> None:
        self.sent.append(message)

    def hang_up(self, peer: PeerKey) -> None: ...
    def wake_at(self, when: float | None) -> None: ...
    def start(self, handler: ChannelHandler) -> None: ...
    def check(self) -> None: ...
    def close(self) -> None: ...


class Core:
    """The scheduler side of an engine named `name`."""

    def __init__(
        self, name: str, channel: Channel, clock: Clock, rules: ProducerRules = RULES, *, has_drafts: bool = False
    ) -> None:
        setup = P2PSetup("memory", "127.0.0.1", b"key")
        settings = P2PSettings(engine_id=name, epoch="1", role="kv_both", meaning=MEANING, setup=setup, num_groups=2)
        producer, consumer = Producer(name, "1", rules, OFFICE), Consumer(30.0, OFFICE)
        self.exchange = Exchange(settings, channel, producer, consumer, clock)
        resolve = lambda address: address  # noqa: E731
        self.scheduler = P2PScheduler(settings, 4, self.exchange, resolve, clock, has_drafts=has_drafts)
        self.scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): P2PHandshake(LAYOUT, b"")})


class Engine(Core):
    """One without a network."""

    def __init__(self) -> None:
        self.channel = ScriptedChannel()
        super().__init__("d", self.channel, ManualClock())

    def hear(self, *events: ChannelEvent) -> list[str]:
        """Returns why loads have ended."""
        for event in events:
            self.exchange.on_event(event)
        self.exchange.take_metadata(computes=False)
        ended = [each for each in self.exchange.apply(KVConnectorOutput()) if isinstance(each, LoadEnded)]
        return [each.reason for each in ended]


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
        [Received(PEER, Refuse("", Reason.OTHER_MODEL, LONG))],
        [Received(PEER, hello()), Received(PEER, Refuse("load", Reason.OVERLOADED, LONG))],
        [Received(PEER, hello()), Received(PEER, Bye(LONG))],
        [Lost(PEER, LONG)],
    ],
    ids=["meaning", "name of a meaning", "transport", "layout", "refused session", "refused load", "bye", "lost"],
)
def test_what_a_peer_says_is_cut(events: list[ChannelEvent], caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine()
    load = Load(RemotePrefill(ADDRESS, "p", rendezvous="x"), PROMPT, ((1,), (1,)), 0, 4, 0.0)
    engine.exchange.begin_load("load", load)
    with caplog.at_level(logging.WARNING):
        (reason,) = engine.hear(Connected(PEER, is_outgoing=True), *events)
    said = [each.detail for each in engine.channel.sent if isinstance(each, Refuse)]
    for text in (reason, *said, *(record.getMessage() for record in caplog.records)):
        assert 0 < len(text) < MAX_REASON_LENGTH + 200


@dataclass
class Request:
    """A prompt that another engine will decode."""

    request_id: str
    hold_id: str
    kv_transfer_params: Mapping[str, Any]
    cache_salt: str | None = None
    prompt_token_ids: tuple[int, ...] = (1, 2, 3, 4, 5)
    block_hashes: tuple[bytes, ...] = ()
    num_tokens: int = 5
    num_prompt_tokens: int = 5


def test_a_reader_waits_for_a_request_that_comes_again_after_an_abort() -> None:
    engine = Engine()
    params = {"do_remote_decode": True, "transfer_id": "x"}
    first, again = Request("first", "first/hold", params), Request("again", "again/hold", params)
    engine.scheduler.on_new_request(first)
    engine.scheduler.request_finished(first, (), FinishReason.ABORT)
    engine.scheduler.on_new_request(again)
    digest = digest_prompt(again.prompt_token_ids, None)
    fetch = Fetch(transfer_id="load", first=0, end=4, prompt_digest=digest, rendezvous="x")
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
    engine.scheduler.on_new_request(with_tokens(Request("a", "a/hold", {"do_remote_decode": True}), 11))
    jobs = [
        engine.scheduler.build_connector_meta(plan_of("a", num_tokens, computed)).digests
        for num_tokens, computed in ((3, 0), (3, 3), (6, 6))
    ]
    found = [[(job.block_ids, job.first, job.end) for job in each] for each in jobs]
    assert found == [[], [(((1,), (1,)), 0, 4)], [(((2,), (2,)), 0, 4)]], "the prompt's 11 tokens fill two blocks"


def test_blocks_with_draft_kv_are_digested_when_the_drafter_has_completed_them() -> None:
    core = Core("p", ScriptedChannel(), ManualClock(), has_drafts=True)
    request = with_tokens(Request("a", "a/hold", {"do_remote_decode": True}), 11)
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
    rules = replace_dataclass(RULES, lease_seconds=0.3)
    with contextlib.ExitStack() as stack:
        cores: list[Core] = []
        for name in ("p", "d"):
            channel = SocketChannel("127.0.0.1", {"kv_port": 0}, b"a key that is long enough")
            cores.append(Core(name, channel, SystemClock(), rules))
            stack.callback(cores[-1].scheduler.shutdown)
        p, d = cores
        prefill = Request("prefill", "prefill/hold", {"do_remote_decode": True})
        p.scheduler.on_new_request(prefill)
        (job,) = p.scheduler.build_connector_meta(plan_of("prefill", 5)).digests
        p.exchange.apply(KVConnectorOutput((digests_of(job),)))
        params = p.scheduler.request_finished(prefill, ((1, 2), (1, 2)), FinishReason.LENGTH).kv_transfer_params
        # From here on P's core is busy.
        assert params is not None
        decode = Request("decode", "decode/hold", params)
        d.scheduler.on_new_request(decode)
        assert d.scheduler.get_num_new_matched_tokens(decode, 0).num_tokens == 4
        d.scheduler.update_state_after_alloc(decode, "load", ((5,), (5,)), 0, 4)
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
        assert events == [LoadEnded("load")]
        assert p.scheduler.has_pending_work, "P's core is to release the blocks"
        assert p.exchange._events == [Released("prefill/hold")]
        for core in cores:
            core.scheduler.check_integrity()


def test_requests_beyond_the_share_of_the_pool_get_no_ticket_and_free_their_blocks() -> None:
    engine = Engine()
    results: list[FinishResult] = []
    for name in ("first", "second"):
        request = Request(name, f"{name}/hold", {"do_remote_decode": True})
        engine.scheduler.on_new_request(request)
        block = len(results) * 4 + 1
        results.append(engine.scheduler.request_finished(request, ((block, block + 1),) * 2, FinishReason.LENGTH))
    assert results[0].action is FinishAction.HOLD
    assert results[1] == FinishResult(FinishAction.HOLD, results[1].kv_transfer_params)
    request = Request("third", "third/hold", {"do_remote_decode": True})
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
    source, tables = RemotePrefill(ADDRESS, "p", rendezvous="x"), ((1, 2), (1, 2))
    load = Load(source, PROMPT, tables, 0, 4, 0.0)
    exchange.begin_load("load", load)
    exchange.abandon_load("load")
    exchange.refuse_load("refused", load, "no")
    exchange.dismiss("none", source, PROMPT)
    for name in ("held", "withdrawn"):
        exchange.expect(name, name)
        exchange.restart(name)
        exchange.on_computed(name, tables, 0, 4)
    assert exchange.offer(Offer(hold_id="held", prompt_digest=PROMPT, num_tokens=5, block_ids=tables))
    exchange.withdraw("withdrawn")
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
