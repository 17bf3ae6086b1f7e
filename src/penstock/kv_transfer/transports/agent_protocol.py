"""What two endpoints of an `AgentTransport` say to each other on their control connection.

client                          server
hello                      ->
                           <-   answer: its agent, and where that has its memory
landed, after a transfer
  with a notification      ->
end agent, after a write
  that was given up        ->
                           <-   (the connection ends, once the server's agent has)

The server closes the connection of a client that it has answered only when its agent has ended, or the client's
connection has: so the end of the connection tells that nothing which the client has written can land any more.
"""

from __future__ import annotations

import msgspec

from penstock.kv_transfer.transports.base import PeerId
from penstock.kv_transfer.transports.board import MAX_NOTIFY_BYTES
from penstock.kv_transfer.transports.helper_messages import ServedMemory
from penstock.kv_transfer.transports.socket_protocol import Landed
from penstock.utils.errors import PeerError

FRAME_BYTES = MAX_NOTIFY_BYTES + (1 << 20)


class AgentAddress(msgspec.Struct, frozen=True, tag="agent", forbid_unknown_fields=True):
    """The descriptor of one life of an endpoint, in which one agent may follow another."""

    library: str
    host: str
    port: int
    epoch: bytes

    @property
    def peer_id(self) -> PeerId:
        return f"{self.library}:{self.host}:{self.port}#{self.epoch.hex()}"


class AgentAnswer(msgspec.Struct, frozen=True, tag="agent_answer"):
    """`refusal` says why the server does not go on; it is empty if it does."""

    refusal: str = ""
    memory: ServedMemory | None = None


class EndAgent(msgspec.Struct, frozen=True, tag="end_agent"):
    """A write of the client was given up: nothing of it may land any more."""


_news = msgspec.msgpack.Decoder(Landed | EndAgent)


def decode_news(payload: bytes) -> Landed | EndAgent:
    """What a client says after its hello. Raises PeerError."""
    try:
        return _news.decode(payload)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise PeerError(f"the peer sent an invalid message: {error}") from None
