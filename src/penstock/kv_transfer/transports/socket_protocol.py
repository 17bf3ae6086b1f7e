"""What the two sides of a `SocketsTransport` connection say to each other: frames of these, and raw bytes between them.

client                          server
hello                      ->
                           <-   answer: the size of its memory
request READ               ->
                           <-   answer, then the bytes
landed, if there is
  a notification           ->
request WRITE              ->
                           <-   answer
the bytes                  ->
                           <-   answer: they have landed
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import msgspec

from penstock.kv_transfer.transports.base import Operation, PeerId
from penstock.kv_transfer.transports.board import MAX_NOTIFY_BYTES
from penstock.utils.errors import PeerError

PURPOSE = b"data"
EPOCH_BYTES = 16
RANGE_BYTES = 16
FRAME_BYTES = MAX_NOTIFY_BYTES + 4096
"""The limit of frames without ranges."""

_Message = TypeVar("_Message")


@dataclass(frozen=True, slots=True)
class SocketLimits:
    """What an endpoint takes from others, and how long it waits for them.

    `connections_per_peer` transfers to one peer are under way at once, the others wait. An incoming connection beyond
    `max_connections` is closed; when `max_handshakes` have not authenticated themselves yet, the oldest of them is
    closed for a new one. `max_runs` and `max_bytes` are limits of one transfer. `stall_seconds`: so long may a peer
    move no byte while it is its turn.
    """

    connections_per_peer: int = 2
    max_connections: int = 128
    max_handshakes: int = 32
    max_runs: int = 1 << 20
    max_bytes: int = 1 << 40
    connect_seconds: float = 5.0
    stall_seconds: float = 30.0


class Address(msgspec.Struct, frozen=True, tag="sockets", forbid_unknown_fields=True):
    """The descriptor of one life of an endpoint."""

    host: str
    port: int
    epoch: bytes

    @property
    def peer_id(self) -> PeerId:
        return f"{self.host}:{self.port}#{self.epoch.hex()}"


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """`epoch` is the life of the server that is wanted; `sender` names the client."""

    epoch: bytes
    sender: str


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """`refusal` says why the server does not go on; it is empty if it does."""

    refusal: str = ""
    num_bytes: int = 0


class Request(msgspec.Struct, frozen=True, tag="request"):
    """`ranges` of the server's memory: [n, 2] int64, little-endian, offset and bytes; a WRITE's are in a `window`."""

    operation: Operation
    ranges: bytes
    notify: bytes
    window: bytes = b""


class Landed(msgspec.Struct, frozen=True, tag="landed"):
    notify: bytes


_requests = msgspec.msgpack.Decoder(Request | Landed)

encode = msgspec.msgpack.encode


def decode(kind: type[_Message], payload: bytes) -> _Message:
    """Raises PeerError."""
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise PeerError(f"the peer sent an invalid {kind.__name__}: {error}") from None


def decode_request(payload: bytes) -> Request | Landed:
    """Raises PeerError."""
    try:
        return _requests.decode(payload)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise PeerError(f"the peer sent an invalid request: {error}") from None
