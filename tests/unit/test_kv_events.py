"""KV events report exactly what the prefix cache holds, in vLLM's format, and no subscriber can delay the engine."""

from __future__ import annotations

import hashlib
import random
import struct
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import zmq

from penstock.config.engine import EngineArgs, resolve
from penstock.config.kv_events import KVEventsConfig, parse_kv_events_config
from penstock.config.replicas import core_plans
from penstock.core.block_hash import root_hash
from penstock.engine import kv_events
from penstock.engine.core_messages import CODEC
from penstock.engine.engine_core import EngineCore
from penstock.engine.kv_events import ZmqEventPublisher, encode_batch
from penstock.messages.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from penstock.messages.stats import StepReport
from penstock.utils.errors import ConfigError
from tests.unit.test_scheduler_storm import make_core, run_storm

ANYWHERE = "tcp://127.0.0.1:0"
TIMEOUT_MS = 20_000
END = b"\xff" * 8

# ---- Content ----


class Mirror:
    """Tracks the cached blocks by the events, and compares them with the pool after every step (invariant I48)."""

    core: EngineCore

    def __init__(self) -> None:
        self.held: set[tuple[int, bytes]] = set()
        self.num_stored = self.num_removed = self.num_with_tokens_ahead = 0

    def publish(self, batch: Sequence[KVEvent]) -> None:
        assert batch
        for event in batch:
            keys = {(event.group_idx, block_hash) for block_hash in event.block_hashes}
            assert len(keys) == len(event.block_hashes)
            if isinstance(event, BlockStored):
                assert not keys & self.held, "stored twice"
                check_chain(event, self.core._scheduler._kv.num_tokens_ahead)
                self.num_with_tokens_ahead += self.core._scheduler._kv.num_tokens_ahead
                self.held |= keys
                self.num_stored += len(keys)
            else:
                assert keys <= self.held, "removed before it was stored"
                self.held -= keys
                self.num_removed += len(keys)
        self.compare()

    def compare(self) -> None:
        assert self.held == set(self.core._scheduler._kv.pool._cached)

    def shutdown(self) -> None: ...


def check_chain(event: BlockStored, num_tokens_ahead: int) -> None:
    """Checks that the hashes follow from the event alone: a router computes them in this way."""
    extra = [key or () for key in event.extra_keys or [()] * len(event.block_hashes)]
    salts = [key[: len(key) - num_tokens_ahead] for key in extra]
    assert not any(salts[event.parent_block_hash is None :]), "a salt belongs to a prompt's first block"
    salt = next(iter(salts[0]), None)
    parent = root_hash((salt or "").encode()) if event.parent_block_hash is None else event.parent_block_hash
    assert len(event.token_ids) == len(event.block_hashes) * event.block_size
    for number, block_hash in enumerate(event.block_hashes):
        tokens = list(event.token_ids[number * event.block_size :][: event.block_size])
        tokens += map(int, extra[number][len(extra[number]) - num_tokens_ahead :])
        assert len(tokens) == event.block_size + num_tokens_ahead
        parent = hashlib.sha256(parent + array("q", tokens).tobytes()).digest()
        assert parent == block_hash


@pytest.mark.spread(1)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("windows", [(0,), (6,), (0, 9)], ids=["full", "sliding", "hybrid"])
def test_replaying_the_events_of_a_storm_gives_the_cached_blocks(windows: tuple[int, ...], depth: int) -> None:
    num_stored = num_removed = num_with_tokens_ahead = 0
    for seed in range(25):
        rng = random.Random(f"{seed} {windows} {depth}")
        mirror = Mirror()
        core, devices = make_core(rng, windows, depth, drafts=rng.choice([0, 3]), publisher=mirror)
        mirror.core = core
        run_storm(rng, core, devices)
        mirror.compare()
        num_stored += mirror.num_stored
        num_removed += mirror.num_removed
        num_with_tokens_ahead += mirror.num_with_tokens_ahead
        assert core.reset_prefix_cache()
        assert not mirror.held
    assert num_stored > 1000
    assert num_removed > 500
    assert num_with_tokens_ahead > 100


