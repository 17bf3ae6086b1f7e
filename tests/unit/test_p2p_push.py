"""Push: the two halves of disaggregation as state machines where the producer writes the KV."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from penstock.kv_transfer.p2p.consumer import Cancel, Consumer, Dial, Ended, Open, Read
from penstock.kv_transfer.p2p.messages import (
    Abort,
    Destination,
    Done,
    DoneAck,
    Fetch,
    FetchInto,
    Grant,
    Reason,
    Refuse,
    Renew,
    ShardDigests,
    Window,
    Written,
)
from penstock.kv_transfer.p2p.producer import Attest, Producer, ProducerRules, Release, Sent, StopWriting
from penstock.kv_transfer.p2p.session import Send
from tests.unit.test_p2p_protocol import ADDRESS, OFFER, OFFICE, PEER, PROMPT, RULES, source

DESTINATION = Destination(((7, 8),), (Window((0, 0), b"window"),))
DIGESTS = (ShardDigests((0, 0), (0, 0), ((b"d",),)),)
GRANT = Grant(transfer_id="load", lease=9.0, block_ids=((5, 6),))
READ = Read("load", PEER, Grant(transfer_id="load", lease=9.0, block_ids=((5, 6),), digests=DIGESTS), 0, 16, True)
CANCEL = Cancel("load", is_pushed=True)


# ---- The sending half ----


def fetch(ticket: str, **changes: Any) -> FetchInto:
    given: dict[str, Any] = {"transfer_id": "load", "first": 0, "end": 16, "prompt_digest": PROMPT, **changes}
    return FetchInto(**given, ticket=ticket, destination=DESTINATION)


def writing(rules: ProducerRules = RULES) -> Producer:
    """Returns a producer whose workers have been writing since time 0."""
    producer = Producer("p", "epoch", rules, OFFICE)
    producer.receive(PEER, fetch(producer.offer(OFFER, 0.0)), 0.0)
    grant = Send(PEER, Grant(transfer_id="load", lease=10.0, block_ids=((5, 6),)))
    job = Attest("attest-1", PEER, ((5, 6),), 0, 16, DESTINATION, has_digests=rules.is_attested)
    assert producer.take_actions() == [grant, job]
    producer.check_integrity()
    return producer


def test_a_write_is_granted_at_once_and_reported_when_it_is_complete() -> None:
    producer = writing()
    producer.on_attested("attest-1", DIGESTS, 4.0)
    assert producer.take_actions() == [Send(PEER, Written("load", DIGESTS))]
    producer.poll(13.9)
    producer.receive(PEER, Done("load"), 13.9)
    assert producer.take_actions() == [Release("hold"), Sent(PEER, 16, 13.9), Send(PEER, DoneAck("load", True))]
    assert producer.num_held == 0
    producer.check_integrity()


def test_a_write_without_digests_is_reported_too() -> None:
    producer = writing(replace(RULES, is_attested=False))
    producer.on_attested("attest-1", (), 4.0)
    assert producer.take_actions() == [Send(PEER, Written("load"))]


def test_a_failed_write_is_refused_and_its_blocks_are_released() -> None:
    producer = writing()
    producer.on_attested("attest-1", None, 4.0)
    actions = producer.take_actions()
    assert actions == [Release("hold"), Send(PEER, Refuse("load", Reason.NOT_WRITTEN, "the KV could not be written"))]
    producer.check_integrity()


def _end_of_lease(producer: Producer) -> None:
    producer.receive(PEER, Renew("load"), 5.0)
    producer.poll(14.9)
    assert producer.take_actions() == []
    producer.poll(15.0)
    refused, stop = producer.take_actions()
    assert isinstance(refused, Send)
    assert isinstance(refused.message, Refuse)
    assert "lease" in refused.message.detail
    assert stop == StopWriting("attest-1")


@pytest.mark.parametrize(
    "end",
    [
        _end_of_lease,
        lambda producer: producer.receive(PEER, Abort("load"), 1.0),
        lambda producer: producer.on_lost(PEER),
        lambda producer: producer.receive(PEER, Done("load"), 1.0),
    ],
    ids=["lease", "abort", "lost", "early done"],
)
def test_blocks_are_released_when_the_workers_have_stopped_writing(end: Callable[[Producer], None]) -> None:
    producer = writing()
    end(producer)
    actions = producer.take_actions()
    assert Release("hold") not in actions
    assert StopWriting("attest-1") in actions or end is _end_of_lease
    assert Send(PEER, DoneAck("load", True)) not in actions
    producer.check_integrity()
    assert producer.next_deadline is None
    for message in (Renew("load"), Abort("load")):
        producer.receive(PEER, message, 16.0)
    producer.poll(1000.0)
    assert producer.take_actions() == []
    producer.on_attested("attest-1", DIGESTS, 1000.0)
    assert producer.take_actions() == [Release("hold")]
    producer.check_integrity()


# ---- The receiving half ----


def opening() -> Consumer:
    consumer = Consumer(30.0, OFFICE, is_pushed=True)
    consumer.begin("load", source(), PROMPT, 0, 16, now=0.0)
    assert consumer.take_actions() == [Open("load", 0, 16)]
    return consumer


def dialling() -> Consumer:
    consumer = opening()
    consumer.on_opened("load", DESTINATION)
    assert consumer.take_actions() == [Dial(ADDRESS)]
    consumer.on_dialled(ADDRESS, PEER)
    return consumer


def asking() -> Consumer:
    consumer = dialling()
    consumer.on_open(PEER, "p")
    (sent,) = consumer.take_actions()
    assert isinstance(sent, Send)
    assert isinstance(sent.message, FetchInto)
    assert sent.message.destination == DESTINATION
    consumer.check_integrity()
    return consumer


def waiting() -> Consumer:
    consumer = asking()
    consumer.receive(PEER, GRANT, 0.0)
    assert consumer.take_actions() == []
    return consumer


def checking() -> Consumer:
    consumer = waiting()
    consumer.receive(PEER, Written("load", DIGESTS), 1.0)
    assert consumer.take_actions() == [READ]
    return consumer


def test_a_load_waits_for_the_producers_written_message() -> None:
    consumer = waiting()
    assert consumer.next_deadline == 3.0
    consumer.poll(3.0)
    assert consumer.take_actions() == [Send(PEER, Renew("load"))]
    consumer.receive(PEER, DoneAck("load", True), 4.0)
    assert consumer.take_actions() == []
    consumer.receive(PEER, Written("load", DIGESTS), 5.0)
    assert consumer.take_actions() == [READ]
    consumer.receive(PEER, Written("load", ()), 5.0)
    assert consumer.take_actions() == []
    consumer.on_read("load", (), is_complete=True)
    assert consumer.take_actions() == [Send(PEER, Done("load"))]
    consumer.receive(PEER, DoneAck("load", True), 6.0)
    assert consumer.take_actions() == [Ended("load")]
    assert consumer.num_loads == 0


def test_a_written_message_without_a_grant_is_ignored() -> None:
    consumer = asking()
    consumer.receive(PEER, Written("load", DIGESTS), 1.0)
    assert consumer.take_actions() == []


STATES = [opening, dialling, asking, waiting, checking]


@pytest.mark.parametrize("make", STATES)
@pytest.mark.parametrize("how", ["deadline", "abort"])
def test_a_load_ends_only_with_the_workers_reports(make: Callable[[], Consumer], how: str) -> None:
    consumer = make()
    if how == "deadline":
        consumer.poll(30.0)
    else:
        consumer.fail("load", "the request has ended")
    actions = consumer.take_actions()
    assert CANCEL in actions
    assert (Send(PEER, Abort("load")) in actions) == (make not in (opening, dialling))
    # No message that arrives now ends it.
    consumer.on_opened("load", DESTINATION)
    for message in (GRANT, Written("load"), Refuse("load", Reason.NOT_WRITTEN, ""), DoneAck("load", True)):
        consumer.receive(PEER, message, 31.0)
    consumer.on_lost(PEER, "gone")
    consumer.poll(1000.0)
    assert consumer.take_actions() == []
    assert consumer.num_loads == 1
    consumer.on_read("load", (), is_complete=False)
    (ended,) = consumer.take_actions()
    assert isinstance(ended, Ended)
    assert ended.reason


@pytest.mark.parametrize("make", [asking, waiting, checking])
@pytest.mark.parametrize("how", ["refused", "lost"])
def test_a_refusal_or_a_lost_connection_first_cancels_the_write(make: Callable[[], Consumer], how: str) -> None:
    consumer = make()
    if how == "refused":
        consumer.receive(PEER, Refuse("load", Reason.NOT_WRITTEN, "because"), 1.0)
    else:
        consumer.on_lost(PEER, "because")
    assert consumer.take_actions() == [CANCEL]
    consumer.on_read("load", (), is_complete=False)
    assert consumer.take_actions() == [Ended("load", reason="because")]


def test_another_engine_at_the_address_gets_no_window() -> None:
    consumer = dialling()
    consumer.on_open(PEER, "q")
    assert consumer.take_actions() == [CANCEL]


def test_workers_that_cannot_open_their_memory_end_the_load() -> None:
    consumer = opening()
    consumer.on_opened("load", None)
    assert consumer.take_actions() == [CANCEL]


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_load_that_is_cancelled_before_its_fetch_offers_no_window(is_closed: bool) -> None:
    consumer = dialling()
    consumer.fail("load", "the request has ended")
    if is_closed:
        consumer.on_read("load", (), is_complete=False)
    consumer.take_actions()
    consumer.on_open(PEER, "p")
    (sent,) = consumer.take_actions()
    assert isinstance(sent, Send)
    assert type(sent.message) is Fetch
    assert sent.message.first == sent.message.end
    if not is_closed:
        consumer.on_read("load", (), is_complete=False)
        assert consumer.take_actions() == [Ended("load", reason="the request has ended")]


def test_kv_that_is_not_needed_is_dismissed_as_with_pull() -> None:
    consumer = Consumer(30.0, OFFICE, is_pushed=True)
    consumer.dismiss("none", source(), PROMPT)
    assert consumer.take_actions() == [Dial(ADDRESS)]
