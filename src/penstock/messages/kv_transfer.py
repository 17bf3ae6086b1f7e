"""What KV transfers say between scheduler and worker: reports by identity, never by count."""

from __future__ import annotations

import enum
from dataclasses import dataclass

TransferId = str
"""Names one transfer for ever; a second attempt is another transfer."""

ShardId = tuple[int, int]
"""(pipeline rank, tensor rank) of the worker that moved its part of the KV."""


class TransferStatus(enum.StrEnum):
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class BadRange:
    """Tokens [start, end) of a request whose KV in that group is not what was asked for."""

    group: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class TransferReport:
    """A transfer has ended on one shard. `digests` are those of the blocks that it wrote into a tier, in their order.

    A failed load without `bad_ranges` has brought nothing.
    """

    transfer_id: TransferId
    shard: ShardId
    status: TransferStatus
    bad_ranges: tuple[BadRange, ...] = ()
    digests: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class KVConnectorOutput:
    """What a rank's connector has to say about a step: the transfers that have ended."""

    reports: tuple[TransferReport, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not self.reports


@dataclass(frozen=True, slots=True)
class KVConnectorMetadata:
    """What the scheduler's part of a connector tells the workers' parts with a step. Each connector has its own."""

    @property
    def has_sync_loads(self) -> bool:
        """Whether tokens of this very step attend to KV that it loads."""
        return False


NO_OUTPUT = KVConnectorOutput()
NO_METADATA = KVConnectorMetadata()


@dataclass(frozen=True, slots=True)
class HandshakePayload:
    """What one rank tells other engines of its memory; keyed (pp rank, tp rank) wherever it is collected."""