class Published:
    """Keeps all events."""

    def __init__(self) -> None:
        self.events: list[KVEvent] = []

    def publish(self, events: Sequence[KVEvent]) -> None:
        self.events += events

    def shutdown(self) -> None: ...


@pytest.mark.parametrize("reports", [True, False])
def test_reports_carry_the_published_events_only_if_configured(monkeypatch: pytest.MonkeyPatch, reports: bool) -> None:
    published, reported, frames = Published(), list[KVEvent](), list[bytes]()
    rng = random.Random(1)
    core, devices = make_core(rng, (0, 9), 2, publisher=published, reports_kv_events=reports)

    def note(report: StepReport) -> StepReport:
        frames.append(CODEC.encode(report))
        reported.extend(report.kv_events)
        return report

    step = core.step
    monkeypatch.setattr(core, "step", lambda: note(step()))
    run_storm(rng, core, devices)
    assert core.reset_prefix_cache()
    note(core.report())
    assert len(published.events) > 20
    assert reported == (published.events if reports else [])
    assert any(b"kv_events" in frame for frame in frames) is reports


# ---- Format ----


def decode(data: bytes) -> Any:
    """Decodes msgpack by its specification (https://github.com/msgpack/msgpack/blob/master/spec.md)."""
    value, rest = _decode(data)
    assert not rest, "bytes are left over"
    return value


