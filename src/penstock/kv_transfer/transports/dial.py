"""Opening a connection to one life of a peer's endpoint."""

from __future__ import annotations

import socket
from typing import Protocol, TypeVar

from penstock.kv_transfer.transports.base import PeerId
from penstock.kv_transfer.transports.socket_protocol import FRAME_BYTES, PURPOSE, Hello, decode, encode
from penstock.kv_transfer.transports.stream import Stream
from penstock.utils.errors import PeerError


class PeerAddress(Protocol):
    """The part that the descriptors of `Address` and `AgentAddress` share."""

    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def epoch(self) -> bytes: ...
    @property
    def peer_id(self) -> PeerId: ...


class PeerAnswer(Protocol):
    """What a server answers to a hello; `refusal` is empty if it goes on."""

    @property
    def refusal(self) -> str: ...


_Answer = TypeVar("_Answer", bound=PeerAnswer)


def dial(
    address: PeerAddress,
    kind: type[_Answer],
    sender: PeerId,
    key: bytes,
    seconds: float,
    max_frame_bytes: int = FRAME_BYTES,
) -> tuple[Stream, _Answer]:
    """An authenticated connection, and the server's answer, of type `kind`, to the hello of the endpoint `sender`.

    `seconds` is the time that the peer has for each step. Raises PeerError, also when the peer refuses.
    """
    try:
        connection = socket.create_connection((address.host, address.port), seconds)
    except (OSError, ValueError, OverflowError) as error:
        raise PeerError(f"{address.peer_id} cannot be reached: {error}") from error
    stream = Stream(connection, seconds)
    try:
        stream.authenticate(key, True, PURPOSE, seconds, max_frame_bytes)
        stream.send(encode(Hello(address.epoch, sender)))
        answer = decode(kind, stream.receive())
        if answer.refusal:
            raise PeerError(f"{address.peer_id} refuses the connection: {answer.refusal}")
    except PeerError:
        stream.close()
        raise
    return stream, answer
