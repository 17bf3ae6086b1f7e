"""What a transport is: it moves bytes between registered memory of two engines, and tells how that ended.

Lifecycle: `register` all memory, once; exchange `descriptor()`s; `connect`; any number of `submit` and `poll`; `close`.
Threading: one thread calls a transport, but for `connect` and `disconnect`, which other threads may call too. Only
`connect`, `wait` and `close` block, each with a limit.

Addresses. The registered regions form one flat address space: a region begins where the one before it ends. What to
copy is one array of runs, [n, 3] int64: local offset, remote offset, bytes. Runs of one transfer must not overlap at
their destination.

Failure. Bytes of a transfer may land in any order and at any time from its submission on, also after it has been found
to fail: a one-sided operation is not over because one side has lost patience with it. Therefore there are two kinds of
failure. After FAILED_SETTLED nothing of the transfer can move any more. After FAILED_UNSETTLED something still can: its
destination (of a READ the local runs, of a WRITE the remote ones) must not be used for anything, and its source must
not change, until `poll` says FAILED_SETTLED. `disconnect` brings that about for everything under way to a peer, also
for what is PENDING for too long. What has landed of a transfer that failed is worth nothing; so the source of a WRITE
need not stay as it is once the transfer is no longer PENDING.

Incoming writes. `disconnect` ends what an endpoint has begun itself. An endpoint that lets peers write its memory must
be able to end that too, whatever has become of the peer: it opens a window over the ranges that it offers, a WRITE
names the window, and when the endpoint has closed it nothing lands there any more. `can_settle_incoming_writes` says
whether a transport can do this.

An implementor must not raise out of `poll`, report DONE before the last byte has landed, let bytes move after DONE or
FAILED_SETTLED, change its mind after either, or let a peer of an earlier incarnation in: a descriptor names one life of
one endpoint, and after a restart it is stale for ever.
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
    """From the peer's memory into one's own."""
    WRITE = "write"
    """From one's own memory into the peer's."""


class TransferState(enum.StrEnum):
    PENDING = "pending"
    DONE = "done"
    FAILED_SETTLED = "failed_settled"
    FAILED_UNSETTLED = "failed_unsettled"

    @property
    def is_settled(self) -> bool:
        """Nothing of the transfer moves any more."""
        return self in (TransferState.DONE, TransferState.FAILED_SETTLED)


@dataclass(frozen=True, slots=True)
class Notification:
    """What a peer attached to a transfer. It comes after the transfer's bytes; it may come twice, or never."""

    peer: PeerId
    message: bytes


class TransferHandle(Protocol):
    """One submitted transfer; opaque. It can be polled for as long as it is kept."""


class DataTransport(Protocol):
    can_settle_incoming_writes: bool
    """Whether an endpoint takes writes in its windows only, and ends them by `close_window` without its peers' help.

    It must be False where a peer moves the bytes itself, as in shared memory: a process that is stopped in the middle
    of a copy completes it when it goes on, and the owner of the memory cannot prevent it. Such a transport has no
    windows, connected peers may write anything at any time, and nothing may depend on their doing so.
    """

    def register(self, regions: Sequence[memoryview]) -> None:
        """Makes memory reachable for transfers, from here and from connected peers; it must not move until `close`.

        To be called once, before `descriptor`.
        """
        ...

    def descriptor(self) -> bytes:
        """What a peer needs to connect to this life of this endpoint."""
        ...

    def connect(self, descriptor: bytes) -> PeerId:
        """Returns the peer, connected. Idempotent. Raises PeerError when it cannot be reached or has another life."""
        ...

    def submit(
        self, operation: Operation, peer: PeerId, runs: np.ndarray, notify: bytes = b"", window: bytes = b""
    ) -> TransferHandle:
        """Begins to copy the runs, [n, 3] int64; the peer gets `notify`, if any, when all have landed.

        A WRITE names a `window` of the peer, where the peer has windows; outside of it the transfer fails, and no byte
        lands. Raises PeerError, and begins nothing, when the peer is not connected or has no such memory.
        """
        ...

    def poll(self, handle: TransferHandle) -> TransferState:
        """How the transfer stands."""
        ...

    def wait(self, handles: Sequence[TransferHandle], seconds: float) -> None:
        """Returns when the state of one of them has changed since it was last polled, or after so many seconds.

        It may return earlier.
        """
        ...

    def open_window(self, ranges: np.ndarray) -> bytes:
        """Lets peers write these ranges of one's own memory, [n, 2] int64 of offset and bytes.

        Returns the window's name, which cannot be guessed and never comes again: only the peers that it is told to can
        write there. Raises PeerError where there are no windows.
        """
        ...

    def close_window(self, name: bytes) -> None:
        """Takes no further write in the window, and ends those under way, by cutting connections if need be."""
        ...

    def is_window_closed(self, name: bytes) -> bool:
        """Whether nothing can land in the window any more; True some time after `close_window`, and then for ever."""
        ...

    def notifications(self) -> list[Notification]:
        """What peers have sent since the last call, in order of arrival."""
        ...

    def disconnect(self, peer: PeerId) -> None:
        """Gives the peer up: what is under way to it ends, in a while, as FAILED_SETTLED. `connect` makes it anew."""
        ...

    def close(self) -> None:
        """Ends everything and frees the memory: when this returns, nothing moves any more. Idempotent."""
        ...
