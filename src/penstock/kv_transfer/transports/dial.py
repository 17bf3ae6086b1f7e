"""Connects to one life of a peer's endpoint."""

from __future__ import annotations

import socket
from typing import Protocol, TypeVar

from penstock.kv_transfer.transports.base import PeerId
from penstock.kv_transfer.transports.socket_protocol import FRAME_BYTES, PURPOSE, Hello, decode, encode
from penstock.kv_transfer.transports.stream import Stream
from penstock.utils.errors import PeerError


class PeerAddress(Protocol):
    """The common part of the descriptors `Address` and `AgentAddress`."""

    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def epoch(self) -> bytes: ...
    @property
    def peer_id(self) -> PeerId: ...


class PeerAnswer(Protocol):
    """A server's answer to a hello; `refusal` is empty if the server accepts the connection."""

    @property
    def refusal(self) -> str: ...


_Answer = TypeVar("_Answer", bound=PeerAnswer)


def dial(
    address: PeerAddress,
    kind: type[_Answer],
    key: bytes,
    seconds: float,
    max_frame_bytes: int = FRAME_BYTES,
) -> tuple[Stream, _Answer]:
    """Returns an authenticated connection, and the server's answer, of type `kind`, to this endpoint's hello.

    `seconds` is the time limit of each step. Raises PeerError, also if the peer refuses the connection.
    """
    try:
        connection = socket.create_connection((address.host, address.port), seconds)
    except (OSError, ValueError, OverflowError) as error:
        raise PeerError(f"{address.peer_id} cannot be reached: {error}") from error
    try:
        stream = Stream(connection, seconds)
    except OSError as error:
        connection.close()
        raise PeerError(f"{address.peer_id} has ended the connection: {error}") from error
    try:
        stream.authenticate(key, True, PURPOSE, seconds, max_frame_bytes)
        stream.send(encode(Hello(address.epoch)))
        answer = decode(kind, stream.receive())
        if answer.refusal:
            raise PeerError(f"{address.peer_id} refuses the connection: {answer.refusal}")
    except PeerError:
        stream.close()
        raise
    return stream, answer
