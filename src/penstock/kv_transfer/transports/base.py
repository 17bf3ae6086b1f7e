"""The contract of a transport: it reads registered memory of another engine, and reports how that ended.

Lifecycle: `register` all memory, once; exchange `descriptor()`s; `connect`; any number of `submit` and `poll`; `close`.
Threading: one thread calls a transport, except for `connect` and `disconnect`, which other threads may call too. Only
`connect`, `wait` and `close` block, each with a limit.

Addresses. The registered regions form one flat address space: a region begins where the one before it ends. The copies
of a transfer, from the peer's memory to local memory, are one array of runs, [n, 3] int64: local offset, remote offset,
bytes. Runs of one transfer must not overlap in local memory.

Failure. Bytes of a transfer may land in any order and at any time after its submission, even after it is known to have
failed: a one-sided read does not end because one side stops waiting for it. Therefore there are two kinds of failure.
After FAILED_SETTLED nothing of the transfer can move any more. After FAILED_UNSETTLED something still can: its local
runs must not be used for anything until `poll` returns FAILED_SETTLED. `disconnect` brings that about for all transfers
in progress with a peer, also for those that are PENDING for too long. Bytes that have landed from a failed transfer are
unusable.

An implementation must not raise in `poll`, report DONE before the last byte has landed, let bytes move or the state
change after DONE or FAILED_SETTLED, or connect by an outdated descriptor: a descriptor names one life of one endpoint,
and is never valid again after a restart.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Protocol

import numpy as np

PeerId = str
"""Names a connected peer in this transport."""


class TransferState(enum.StrEnum):
    PENDING = "pending"
    DONE = "done"
    FAILED_SETTLED = "failed_settled"
    FAILED_UNSETTLED = "failed_unsettled"

    @property
    def is_settled(self) -> bool:
        """Returns whether nothing of the transfer moves any more."""
        return self in (TransferState.DONE, TransferState.FAILED_SETTLED)


class TransferHandle(Protocol):
    """One submitted transfer; opaque. It can be polled for as long as it is kept."""


class DataTransport(Protocol):
    def register(self, regions: Sequence[memoryview]) -> None:
        """Makes memory reachable for reads into it, and by peers; it must not move until `close`.

        Called once, before `descriptor`.
        """
        ...

    def descriptor(self) -> bytes:
        """Returns what a peer needs to connect to this life of this endpoint."""
        ...

    def connect(self, descriptor: bytes) -> PeerId:
        """Connects to a peer. Idempotent. Raises PeerError if it cannot be reached or has been restarted."""
        ...

    def submit(self, peer: PeerId, runs: np.ndarray) -> TransferHandle:
        """Begins to read the runs, [n, 3] int64.

        Raises PeerError, and begins nothing, if the peer is not connected or has no such memory.
        """
        ...

    def poll(self, handle: TransferHandle) -> TransferState:
        """Returns the state of the transfer."""
        ...

    def wait(self, handles: Sequence[TransferHandle], seconds: float) -> None:
        """Returns when the state of one of them has changed since it was last polled, or after this many seconds.

        It may return earlier.
        """
        ...

    def disconnect(self, peer: PeerId) -> None:
        """Gives the peer up: its transfers eventually become FAILED_SETTLED. A later `connect` connects again."""
        ...

    def close(self) -> None:
        """Ends everything and frees the memory: when this returns, nothing moves any more. Idempotent."""
        ...