_NUMBERS = {0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"}


def _decode(data: bytes) -> tuple[Any, bytes]:
    first, rest = data[0], data[1:]
    if first < 0x80:
        return first, rest
    if first in _NUMBERS:
        size = struct.calcsize(_NUMBERS[first])
        return struct.unpack(_NUMBERS[first], rest[:size])[0], rest[size:]
    if first in (0xC0, 0xC2, 0xC3):
        return {0xC0: None, 0xC2: False, 0xC3: True}[first], rest
    if 0xA0 <= first < 0xC0 or first == 0xD9:
        size, rest = (first & 0x1F, rest) if first < 0xC0 else (rest[0], rest[1:])
        return rest[:size].decode(), rest[size:]
    if 0x90 <= first < 0xA0 or first == 0xDC:
        size, rest = (first & 0x0F, rest) if first < 0xA0 else (int.from_bytes(rest[:2], "big"), rest[2:])
        items = []
        for _ in range(size):
            item, rest = _decode(rest)
            items.append(item)
        return items, rest
    assert 0x80 <= first < 0x90, f"byte {first:#x}"
    pairs = {}
    for _ in range(first & 0x0F):
        key, rest = _decode(rest)
        pairs[key], rest = _decode(rest)
    return pairs, rest


STORED = BlockStored(
    block_hashes=(bytes(24) + b"\x01\x02\x03\x04\x05\x06\x07\x08", bytes(31) + b"\x05"),
    parent_block_hash=bytes(24) + b"\xff" * 8,
    token_ids=(1, 300, 70_000, 4),
    block_size=2,
    kv_cache_spec_kind="full_attention",
)


def test_the_payload_has_vllms_format() -> None:
    window = BlockStored(
        block_hashes=(b"a" * 32,),
        parent_block_hash=None,
        token_ids=(9, 8),
        block_size=2,
        extra_keys=(("salt",),),
        group_idx=1,
        kv_cache_spec_kind="sliding_window",
        kv_cache_spec_sliding_window=9,
    )
    removed = BlockRemoved(block_hashes=(b"a" * 32,), group_idx=1, medium="CPU")
    a = int.from_bytes(b"a" * 8, "big")
    common = {"lora_id": None, "medium": "GPU", "lora_name": None}
    assert decode(encode_batch(1.5, (STORED, window, removed, AllBlocksCleared()))) == [
        1.5,
        [
            {
                "type": "BlockStored",
                "block_hashes": [0x0102030405060708, 5],
                "parent_block_hash": 2**64 - 1,
                "token_ids": [1, 300, 70_000, 4],
                "block_size": 2,
                **common,
                "group_idx": 0,
                "kv_cache_spec_kind": "full_attention",
            },
            {
                "type": "BlockStored",
                "block_hashes": [a],
                "parent_block_hash": None,
                "token_ids": [9, 8],
                "block_size": 2,
                **common,
                "extra_keys": [["salt"]],
                "group_idx": 1,
                "kv_cache_spec_kind": "sliding_window",
                "kv_cache_spec_sliding_window": 9,
            },
            {"type": "BlockRemoved", "block_hashes": [a], "medium": "CPU", "group_idx": 1},
            {"type": "AllBlocksCleared"},
        ],
        0,
    ]


def test_the_payload_byte_for_byte() -> None:
    expected = (
        b"\x93\xcb" + struct.pack(">d", 1.5) + b"\x92"
        b"\x8a\xa4type\xabBlockStored"
        b"\xacblock_hashes\x92\xcf\x01\x02\x03\x04\x05\x06\x07\x08\x05"
        b"\xb1parent_block_hash\xcf\xff\xff\xff\xff\xff\xff\xff\xff"
        b"\xa9token_ids\x94\x01\xcd\x01\x2c\xce\x00\x01\x11\x70\x04"
        b"\xaablock_size\x02\xa7lora_id\xc0\xa6medium\xa3GPU\xa9lora_name\xc0\xa9group_idx\x00"
        b"\xb2kv_cache_spec_kind\xaefull_attention"
        b"\x81\xa4type\xb0AllBlocksCleared"
        b"\x00"
    )
    assert encode_batch(1.5, (STORED, AllBlocksCleared())) == expected


# ---- Sockets ----


Connect = Callable[..., zmq.Socket]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Yields a function that makes connected sockets, which are closed after the test."""
    context = zmq.Context()
    made: list[zmq.Socket] = []

    def _connect(kind: int, endpoint: str, hwm: int = 0) -> zmq.Socket:
        made.append(context.socket(kind))
        made[-1].set(zmq.RCVHWM, hwm)
        made[-1].set(zmq.RCVTIMEO, TIMEOUT_MS)
        made[-1].connect(endpoint)
        return made[-1]

    yield _connect
    context.destroy(linger=0)


@pytest.fixture
def start() -> Iterator[Any]:
    """Yields a function that starts publishers on free ports, which are shut down after the test."""
    started: list[ZmqEventPublisher] = []

    def _start(**options: Any) -> ZmqEventPublisher:
        given = {"enable_kv_cache_events": True, "endpoint": ANYWHERE, "replay_endpoint": ANYWHERE, **options}
        started.append(ZmqEventPublisher(parse_kv_events_config(given)))
        return started[-1]

    yield _start
    for publisher in started:
        publisher.shutdown()
        assert not publisher._thread.is_alive()


def subscribe(connect: Connect, publisher: ZmqEventPublisher, topic: str = "", hwm: int = 0) -> zmq.Socket:
    """Returns a SUB socket whose subscription has arrived."""
    listener = connect(zmq.SUB, publisher.endpoint, hwm)
    listener.subscribe(topic)
    for _ in range(1000):
        publisher.publish((removed(255),))
        if listener.poll(20):
            return listener
    raise AssertionError("the subscription never arrived")


def wait_until(is_true: Callable[[], bool]) -> None:
    for _ in range(4000):
        if is_true():
            return
        threading.Event().wait(0.005)
    raise AssertionError("the condition never became true")


def removed(number: int) -> BlockRemoved:
    return BlockRemoved(block_hashes=(number.to_bytes(8, "big"),))


def hash_in(frames: list[bytes]) -> int:
    """Returns the first event's hash; -1 for the batch by which a new engine reports an empty cache."""
    return decode(frames[2])[1][0].get("block_hashes", [-1])[0]


def replay(connect: Connect, publisher: ZmqEventPublisher, first: int) -> list[list[bytes]]:
    """Returns the batches from number `first` on that the publisher still has, as [topic, number, payload]."""
    client = connect(zmq.DEALER, publisher.replay_endpoint)
    client.send_multipart([b"", first.to_bytes(8, "big")])
    batches = []
    while True:
        empty, *frames = client.recv_multipart()
        assert empty == b""
        if frames[1] == END:
            assert frames == [b"", END, b""]
            return batches
        batches.append(frames)


def test_a_subscriber_receives_every_batch_in_order(connect: Connect, start: Any) -> None:
    publisher = start(topic="kv@here")
    listener = subscribe(connect, publisher, topic="kv@")
    for number in range(1000, 1100):
        publisher.publish((removed(number),))
    batches = []
    while not batches or hash_in(batches[-1]) != 1099:
        batches.append(listener.recv_multipart())
    assert {topic for topic, _, _ in batches} == {b"kv@here"}
    numbers = [int.from_bytes(number, "big") for _, number, _ in batches]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert [hash_in(frames) for frames in batches[-100:]] == list(range(1000, 1100))


def test_missed_batches_are_replayed_unchanged(connect: Connect, start: Any) -> None:
    publisher = start(topic="kv")
    listener = subscribe(connect, publisher)
    for number in range(3000):
        publisher.publish((removed(number),))
    received = {}
    while not received or hash_in(received[max(received)]) != 2999:
        frames = listener.recv_multipart()
        received[int.from_bytes(frames[1], "big")] = frames
    last = max(received)
    # A subscriber that lost the last 2501 batches gets exactly these.
    again = replay(connect, publisher, last - 2500)
    assert again == [received[number] for number in range(last - 2500, last + 1)]
    everything = replay(connect, publisher, 0)
    assert [int.from_bytes(frames[1], "big") for frames in everything] == list(range(last + 1))
    assert decode(everything[0][2])[1] == [{"type": "AllBlocksCleared"}], "what an earlier engine held is gone"
    assert replay(connect, publisher, last + 1) == []


def test_the_replay_buffer_is_bounded(connect: Connect, start: Any) -> None:
    publisher = start(buffer_steps=10)
    for number in range(50):
        publisher.publish((removed(number),))
    assert [int.from_bytes(frames[1], "big") for frames in replay(connect, publisher, 50)] == [50]
    assert [int.from_bytes(frames[1], "big") for frames in replay(connect, publisher, 0)] == list(range(41, 51))


def test_invalid_replay_requests_are_ignored(connect: Connect, start: Any) -> None:
    publisher = start()
    for frames in ([b"x"], [b""], [b"", b"12"], [b"", b"1" * 8, b"more"], [b"", b"x" * 100_000]):
        connect(zmq.DEALER, publisher.replay_endpoint).send_multipart(frames)
    assert len(replay(connect, publisher, 0)) == 1


def test_a_subscriber_that_does_not_read_does_not_delay_the_engine(connect: Connect, start: Any) -> None:
    publisher = start(hwm=2, buffer_steps=100)
    subscribe(connect, publisher, hwm=1)
    silent = connect(zmq.DEALER, publisher.replay_endpoint, hwm=1)
    big = BlockStored(block_hashes=(b"x",), parent_block_hash=None, token_ids=tuple(range(20_000)), block_size=20_000)
    for _ in range(300):
        publisher.publish((big,))
        silent.send_multipart([b"", bytes(8)])
    # Other clients are still served, and shutdown is not delayed.
    assert len(replay(connect, publisher, 0)) == 100
    other = subscribe(connect, publisher)
    publisher.publish((removed(7),))
    while hash_in(other.recv_multipart()) != 7:
        pass


def test_overload_drops_the_oldest_batches_and_leaves_a_gap_in_the_numbers(
    connect: Connect, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = start(max_queue_size=4)
    first = int.from_bytes(replay(connect, publisher, 0)[-1][1], "big") + 1
    is_free = threading.Event()

    def slow(timestamp: float, batch: Sequence[KVEvent], dp_rank: int) -> bytes:
        assert is_free.wait(20)
        return encode_batch(timestamp, batch, dp_rank)

    monkeypatch.setattr(kv_events, "encode_batch", slow)
    publisher.publish((removed(0),))
    wait_until(lambda: not publisher._queue)
    for number in range(1, 21):
        publisher.publish((removed(number),))
    is_free.set()
    wait_until(lambda: publisher._num_taken == publisher._num_published)
    got = replay(connect, publisher, first)
    assert [int.from_bytes(frames[1], "big") - first for frames in got] == [0, 17, 18, 19, 20]
    assert [hash_in(frames) for frames in got] == [0, 17, 18, 19, 20]


def test_shutdown_sends_queued_batches_and_is_idempotent(connect: Connect, start: Any) -> None:
    publisher = start()
    listener = subscribe(connect, publisher)
    publisher.publish((removed(1234),))
    publisher.shutdown()
    publisher.shutdown()
    publisher.publish((removed(0),))
    while hash_in(listener.recv_multipart()) != 1234:
        pass


def test_batches_name_the_engine_among_the_data_parallel_ones(connect: Connect) -> None:
    events = {"enable_kv_cache_events": True, "endpoint": ANYWHERE, "replay_endpoint": ANYWHERE}
    plans = core_plans(resolve(EngineArgs(data_parallel_size=2, kv_events_config=events)), None)
    ranks: list[int] = []
    for config in (plan.config for plan in plans):
        publisher = kv_events.make_event_publisher(config.kv_events, config.dp_rank)
        assert isinstance(publisher, ZmqEventPublisher)
        ranks += [decode(payload)[2] for *_, payload in replay(connect, publisher, 0)]
        publisher.shutdown()
    assert ranks == [0, 1]


# ---- Configuration ----


def test_events_are_off_by_default() -> None:
    assert not parse_kv_events_config(None).is_active
    assert not parse_kv_events_config({"endpoint": ANYWHERE}).is_active
    assert not parse_kv_events_config({"enable_kv_cache_events": True, "publisher": "null"}).is_active
    assert parse_kv_events_config('{"enable_kv_cache_events": true}').endpoint == "tcp://127.0.0.1:5557"


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.9:5557", "tcp://[::1]:5557", "ipc:///tmp/events"])
def test_local_endpoints_are_accepted(endpoint: str) -> None:
    parse_kv_events_config({"endpoint": endpoint, "replay_endpoint": endpoint})


@pytest.mark.parametrize("endpoint", ["tcp://*:5557", "tcp://0.0.0.0:5557", "tcp://10.0.0.1:5557", "tcp://[::]:5557"])
@pytest.mark.parametrize("key", ["endpoint", "replay_endpoint"])
def test_remote_endpoints_need_allow_remote(key: str, endpoint: str) -> None:
    with pytest.raises(ConfigError, match=rf"{key}=.* tokens of all prompts .*allow_remote"):
        parse_kv_events_config({key: endpoint})
    parse_kv_events_config({key: endpoint, "allow_remote": True})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{", "not JSON"),
        ("[]", "must be an object"),
        ({"endpont": ANYWHERE}, "did you mean 'endpoint'"),
        ({"endpoint": "udp://127.0.0.1:1"}, r"endpoint in kv_events_config must be tcp://ADDRESS:PORT"),
        ({"endpoint": "tcp://127.0.0.1:70000"}, "must be tcp://"),
        ({"endpoint": None}, "must be tcp://"),
        ({"publisher": "kafka"}, "one of zmq, null"),
        ({"buffer_steps": 0}, "an integer from 1"),
        ({"hwm": True}, "an integer from 1"),
        ({"enable_kv_cache_events": 1}, "true or false"),
        ({"topic": 5}, "must be text"),
    ],
)
def test_invalid_configurations_are_refused(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_kv_events_config(given)


def test_an_address_in_use_is_a_config_error(start: Any) -> None:
    publisher = start()
    taken = KVEventsConfig(enable_kv_cache_events=True, endpoint=ANYWHERE, replay_endpoint=publisher.endpoint)
    with pytest.raises(ConfigError, match=r"replay_endpoint=.* cannot be bound"):
        ZmqEventPublisher(taken)
