"""Identifies the peer of a connection: engines introduce themselves before they send anything else (sans-IO).

A connection is open once both have sent a `Hello` and neither has found a difference that matters. The producer or the
consumer handles later messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.kv_transfer.p2p.messages import VERSION, Bye, Hello, Message, Reason, Refuse, Shard
from penstock.utils.errors import PeerError

PeerKey = str
"""Names one connection."""

_HELLO_SECONDS = 5.0
_MAX_SHARDS = 1024
_MAX_ID_LENGTH = 128
MAX_REASON_LENGTH = 1000


@dataclass(frozen=True, slots=True)
class Send:
    peer: PeerKey
    message: Message


@dataclass(frozen=True, slots=True)
class Close:
    """Closes the connection when everything has been sent."""

    peer: PeerKey


@dataclass(slots=True)
class _Session:
    is_outgoing: bool
    deadline: float
    hello: Hello | None = None


class Sessions:
    """All connections of one engine. `ignored` names parts of the meaning that may differ."""

    def __init__(self, hello: Hello, ignored: frozenset[str]) -> None:
        self._hello = hello
        self._ignored = ignored
        self._sessions: dict[PeerKey, _Session] = {}
        self._actions: list[Send | Close] = []

    def hello_of(self, peer: PeerKey) -> Hello | None:
        """Returns the peer's hello, None while the connection is not open."""
        session = self._sessions.get(peer)
        return None if session is None else session.hello

    def is_outgoing(self, peer: PeerKey) -> bool:
        """Returns whether this engine made the connection: it then requests KV from the peer, otherwise the reverse."""
        return self._sessions[peer].is_outgoing

    def has(self, peer: PeerKey) -> bool:
        return peer in self._sessions

    def engines(self) -> set[str]:
        """Returns the keys of all engines with an open connection."""
        return {engine_key(session.hello) for session in self._sessions.values() if session.hello is not None}

    def on_connected(self, peer: PeerKey, is_outgoing: bool, now: float) -> None:
        self._sessions[peer] = _Session(is_outgoing, now + _HELLO_SECONDS)
        if is_outgoing:
            self._actions.append(Send(peer, self._hello))

    def on_lost(self, peer: PeerKey) -> None:
        self._sessions.pop(peer, None)

    def introduce(self, peer: PeerKey, message: Message) -> str | None:
        """Takes a message on a connection that is not open. Returns why it cannot be used, None if it can.

        Raises PeerError for anything but an introduction or a refusal.
        """
        session = self._sessions[peer]
        if isinstance(message, Refuse):
            return f"{message.reason.value.replace('_', ' ')}: {message.detail}"
        if not isinstance(message, Hello):
            raise PeerError(f"the peer began with {type(message).__name__} instead of Hello")
        if not 0 < len(message.engine_id) <= _MAX_ID_LENGTH or not message.engine_id.isprintable():
            raise PeerError("the peer's engine id is empty, too long or not printable")
        check_shards(message.shards)
        refusal = self._find_difference(message)
        if refusal is not None:
            self._actions += [Send(peer, refusal), Close(peer)]
            return refusal.detail
        session.hello = message
        if not session.is_outgoing:
            self._actions.append(Send(peer, self._hello))
        return None

    def poll(self, now: float) -> list[PeerKey]:
        """Closes connections that were not opened in time, and returns them."""
        late = [peer for peer, each in self._sessions.items() if each.hello is None and each.deadline <= now]
        self._actions += [Close(peer) for peer in late]
        return late

    @property
    def next_deadline(self) -> float | None:
        return min((each.deadline for each in self._sessions.values() if each.hello is None), default=None)

    def say_bye(self) -> None:
        """Tells all peers that this engine shuts down."""
        for peer, session in self._sessions.items():
            if session.hello is not None:
                self._actions += [Send(peer, Bye("the engine shuts down")), Close(peer)]

    def take_actions(self) -> list[Send | Close]:
        actions, self._actions = self._actions, []
        return actions

    def _find_difference(self, other: Hello) -> Refuse | None:
        if other.version != VERSION:
            detail = f"protocol version {other.version} and {VERSION}: run the same version of Penstock on both sides"
            return Refuse(None, Reason.OTHER_VERSION, detail)
        if other.transport != self._hello.transport:
            detail = f"transport {other.transport} and {self._hello.transport}: configure the same on both sides"
            return Refuse(None, Reason.OTHER_TRANSPORT, cut_reason(detail))
        different = find_differences(self._hello.meaning, other.meaning, self._ignored)
        if different:
            detail = f"engines {self._hello.engine_id} and {other.engine_id} differ in {', '.join(different)}"
            return Refuse(None, Reason.OTHER_MODEL, cut_reason(detail))
        return None


def cut_reason(reason: str) -> str:
    """Limits what goes into logs, answers and messages of a text that a peer may have chosen."""
    return reason if len(reason) <= MAX_REASON_LENGTH else f"{reason[:MAX_REASON_LENGTH]}..."


def find_differences(own: Mapping[str, str], other: Mapping[str, str], ignored: frozenset[str]) -> list[str]:
    """Returns the parts of the meaning of KV that differ, with both values."""
    names = sorted((own.keys() | other.keys()) - ignored)
    return [
        f"{name} ({own.get(name, 'none')} and {other.get(name, 'none')})"
        for name in names
        if own.get(name) != other.get(name)
    ]


def check_shards(shards: Sequence[Shard]) -> None:
    """Raises PeerError for ranks that no engine can have, so that later computations with them do not fail."""
    names = {each.shard for each in shards}
    stages = 1 + max((pp for pp, _ in names), default=-1)
    width = 1 + max((tp for _, tp in names), default=-1)
    is_whole = len(shards) == stages * width and names == {(pp, tp) for pp in range(stages) for tp in range(width)}
    if not is_whole or not 0 < len(shards) <= _MAX_SHARDS:
        raise PeerError(f"the peer's ranks are not those of an engine: {sorted(names)[:16]}")
    if len({each.layout.block_size for each in shards}) > 1:
        raise PeerError("the peer's ranks have different block sizes")


def engine_key(hello: Hello) -> str:
    """Returns a name for one life of an engine."""
    return f"{hello.engine_id}/{hello.epoch}"
