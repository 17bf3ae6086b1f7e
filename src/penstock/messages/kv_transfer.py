"""Messages about KV transfers between scheduler and worker: transfers are identified, never counted.

Metadata and handshakes have a kind per connector (`utils.wire.register_kind`); absent values are None.
"""

from __future__ import annotations

import enum

import msgspec

from penstock.utils.wire import OpenMessage


class TransferId(msgspec.Struct, frozen=True, cache_hash=True, array_like=True):
    """Names one transfer and is never reused; a second attempt is another transfer.

    `number` is that of the request, which unlike its id is never reused; a transfer that belongs to no single request
    has no `request`. `part` is 0 for the request as a whole, as other engines know it; otherwise it counts loads, or
    pieces that are digested. `epoch` is the life of the engine, in messages between its processes, and `child` is the
    child of a MultiConnector that reports.
    """

    request: str
    number: int
    part: int = 0
    epoch: str = ""
    child: str = ""

    def __str__(self) -> str:
        return f"{self.request or 'transfer'}#{self.number}.{self.part}"


ShardId = tuple[int, int]
"""(pipeline rank, tensor rank) of the worker that moved its part of the KV."""


class TransferStatus(enum.StrEnum):
    DONE = "done"
    FAILED = "failed"


class BadRange(msgspec.Struct, frozen=True):
    """Tokens [start, end) of a request whose KV in that group was not loaded correctly."""

    group: int
    start: int
    end: int


class TransferReport(msgspec.Struct, frozen=True):
    """A transfer has ended on one shard. `digests` are those of the blocks that it wrote into a tier, in order. A
    failed load without `bad_ranges` has loaded nothing.
    """

    transfer_id: TransferId
    shard: ShardId
    status: TransferStatus
    bad_ranges: tuple[BadRange, ...] = ()
    digests: tuple[bytes, ...] = ()


class KVConnectorOutput(msgspec.Struct, frozen=True):
    """A rank's connector's report for a step: the transfers that have ended."""

    reports: tuple[TransferReport, ...] = ()


class KVConnectorMetadata(OpenMessage):
    """A connector's message from its scheduler side to its worker sides with a step. Each connector has its own
    kind.
    """

    __slots__ = ()

    @property
    def has_sync_loads(self) -> bool:
        """Whether tokens of this very step attend to KV that it loads."""
        return False


class HandshakePayload(OpenMessage):
    """One rank's description of its memory for other engines; collections are keyed by (pp rank, tp rank)."""

    __slots__ = ()


class ConnectorSetup(OpenMessage):
    """Data from a connector's scheduler side for building its worker sides, such as the name of memory."""

    __slots__ = ()


NO_OUTPUT = KVConnectorOutput()
