"""The contract of a transport: it moves bytes between registered memory of two engines, and reports how that ended.

Lifecycle: `register` all memory, once; exchange `descriptor()`s; `connect`; any number of `submit` and `poll`; `close`.
Threading: one thread calls a transport, except for `connect` and `disconnect`, which other threads may call too. Only
`connect`, `wait` and `close` block, each with a limit.

Addresses. The registered regions form one flat address space: a region begins where the one before it ends. The copies
of a transfer are one array of runs, [n, 3] int64: local offset, remote offset, bytes. Runs of one transfer must not
overlap at their destination.

Failure. Bytes of a transfer may land in any order and at any time after its submission, even after it is known to have
failed: a one-sided operation does not end because one side stops waiting for it. Therefore there are two kinds of
failure. After FAILED_SETTLED nothing of the transfer can move any more. After FAILED_UNSETTLED something still can: its
destination (the local runs of a READ, the remote ones of a WRITE) must not be used for anything until `poll` returns
FAILED_SETTLED. `disconnect` brings that about for all transfers in progress with a peer, also for those that are
PENDING for too long. Bytes that have landed from a failed transfer are unusable, so the source of a WRITE may change
once the transfer is no longer PENDING.

Incoming writes. `disconnect` ends the transfers that an endpoint has begun itself. An endpoint that lets peers write
its memory must be able to end their writes too, whatever the state of the peer: it opens a window over the ranges that
it offers, a WRITE names the window, and when the endpoint has closed it nothing lands there any more.
`can_settle_incoming_writes` states whether a transport can do this.

An implementation must not raise in `poll`, report DONE before the last byte has landed, let bytes move or the state
change after DONE or FAILED_SETTLED, or connect by an outdated descriptor: a descriptor names one life of one endpoint,
and is never valid again after a restart.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

PeerId = str
"""Names a connected peer in this transport."""


class Operation(enum.StrEnum):
    READ = "read"
    """Moves bytes from the peer's memory to local memory."""
    WRITE = "write"
    """Moves bytes from local memory to the peer's memory."""


class TransferState(enum.StrEnum):
    PENDING = "pending"
    DONE = "done"
    FAILED_SETTLED = "failed_settled"
    FAILED_UNSETTLED = "failed_unsettled"

    @property
    def is_settled(self) -> bool:
        """Returns whether nothing of the transfer moves any more."""
        return self in (TransferState.DONE, TransferState.FAILED_SETTLED)


@dataclass(frozen=True, slots=True)
class Notification:
    """A message that a peer attached to a transfer. It arrives after the bytes; it may arrive twice, or never."""

    peer: PeerId
    message: bytes


class TransferHandle(Protocol):
    """One submitted transfer; opaque. It can be polled for as long as it is kept."""


class DataTransport(Protocol):
    can_settle_incoming_writes: bool
    """Whether an endpoint accepts writes only in its windows, and ends them by `close_window` without its peers' help.

    It must be False if a peer moves the bytes itself, as in shared memory: a process that is stopped in the middle of a
    copy completes it when it continues, and the owner of the memory cannot prevent it. Such a transport has no windows,
    connected peers may write anything at any time, and nothing may depend on such writes.
    """

    def register(self, regions: Sequence[memoryview]) -> None:
        """Makes memory reachable for transfers of this endpoint and of peers; it must not move until `close`.

        Called once, before `descriptor`.
        """
        ...

    def descriptor(self) -> bytes:
        """Returns what a peer needs to connect to this life of this endpoint."""
        ...

    def connect(self, descriptor: bytes) -> PeerId:
        """Connects to a peer. Idempotent. Raises PeerError if it cannot be reached or has been restarted."""
        ...

    def submit(
        self, operation: Operation, peer: PeerId, runs: np.ndarray, notify: bytes = b"", window: bytes = b""
    ) -> TransferHandle:
        """Begins to copy the runs, [n, 3] int64; the peer gets `notify`, if any, when all have landed.

        A WRITE names a `window` of the peer, if the peer has windows; outside of it the transfer fails and no byte
        lands. Raises PeerError, and begins nothing, if the peer is not connected or has no such memory.
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

    def open_window(self, ranges: np.ndarray) -> bytes:
        """Lets peers write these ranges of local memory, [n, 2] int64 of offset and bytes.

        Returns the window's name, which cannot be guessed and is never reused: only peers that received the name can
        write there. Raises PeerError if the transport has no windows.
        """
        ...

    def close_window(self, name: bytes) -> None:
        """Accepts no further writes in the window, and ends those in progress, by cutting connections if necessary."""
        ...

    def is_window_closed(self, name: bytes) -> bool:
        """Returns whether nothing can land in the window any more: True some time after `close_window`, then always."""
        ...

    def notifications(self) -> list[Notification]:
        """Returns what peers have sent since the last call, in order of arrival."""
        ...

    def disconnect(self, peer: PeerId) -> None:
        """Gives the peer up: its transfers eventually become FAILED_SETTLED. A later `connect` connects again."""
        ...

    def close(self) -> None:
        """Ends everything and frees the memory: when this returns, nothing moves any more. Idempotent."""
        ...
