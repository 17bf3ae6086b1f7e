"""The messages of two `AgentTransport` endpoints on their control connection.

client                          server
hello                      ->
                           <-   answer: its agent, and where the agent has its memory

Nothing follows. The server closes the connection when its agent has ended.
"""

from __future__ import annotations

import msgspec

from penstock.kv_transfer.transports.base import PeerId
from penstock.kv_transfer.transports.helper_messages import ServedMemory

FRAME_BYTES = 1 << 20


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
