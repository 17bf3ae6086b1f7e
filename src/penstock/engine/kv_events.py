"""Publishes to routers which blocks the engine holds: vLLM's KV events over ZeroMQ.

Every step that changed something is one batch. The PUB socket sends it as three frames: the topic, a sequence number (8
bytes, big-endian, from 0), and the batch in msgpack,

    [time in seconds since the epoch, [event, ...], data parallel rank]

where each event is a map whose "type" is its name, and each block hash is the last 8 bytes of the full hash as a
number. The ROUTER socket answers a number with every batch from that number on that it still has, in the same three
frames, and then with one whose number is -1.

The first batch of an engine is AllBlocksCleared: blocks of an earlier engine at this address are gone. The publisher
never blocks or ends the engine: batches wait in a bounded queue for a thread that sends them; if it is full the oldest
is dropped, and if a subscriber is slow ZeroMQ drops its messages. In both cases the numbers show the gap.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import zmq

from penstock.config.kv_events import KVEventsConfig
from penstock.messages.kv_events import AllBlocksCleared, KVEvent
from penstock.utils import logging
from penstock.utils.clock import SystemClock
from penstock.utils.errors import ConfigError

logger = logging.get_logger(__name__)

_HASH_BYTES = 8
_NUMBER_BYTES = 8
_END_OF_REPLAY = (-1).to_bytes(_NUMBER_BYTES, "big", signed=True)
_MAX_REQUEST_BYTES = 256
_BELL_BYTES = 4096
_LINGER_MS = 500
_JOIN_SECONDS = 5.0


class EventPublisher(Protocol):
    """The engine core calls it from its own thread. No method may block or raise."""

    def publish(self, events: Sequence[KVEvent]) -> None:
        """Publishes how one step changed the blocks, in order; never empty."""
        ...

    def shutdown(self) -> None:
        """Sends the waiting batches. Idempotent."""
        ...


class NullEventPublisher:
    """Publishes nothing."""

    def publish(self, events: Sequence[KVEvent]) -> None: ...

    def shutdown(self) -> None: ...


def encode_batch(timestamp: float, events: Sequence[KVEvent], dp_rank: int = 0) -> bytes:
    """Returns the payload of a batch."""
    return msgspec.msgpack.encode((timestamp, [_as_map(event) for event in events], dp_rank))


# vLLM always sends these fields, and the others only if they are set.
_ALWAYS = frozenset(
    {"block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "group_idx"}
)


def _as_map(event: KVEvent) -> dict[str, Any]:
    fields = msgspec.structs.asdict(event)
    values = {name: value for name, value in fields.items() if name in _ALWAYS or value is not None}
    if "block_hashes" in values:
        values["block_hashes"] = [_short(block_hash) for block_hash in values["block_hashes"]]
    if values.get("parent_block_hash") is not None:
        values["parent_block_hash"] = _short(values["parent_block_hash"])
    return {"type": type(event).__name__, **values}


def _short(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[-_HASH_BYTES:], "big")


class ZmqEventPublisher:
    """Binds the endpoints and starts a thread, which then owns the sockets.

    Raises ConfigError if an endpoint cannot be bound. `endpoint` and `replay_endpoint` are the bound addresses; the
    latter is empty without replay.
    """

    def __init__(self, config: KVEventsConfig, dp_rank: int = 0) -> None:
        self._clock, self._dp_rank = SystemClock(), dp_rank
        self._topic = config.topic.encode()
        self._context = zmq.Context()
        try:
            self._pub = _bind(self._context, zmq.PUB, "endpoint", config.endpoint, config.hwm)
            self._replay = _make_replay(self._context, config)
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self.endpoint = _bound_endpoint(self._pub)
        self.replay_endpoint = self._replay.endpoint
        self._queue: deque[tuple[int, float, Sequence[KVEvent]]] = deque(maxlen=config.max_queue_size)
        self._num_published = 0
        self._num_taken = 0
        self._is_closing = False
        # ZeroMQ sockets belong to one thread: the engine's thread wakes it through this pair.
        self._alarm, self._bell = socket.socketpair()
        self._alarm.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()
        logger.info("KV events on %s, replay on %s", self.endpoint, self.replay_endpoint or "no socket")
        self.publish((AllBlocksCleared(),))

    def publish(self, events: Sequence[KVEvent]) -> None:
        # A full queue drops its oldest batch, whose number is then missing.
        self._queue.append((self._num_published, self._clock.wall(), events))
        self._num_published += 1
        self._wake()

    def shutdown(self) -> None:
        self._is_closing = True
        self._wake()
        self._thread.join(_JOIN_SECONDS)
        self._alarm.close()

    def _wake(self) -> None:
        # If the buffer is full, or after shutdown, the reader needs no waking.
        with contextlib.suppress(OSError):
            self._alarm.send(b"\0")

    # ---- The thread ----

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._bell, zmq.POLLIN)
        self._replay.register(poller)
        try:
            while not self._is_closing:
                if self._bell.fileno() in dict(poller.poll()):
                    self._bell.recv(_BELL_BYTES)
                self._send_waiting()
                self._replay.answer(self._topic)
            self._send_waiting()
        except zmq.ZMQError as error:
            logger.error("no further KV events are published, the engine continues: %s", error)
        finally:
            self._bell.close()
            self._context.destroy(linger=_LINGER_MS)

    def _send_waiting(self) -> None:
        while self._queue:
            number, timestamp, events = self._queue.popleft()
            if number != self._num_taken:
                logger.warning("%d batches of KV events were dropped: the queue was full", number - self._num_taken)
            self._num_taken = number + 1
            batch = (number, encode_batch(timestamp, events, self._dp_rank))
            self._pub.send_multipart(_frames(self._topic, *batch))
            self._replay.keep(batch)


class _NoReplay:
    """Keeps no batches: missed events cannot be requested again."""

    endpoint = ""

    def register(self, poller: zmq.Poller) -> None: ...

    def keep(self, batch: tuple[int, bytes]) -> None: ...

    def answer(self, topic: bytes) -> None: ...


class _Replay:
    """The latest batches, and the socket on which subscribers request them."""

    def __init__(self, router: zmq.Socket[bytes], buffer_steps: int) -> None:
        self.endpoint = _bound_endpoint(router)
        self._router = router
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)

    def register(self, poller: zmq.Poller) -> None:
        poller.register(self._router, zmq.POLLIN)

    def keep(self, batch: tuple[int, bytes]) -> None:
        self._buffer.append(batch)

    def answer(self, topic: bytes) -> None:
        """Answers one request, if there is one: frames [client, empty, number]."""
        with contextlib.suppress(zmq.Again):
            frames = self._router.recv_multipart(zmq.NOBLOCK)
            if len(frames) != 3 or len(frames[2]) != _NUMBER_BYTES:
                logger.debug("an invalid request for KV events, of %d frames", len(frames))
                return
            self._send_from(int.from_bytes(frames[2], "big"), frames[:2], topic)

    def _send_from(self, number: int, route: list[bytes], topic: bytes) -> None:
        """Sends the buffered batches to a client; one that has left, or does not read, has to ask again."""
        try:
            for batch in self._buffer:
                if batch[0] >= number:
                    self._router.send_multipart([*route, *_frames(topic, *batch)], zmq.NOBLOCK)
            self._router.send_multipart([*route, b"", _END_OF_REPLAY, b""], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            logger.debug("a replay of KV events ends early: %s", error)


def make_event_publisher(config: KVEventsConfig, dp_rank: int) -> EventPublisher:
    """Builds the configured publisher of an engine, `dp_rank` among the data parallel ones. Raises ConfigError if an
    endpoint cannot be bound.
    """
    return ZmqEventPublisher(config, dp_rank) if config.is_active else NullEventPublisher()


def _make_replay(context: zmq.Context[zmq.Socket[bytes]], config: KVEventsConfig) -> _Replay | _NoReplay:
    if config.replay_endpoint is None:
        return _NoReplay()
    # A whole replay must fit into the queue, because a ROUTER drops messages beyond it.
    router = _bind(context, zmq.ROUTER, "replay_endpoint", config.replay_endpoint, config.buffer_steps + 1)
    return _Replay(router, config.buffer_steps)


def _bind(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, key: str, endpoint: str, high_water_mark: int
) -> zmq.Socket[bytes]:
    bound = context.socket(kind)
    bound.set(zmq.SNDHWM, high_water_mark)
    bound.set(zmq.IPV6, int("[" in endpoint))
    bound.set(zmq.MAXMSGSIZE, _MAX_REQUEST_BYTES)
    if kind == zmq.ROUTER:
        bound.set(zmq.ROUTER_MANDATORY, 1)
    try:
        bound.bind(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(f"{key}={endpoint} in kv_events_config cannot be bound: {error}") from None
    return bound


def _bound_endpoint(bound: zmq.Socket[bytes]) -> str:
    return bound.get(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()  # pyright: ignore[reportAttributeAccessIssue]


def _frames(topic: bytes, number: int, payload: bytes) -> list[bytes]:
    return [topic, number.to_bytes(_NUMBER_BYTES, "big"), payload]
