"""The interface of a tier below the CPU tier.

Purpose: to keep copies of chunks on a slower medium. A tier is best-effort: it may refuse or drop anything at any time,
and the worst consequence is that tokens are recomputed.

Lifecycle: fully built; then `submit_store`, `submit_load` and `get_finished_jobs` for as long as the engine lives; then
`shutdown`, after which nothing is called. An accepted job ends exactly once, in `get_finished_jobs`. Until then the
tier may read the chunks of a store and write the chunks of a load; afterwards it never touches them again. A key is
successful only if the tier has verified every byte; the chunks of other keys have undefined content.

Threading: every method is called on the scheduler's thread, and only `drain_jobs` and `shutdown` may block. A tier
moves bytes on its own threads, which are not visible outside.

Failure: no method raises for external errors (a full disk, a lost peer, a damaged file). The error is counted in
`stats`, logged once per kind, and the keys are reported as not successful. A key whose load failed is found by the next
`lookup` only if a later load may succeed.

Implementors must not use a job's chunks after its end, call back into the manager, or have unbounded queues.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.kv_transfer.offload import OffloadKey


@dataclass(frozen=True, slots=True)
class TransferJob:
    """A transfer of chunks between the CPU tier and another: `keys[i]` is stored, or to be stored, in `chunk_ids[i]`.

    `digests[i]` was made by the producer of the bytes, None if its attestation does not cover the key. A tier stores it
    with the bytes and returns it, and verifies its stored bytes by its own means. A load has only None.
    """

    job_id: int
    keys: tuple[OffloadKey, ...]
    chunk_ids: tuple[int, ...]
    digests: tuple[bytes | None, ...]
    is_promotion: bool

    def __post_init__(self) -> None:
        assert len(self.keys) == len(self.chunk_ids) == len(self.digests), self


@dataclass(frozen=True, slots=True)
class JobResult:
    """The result of a job. Some of its keys may be successful and others not.

    `digests[i]` is the digest submitted by the job that stored `successful_keys[i]`. `seconds` is the time from the
    job's submission to its end, and `num_bytes` the payload of the successful keys.
    """

    job_id: int
    successful_keys: tuple[OffloadKey, ...]
    digests: tuple[bytes | None, ...]
    is_promotion: bool
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class TierStats:
    """Counters in chunks, except the bytes; `num_chunks` and `num_queued` are current values."""

    medium: str
    num_chunks: int = 0
    num_queued: int = 0
    num_stored: int = 0
    num_loaded: int = 0
    num_bytes_stored: int = 0
    num_bytes_loaded: int = 0
    num_evicted: int = 0
    num_refused: int = 0
    num_failed: int = 0
    num_vanished: int = 0
    num_corrupted: int = 0


@dataclass(frozen=True, slots=True)
class OffloadEvent:
    """`key` can be found on `medium` from now on, or no longer."""

    key: OffloadKey
    medium: str
    is_stored: bool


class EventLog:
    """Keys added to and removed from one medium since the last call.

    Only the net change is kept, so an unread log stays as small as the set of keys: a key that was added and removed in
    between has no event. Replaying all events gives exactly the current keys.
    """

    def __init__(self, medium: str) -> None:
        self._medium = medium
        self._pending: dict[OffloadKey, bool] = {}

    def stored(self, key: OffloadKey) -> None:
        self._record(key, is_stored=True)

    def removed(self, key: OffloadKey) -> None:
        self._record(key, is_stored=False)

    def take(self) -> list[OffloadEvent]:
        events = [OffloadEvent(key, self._medium, is_stored) for key, is_stored in self._pending.items()]
        self._pending.clear()
        return events

    def _record(self, key: OffloadKey, is_stored: bool) -> None:
        if self._pending.get(key) is (not is_stored):
            del self._pending[key]
        else:
            assert key not in self._pending, (key, is_stored)
            self._pending[key] = is_stored


class SecondaryTierManager(Protocol):
    """See the module's docstring for the rules of all methods."""

    @property
    def medium(self) -> str:
        """The medium's name in events and cost measurements, such as "STORAGE"."""
        ...

    def lookup(self, key: OffloadKey) -> bool:
        """Returns whether a load of the key is worth trying. Changes nothing."""
        ...

    def submit_store(self, job: TransferJob) -> bool:
        """Accepts the job, or refuses it as a whole (False): then it has no effect and no result."""
        ...

    def submit_load(self, job: TransferJob) -> bool:
        """Like `submit_store`, in the other direction."""
        ...

    def get_finished_jobs(self) -> list[JobResult]:
        """Returns the jobs that have ended since the last call."""
        ...

    def wait(self, seconds: float) -> None:
        """Returns when a job may have ended, at once if there is none, at the latest after this many seconds."""
        ...

    def drain_jobs(self) -> None:
        """Blocks until every accepted job has ended; the results must still be collected."""
        ...

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Marks a prompt, from its head to its tail, as used again; unknown keys are ignored."""
        ...

    def forget(self, key: OffloadKey) -> None:
        """Drops a key with bad bytes: it is no longer found, even if a store in flight writes it."""
        ...

    def reset(self) -> None:
        """Forgets every key, including those of stores in flight."""
        ...

    def take_events(self) -> list[OffloadEvent]:
        """Returns additions and removals since the last call; keys present at the start count as added."""
        ...

    def has_pending_work(self) -> bool:
        """Returns whether there are jobs whose results have not been collected."""
        ...

    def stats(self) -> TierStats: ...

    def shutdown(self) -> None:
        """Ends the threads. Stores that have not begun are dropped; no partial or forgotten chunk is found later."""
        ...
