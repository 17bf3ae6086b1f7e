"""The messages of two `AgentTransport` endpoints on their control connection.

client                          server
hello                      ->
                           <-   answer: its agent, and where the agent has its memory
landed, after a transfer
  with a notification      ->
end agent, after a write
  that was given up        ->
                           <-   (the connection ends, once the server's agent has)

After its answer, the server closes the connection only when its agent or the client's end of the connection has ended:
so the end of the connection proves that nothing that the client has written can land any more.
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
    """`refusal` is the reason if the server refuses the connection, else empty."""

    refusal: str = ""
    memory: ServedMemory | None = None


class EndAgent(msgspec.Struct, frozen=True, tag="end_agent"):
    """The client has given up a write: nothing of it may land any more."""


_news = msgspec.msgpack.Decoder(Landed | EndAgent)


def decode_news(payload: bytes) -> Landed | EndAgent:
    """Decodes a client's message after its hello. Raises PeerError."""
    try:
        return _news.decode(payload)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise PeerError(f"the peer sent an invalid message: {error}") from None
