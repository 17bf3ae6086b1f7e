"""The scheduler side of the `P2PConnector` without a network: peers say what the test says."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.kv_transfer.connector import LoadEnded
from penstock.kv_transfer.p2p.channel import ChannelEvent, Connected, Lost, Received
from penstock.kv_transfer.p2p.consumer import Consumer
from penstock.kv_transfer.p2p.exchange import Exchange, Load, P2PSettings
from penstock.kv_transfer.p2p.messages import (
    VERSION,
    Bye,
    Fetch,
    Hello,
    Message,
    P2PHandshake,
    P2PSetup,
    Reason,
    Refuse,
    Shard,
)
from penstock.kv_transfer.p2p.params import Address, RemotePrefill
from penstock.kv_transfer.p2p.producer import Producer
from penstock.kv_transfer.p2p.scheduler import P2PScheduler
from penstock.kv_transfer.p2p.session import MAX_REASON_LENGTH, PeerKey
from penstock.kv_transfer.p2p.ticket import digest_prompt
from penstock.messages.kv_layout import KVLayout
from penstock.messages.kv_transfer import KVConnectorOutput
from penstock.messages.outputs import FinishReason
from penstock.utils.clock import ManualClock
from tests.unit.kv_memory_fakes import make_layout, model
from tests.unit.test_p2p_protocol import ADDRESS, OFFICE, PROMPT, RULES

PEER = "peer"
LAYOUT = make_layout(model(2), 4)
MEANING = {"weights": "abc"}
LONG = "x" * 100_000


class ScriptedChannel:
    """Connects to everything as `PEER`, and keeps what is sent."""

    def __init__(self) -> None:
        self.address: Address = ("127.0.0.1", 1)
        self.events: list[ChannelEvent] = []
        self.sent: list[Message] = []
        self.has_news = False

    def answer_queries(self, answer: Mapping[str, Any]) -> None: ...
    def dial(self, address: Address) -> PeerKey:
        return PEER

    def send(self, peer: PeerKey, message: Message) -> None:
        self.sent.append(message)

    def hang_up(self, peer: PeerKey) -> None: ...
    def take(self) -> list[ChannelEvent]:
        events, self.events = self.events, []
        return events

    def wake_at(self, when: float | None) -> None: ...
    def set_waker(self, callback: Callable[[], None]) -> None: ...
    def wait(self, seconds: float) -> None: ...
    def close(self) -> None: ...


@dataclass
class Engine:
    channel: ScriptedChannel = field(default_factory=ScriptedChannel)

    def __post_init__(self) -> None:
        setup = P2PSetup("memory", "127.0.0.1", b"key")
        settings = P2PSettings(engine_id="d", epoch="1", role="kv_both", meaning=MEANING, setup=setup, num_groups=2)
        clock = ManualClock()
        producer, consumer = Producer("d", "1", RULES, OFFICE), Consumer(30.0, OFFICE)
        self.exchange = Exchange(settings, self.channel, producer, consumer, clock)
        self.scheduler = P2PScheduler(settings, 4, self.exchange, lambda address: address, clock)
        self.scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): P2PHandshake(LAYOUT, b"")})

    def hear(self, *events: ChannelEvent) -> list[str]:
        """Returns why loads have ended."""
        self.channel.events += events
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
    (job,) = engine.exchange.take_metadata(computes=False).attests
    assert job.block_ids == ((1, 2), (1, 2))
