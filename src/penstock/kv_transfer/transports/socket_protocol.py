"""The connections between endpoints: their limits, their first messages, and how one is made.

client                          server
hello                      ->
                           <-   answer

What follows depends on the transport. Both sides authenticate themselves before, and messages are sealed.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Annotated, Protocol, TypeVar

import msgspec

from penstock.kv_transfer.transports.base import PeerId
from penstock.kv_transfer.transports.stream import Stream
from penstock.utils.errors import PeerError

PURPOSE = b"data"
EPOCH_BYTES = 16
FRAME_BYTES = 1 << 20
"""The maximum size of the first messages."""

_Message = TypeVar("_Message")
_Answer = TypeVar("_Answer", bound="Answer")


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


class PeerAddress(Protocol):
    """The descriptor of one life of an endpoint."""

    @property
    def epoch(self) -> bytes: ...
    @property
    def peer_id(self) -> PeerId: ...
    def reach(self, seconds: float) -> socket.socket:
        """Returns a connection to it. Raises OSError, ValueError or OverflowError."""
        ...


class Address(msgspec.Struct, frozen=True, tag="sockets", forbid_unknown_fields=True):
    """The address of an endpoint that listens on a TCP port."""

    host: str
    port: int
    epoch: bytes

    @property
    def peer_id(self) -> PeerId:
        return f"{self.host}:{self.port}#{self.epoch.hex()}"

    def reach(self, seconds: float) -> socket.socket:
        return socket.create_connection((self.host, self.port), seconds)


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """`epoch` is the requested life of the server."""

    epoch: bytes


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """`refusal` is the reason if the server refuses, else empty. `num_bytes` is the size of its memory."""

    refusal: str = ""
    num_bytes: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)] = 0


encode = msgspec.msgpack.encode


def decode(kind: type[_Message], payload: bytes) -> _Message:
    """Decodes a message of this kind. Raises PeerError."""
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise PeerError(f"the peer sent an invalid {kind.__name__}: {error}") from None


def dial(address: PeerAddress, kind: type[_Answer], key: bytes, seconds: float) -> tuple[Stream, _Answer]:
    """Returns an authenticated connection, and the server's answer, of type `kind`, to this endpoint's hello.

    `seconds` is the time limit of each step. Raises PeerError, also if the peer refuses the connection.
    """
    try:
        connection = address.reach(seconds)
    except (OSError, ValueError, OverflowError) as error:
        raise PeerError(f"{address.peer_id} cannot be reached: {error}") from error
    try:
        stream = Stream(connection, seconds)
    except OSError as error:
        connection.close()
        raise PeerError(f"{address.peer_id} has ended the connection: {error}") from error
    try:
        stream.authenticate(key, True, PURPOSE, seconds, FRAME_BYTES)
        stream.send(encode(Hello(address.epoch)))
        answer = decode(kind, stream.receive())
        if answer.refusal:
            raise PeerError(f"{address.peer_id} refuses the connection: {answer.refusal}")
    except PeerError:
        stream.close()
        raise
    return stream, answer
