"""The messages of the two sides of a `SocketsTransport` connection, in frames, with raw bytes between them.

client                          server
hello                      ->
                           <-   answer: the size of its memory
request                    ->
                           <-   answer, then the bytes
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import msgspec

from penstock.kv_transfer.transports.base import PeerId
from penstock.utils.errors import PeerError

PURPOSE = b"data"
EPOCH_BYTES = 16
RANGE_BYTES = 16
FRAME_BYTES = 4096
"""The maximum size of frames without ranges."""

_Message = TypeVar("_Message")


@dataclass(frozen=True, slots=True)
class SocketLimits:
    """The limits of what an endpoint accepts from others, and of how long it waits for them.

    At most `connections_per_peer` transfers with one peer run at once; others wait. An incoming connection beyond
    `max_connections` is closed; if `max_handshakes` connections have not introduced themselves yet, the oldest of them
    is closed for a new one. `max_runs` and `max_bytes` are limits of one transfer. `stall_seconds`: how long a peer may
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
    """`epoch` is the requested life of the server."""

    epoch: bytes


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """`refusal` is the reason if the server refuses, else empty."""

    refusal: str = ""
    num_bytes: int = 0


class Request(msgspec.Struct, frozen=True, tag="request"):
    """`ranges` of the server's memory: [n, 2] int64, little-endian, offset and bytes."""

    ranges: bytes


encode = msgspec.msgpack.encode


def decode(kind: type[_Message], payload: bytes) -> _Message:
    """Decodes a message of this kind. Raises PeerError."""
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise PeerError(f"the peer sent an invalid {kind.__name__}: {error}") from None
