"""What a tier below the CPU tier must do, and what it is told and tells.

Purpose: to keep copies of chunks on a slower medium. A tier is best-effort: it may refuse or forget anything at any
time, and the worst that follows is that tokens are computed again.

Lifecycle: built whole; then `submit_store`, `submit_load` and `get_finished_jobs` for as long as the engine lives; then
`shutdown`, after which nothing is called. A job that was accepted ends exactly once, in `get_finished_jobs`. Until it
does, the tier may read the chunks of a store and write the chunks of a load; after it has ended the tier never touches
them again. A key is successful only if the tier has verified every byte; what lies in the chunks of other keys means
nothing.

Threading: every method is called on the scheduler's thread and none may block, but for `drain_jobs` and `shutdown`. A
tier moves bytes on threads of its own and lets nothing of them be seen.

Failure: no method raises for what the world does (a full disk, a lost peer, a damaged file). It is counted in `stats`,
logged once per kind, and the keys are reported as not successful. A key whose load failed must not be found by the
next `lookup`, or a request would ask for it for ever.

Implementors must not keep a submitted job's chunks beyond its end, call back into the manager, or hold queues without
a bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.kv_transfer.offload import OffloadKey


@dataclass(frozen=True, slots=True)
class TransferJob:
    """Chunks on their way between the CPU tier and another: `keys[i]` lies, or will lie, in `chunk_ids[i]`.

    `digests[i]` was made by the producer of the bytes, None where its attestation does not cover the key. A tier keeps
    it with the bytes and gives it back, and it checks the bytes it keeps by means of its own. A load has only None.
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
    """How a job ended. Some of its keys may be successful and others not.

    `digests[i]` is what the job that stored `successful_keys[i]` brought along. `seconds` is the time from the job's
    submission to its end, and `num_bytes` the payload of the successful keys.
    """

    job_id: int
    successful_keys: tuple[OffloadKey, ...]
    digests: tuple[bytes | None, ...]
    is_promotion: bool
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class TierStats:
    """Counters in chunks but for the bytes; `num_chunks` and `num_queued` are as they are now."""

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
    """What became of one medium's keys since it was last asked.

    Only the difference is kept, so a log without a reader stays as small as the set of keys: one that came and went in
    between has no event. Replaying all events gives exactly the keys that are there.
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
    """See the module's docstring for what holds for all methods."""

    @property
    def medium(self) -> str:
        """What events and cost measurements call it, such as "STORAGE"."""
        ...

    def lookup(self, key: OffloadKey) -> bool:
        """Whether a load of the key is worth a try. Changes nothing."""
        ...

    def submit_store(self, job: TransferJob) -> bool:
        """Takes over the job, or refuses it as a whole (False): then nothing has happened and it has no result."""
        ...

    def submit_load(self, job: TransferJob) -> bool:
        """As `submit_store`, in the other direction."""
        ...

    def get_finished_jobs(self) -> list[JobResult]:
        """The jobs that have ended since the last call."""
        ...

    def wait(self, seconds: float) -> None:
        """Returns when a job may have ended, at once when there is none, at the latest after so many seconds."""
        ...

    def drain_jobs(self) -> None:
        """Blocks until every accepted job has ended; their results are still to be collected."""
        ...

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """A prompt, from its head to its tail, has been used again; unknown keys are passed over."""
        ...

    def forget(self, key: OffloadKey) -> None:
        """The key's bytes are bad: it is not found any more, and neither is what a store in flight brings."""
        ...

    def reset(self) -> None:
        """Forgets every key, those of stores in flight included."""
        ...

    def take_events(self) -> list[OffloadEvent]:
        """What came and went since the last call; what was there at the start has come."""
        ...

    def has_pending_work(self) -> bool:
        """There are jobs whose results have not been collected."""
        ...

    def stats(self) -> TierStats: ...

    def shutdown(self) -> None:
        """Ends the threads. Stores that have not begun are dropped; nothing half-done can be found later."""
        ...
