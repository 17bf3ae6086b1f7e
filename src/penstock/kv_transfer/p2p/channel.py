"""The contract of authenticated connections between engine cores.

Any thread submits messages; no call blocks. A thread of the channel passes events, and the time set by `wake_at`, to
the handler.

Failure: a connection that cannot be made, is not authenticated in time, breaks, carries an invalid message, or a
message that the handler cannot process, ends as `Lost`, or only in the log if it was incoming and never authenticated.
Nothing else is affected.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.kv_transfer.p2p.messages import Message
from penstock.kv_transfer.p2p.params import Address
from penstock.kv_transfer.p2p.session import PeerKey


@dataclass(frozen=True, slots=True)
class Connected:
    """Both ends have proved that they have the cluster key."""

    peer: PeerKey
    is_outgoing: bool


@dataclass(frozen=True, slots=True)
class Received:
    peer: PeerKey
    message: Message


@dataclass(frozen=True, slots=True)
class Lost:
    """The connection is gone; nothing more comes from it."""

    peer: PeerKey
    reason: str


ChannelEvent = Connected | Received | Lost


class ChannelHandler(Protocol):
    """Takes events, in order, and the time. The channel's thread calls it; a call must not block."""

    def on_event(self, event: ChannelEvent) -> None: ...

    def on_time(self) -> None: ...


class Channel(Protocol):
    """The scheduler side's interface to the connections."""

    address: Address

    def answer_queries(self, answer: Mapping[str, Any]) -> None:
        """Sets the JSON that `GET /query` returns; until then the answer is 503."""
        ...

    def dial(self, address: Address) -> PeerKey:
        """Begins to connect; the result arrives as an event."""
        ...

    def send(self, peer: PeerKey, message: Message) -> None: ...

    def hang_up(self, peer: PeerKey) -> None:
        """Closes the connection when everything has been sent. No event follows."""
        ...

    def wake_at(self, when: float | None) -> None:
        """Calls `on_time` at this time of the clock. Replaces the time of the last call."""
        ...

    def start(self, handler: ChannelHandler) -> None:
        """Begins to pass events to the handler, first those that have occurred."""
        ...

    def check(self) -> None:
        """Raises RuntimeError if the channel has ended because of a bug."""
        ...

    def close(self) -> None: ...
