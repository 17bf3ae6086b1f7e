"""What KV transfers say between scheduler and worker: reports by identity, never by count.

Metadata and handshakes have a kind per connector (`utils.wire.register_kind`); what is absent is None.
"""

from __future__ import annotations

import enum

import msgspec

from penstock.utils.wire import OpenMessage

TransferId = str
"""Names one transfer for ever; a second attempt is another transfer."""

ShardId = tuple[int, int]
"""(pipeline rank, tensor rank) of the worker that moved its part of the KV."""


class TransferStatus(enum.StrEnum):
    DONE = "done"
    FAILED = "failed"


class BadRange(msgspec.Struct, frozen=True):
    """Tokens [start, end) of a request whose KV in that group is not what was asked for."""

    group: int
    start: int
    end: int


class TransferReport(msgspec.Struct, frozen=True):
    """A transfer has ended on one shard. `digests` are those of the blocks that it wrote into a tier, in their order.

    A failed load without `bad_ranges` has brought nothing.
    """

    transfer_id: TransferId
    shard: ShardId
    status: TransferStatus
    bad_ranges: tuple[BadRange, ...] = ()
    digests: tuple[bytes, ...] = ()


class KVConnectorOutput(msgspec.Struct, frozen=True):
    """What a rank's connector reports with a step: the transfers that have ended."""

    reports: tuple[TransferReport, ...] = ()


class KVConnectorMetadata(OpenMessage):
    """What a connector's scheduler side tells its worker sides with a step. Each connector has a kind of its own."""

    __slots__ = ()

    @property
    def has_sync_loads(self) -> bool:
        """Whether tokens of this very step attend to KV that it loads."""
        return False


class HandshakePayload(OpenMessage):
    """What one rank tells other engines of its memory; keyed (pp rank, tp rank) wherever it is collected."""

    __slots__ = ()


class ConnectorSetup(OpenMessage):
    """What a connector's scheduler side tells every worker side once, before that is built: the name of memory, say."""

    __slots__ = ()


NO_OUTPUT = KVConnectorOutput()
