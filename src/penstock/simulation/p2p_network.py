"""The control channels of a world: connections between engine cores on the manual clock, which break and hang.

Messages are encoded and decoded with the production codec. Within a connection they keep their order; a connection that
breaks loses messages in flight, and its two ends are notified at different times, if they still exist.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from math import isnan
from typing import Any

from penstock.kv_transfer.p2p.channel import ChannelEvent, ChannelHandler, Connected, Lost, Received
from penstock.kv_transfer.p2p.messages import CODEC, Message
from penstock.kv_transfer.p2p.params import Address
from penstock.kv_transfer.p2p.session import PeerKey
from penstock.simulation.backing import BackingContext
from penstock.utils.clock import ManualClock
from penstock.utils.errors import WireError
from penstock.utils.wire import FrameReader

OPEN_SECONDS = 1.0
_RETRY_SECONDS = 0.02
_MAX_LATE_NEWS = 0.3


@dataclass(slots=True, eq=False)
class _End:
    """One side of a connection. `latest`: messages sent to it from now on arrive no earlier than this."""

    channel: SimChannel
    peer: PeerKey
    is_outgoing: bool
    latest: float = 0.0
    is_over: bool = False
    is_cut: bool = False
    reader: FrameReader = field(default_factory=lambda: FrameReader(CODEC))
    other: _End | None = None


class SimNetwork:
    """`rng` draws the faults of connections and messages; they end with the faults of the world."""

    def __init__(self, context: BackingContext, rng: random.Random) -> None:
        self.clock: ManualClock = context.clock
        self._context = context
        self._faults = context.setup.faults
        self._rng = rng
        self._channels: dict[Address, SimChannel] = {}
        self._partitions: dict[frozenset[str], float] = {}
        self._stopped: dict[str, float] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count(1)
        self.counts = {"connections_broken": 0, "connections_refused": 0, "partitions": 0, "stops": 0, "messages": 0}

    def open(self, name: str, address: Address) -> SimChannel:
        """A new life of the engine `name` starts to listen."""
        assert address not in self._channels, f"{address} is in use"
        self._channels[address] = SimChannel(self, name, address)
        return self._channels[address]

    def crash(self, channel: SimChannel) -> None:
        """The channel's process has died; its peers are notified after some time."""
        del self._channels[channel.address]
        for end in list(channel.ends.values()):
            end.is_over = True
            if end.other is not None:
                self._cut(end)
        channel.ends.clear()

    def stop(self, name: str, seconds: float) -> None:
        """Stops the process for this long; messages sent to it are not lost."""
        self.counts["stops"] += 1
        self._stopped[name] = self.clock.now() + seconds

    def is_stopped(self, name: str) -> bool:
        return self._context.has_faults and self._stopped.get(name, 0.0) > self.clock.now()

    def partition(self, one: str, other: str, seconds: float) -> None:
        """Delays messages between the two engines for this long."""
        self.counts["partitions"] += 1
        self._partitions[frozenset((one, other))] = self.clock.now() + seconds

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is in flight, and nothing waits for a process that is stopped."""
        return not (self._events or any(each.events and self.is_stopped(each.name) for each in self._channels.values()))

    def run(self) -> None:
        """Executes all events that are due, and lets the processes that are not stopped receive theirs."""
        while self._events and self._events[0][0] <= self.clock.now():
            heapq.heappop(self._events)[2]()
        for channel in list(self._channels.values()):
            if not self.is_stopped(channel.name):
                channel.deliver()

    # ---- Requests by channels ----

    def dial(self, channel: SimChannel, peer: PeerKey, address: Address) -> None:
        end = _End(channel, peer, is_outgoing=True)
        channel.ends[peer] = end
        self._at(self.clock.now() + self._delay(), lambda: self._connect(end, address, self.clock.now() + OPEN_SECONDS))

    def send(self, end: _End, message: Message) -> None:
        data = CODEC.encode(message)
        if end.is_over or end.is_cut or end.other is None:
            return
        self.counts["messages"] += 1
        target, arrival = end.other, self._arrival(end.other)
        is_broken = self._context.has_faults and self._rng.random() < self._faults.broken
        how_far = self._rng.choice((0, self._rng.randrange(len(data)), len(data))) if is_broken else len(data)
        self._at(arrival, lambda: self._deliver(target, data[:how_far]))
        if is_broken:
            self._at(arrival, lambda: self._cut(target))

    def hang_up(self, end: _End) -> None:
        """Closes the connection; the other end is notified after all messages already sent."""
        end.is_over = True
        target = end.other
        if target is not None and not end.is_cut:
            self._at(self._arrival(target), lambda: self._lose(target, "the peer has closed the connection"))

    # ---- Events ----

    def _connect(self, end: _End, address: Address, deadline: float) -> None:
        target = self._channels.get(address)
        if end.is_over:
            return
        if target is None or (self._context.has_faults and self._rng.random() < self._faults.refused):
            self.counts["connections_refused"] += 1
            self._lose(end, "connection refused")
            return
        if self._is_hanging(end.channel, target) > self.clock.now() or self.is_stopped(target.name):
            if self.clock.now() >= deadline:
                self._lose(end, f"no connection within {OPEN_SECONDS:g} seconds")
            else:
                self._at(self.clock.now() + _RETRY_SECONDS, lambda: self._connect(end, address, deadline))
            return
        other = _End(target, target.next_key(f"{end.channel.name}#in"), is_outgoing=False, other=end)
        end.other = other
        target.ends[other.peer] = other
        for each in (end, other):
            self._at(self._arrival(each), lambda each=each: self._put(each, Connected(each.peer, each.is_outgoing)))

    def _deliver(self, end: _End, data: bytes) -> None:
        try:
            for message in end.reader.feed(data):
                self._put(end, Received(end.peer, message))
        except WireError as error:
            self._lose(end, str(error))
            self._cut(end)

    def _put(self, end: _End, event: ChannelEvent) -> None:
        if not end.is_over:
            end.channel.events.append(event)

    def _lose(self, end: _End, reason: str) -> None:
        if not end.is_over:
            end.is_over = True
            end.channel.ends.pop(end.peer, None)
            end.channel.events.append(Lost(end.peer, reason))

    def _cut(self, end: _End) -> None:
        """Breaks the connection. Each end is notified some time later, and receives nothing sent from now on."""
        assert end.other is not None
        if end.is_cut:
            return
        self.counts["connections_broken"] += 1
        for each in (end, end.other):
            each.is_cut = True
            late = self._rng.choice((0.0, self._rng.uniform(0.0, _MAX_LATE_NEWS if self._context.has_faults else 0.01)))
            self._at(self.clock.now() + late, lambda each=each: self._lose(each, "the connection is broken"))

    def _is_hanging(self, one: SimChannel, other: SimChannel) -> float:
        """Returns until when messages between the two are delayed."""
        return self._partitions.get(frozenset((one.name, other.name)), 0.0) if self._context.has_faults else 0.0

    def _arrival(self, end: _End) -> float:
        """Returns when a message sent now to this end arrives."""
        assert end.other is not None
        now = self.clock.now()
        end.latest = max(end.latest, now + self._delay(), self._is_hanging(end.channel, end.other.channel))
        return end.latest

    def _delay(self) -> float:
        is_slow = self._context.has_faults and self._rng.random() < self._faults.slow_messages
        return self._rng.uniform(0.0, self._faults.max_delay if is_slow else 0.004)

    def _at(self, time: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), action))


class SimChannel:
    """One life of one engine's end of the network (`Channel`)."""

    def __init__(self, network: SimNetwork, name: str, address: Address) -> None:
        self.name = name
        self.address = address
        self.ends: dict[PeerKey, _End] = {}
        self.events: deque[ChannelEvent] = deque()
        self._network = network
        self._num_keys = 0
        self._handler: ChannelHandler | None = None
        self._wake_time: float | None = None
        self._last_alarm: float | None = None

    def next_key(self, prefix: str) -> PeerKey:
        self._num_keys += 1
        return f"{prefix}{self._num_keys}"

    def answer_queries(self, answer: Mapping[str, Any]) -> None: ...

    def dial(self, address: Address) -> PeerKey:
        peer = self.next_key(f"{address[0]}:{address[1]}#")
        self._network.dial(self, peer, address)
        return peer

    def send(self, peer: PeerKey, message: Message) -> None:
        end = self.ends.get(peer)
        if end is not None:
            self._network.send(end, message)

    def hang_up(self, peer: PeerKey) -> None:
        end = self.ends.pop(peer, None)
        if end is not None:
            self._network.hang_up(end)

    def start(self, handler: ChannelHandler) -> None:
        self._handler = handler

    def check(self) -> None: ...

    def wake_at(self, when: float | None) -> None:
        assert when is None or not isnan(when), f"{self.name} wants to be woken at {when}"
        self._wake_time = when

    def take(self) -> list[ChannelEvent]:
        """Returns the events, for an engine without a handler."""
        events = list(self.events)
        self.events.clear()
        return events

    def deliver(self) -> None:
        """Passes on what the thread of the connections would."""
        if self._handler is None:
            return
        while self.events:
            self._handler.on_event(self.events.popleft())
        while self._wake_time is not None and self._wake_time <= self._network.clock.now():
            assert self._wake_time != self._last_alarm, f"{self.name} is woken repeatedly for {self._wake_time}"
            self._last_alarm, self._wake_time = self._wake_time, None
            self._handler.on_time()

    def close(self) -> None: ...
