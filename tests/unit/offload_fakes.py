"""A tier whose results a test decides, and keys that determine their content."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from penstock.kv_transfer.offload import OffloadKey
from penstock.kv_transfer.offload.region import OffloadRegion
from penstock.kv_transfer.offload.tiers.base import EventLog, JobResult, OffloadEvent, TierStats, TransferJob
from penstock.utils.digest import digest

CHUNK_BYTES = 64


def make_key(number: int, group: int = 0) -> OffloadKey:
    return (group, digest(number.to_bytes(8, "big")) * 2)


def content(key: OffloadKey, num_bytes: int = CHUNK_BYTES) -> bytes:
    """Returns the bytes that belong to the key."""
    pattern = digest(key[1], bytes([key[0]]))
    return (pattern * (num_bytes // len(pattern) + 1))[:num_bytes]


class FakeTier:
    """Keeps bytes in a dict. `outcome` decides for each key of a job whether it succeeds, when the job ends.

    A job ends in the `get_finished_jobs` that follows `num_delays` others. A failed load leaves random bytes in its
    chunk; the key is dropped, unless the tier `keeps_failed` ones. It says that a job took `seconds`.
    """

    def __init__(
        self,
        region: OffloadRegion,
        outcome: Callable[[OffloadKey], bool] = lambda key: True,
        medium: str = "STORAGE",
        num_delays: int = 0,
        max_jobs: int = 1000,
    ) -> None:
        self.medium = medium
        self.outcome = outcome
        self.num_delays = num_delays
        self.max_jobs = max_jobs
        self.keeps_failed = False
        self.seconds = 0.0
        self.bytes: dict[OffloadKey, tuple[bytes, bytes | None]] = {}
        self.touched: list[OffloadKey] = []
        self.wait: Callable[[float], None] = lambda seconds: None
        self._region = region
        self._jobs: list[tuple[int, int, TransferJob]] = []
        self._generation = 0
        self._forgotten: list[tuple[int, OffloadKey]] = []
        self._num_polls = 0
        self._events = EventLog(medium)

    def lookup(self, key: OffloadKey) -> bool:
        return key in self.bytes

    def submit_store(self, job: TransferJob) -> bool:
        return self._submit(job)

    def submit_load(self, job: TransferJob) -> bool:
        return self._submit(job)

    def _submit(self, job: TransferJob) -> bool:
        if len(self._jobs) >= self.max_jobs:
            return False
        self._jobs.append((self._num_polls + self.num_delays, self._generation, job))
        return True

    def get_finished_jobs(self) -> list[JobResult]:
        due = [entry for entry in self._jobs if entry[0] <= self._num_polls]
        self._jobs = [entry for entry in self._jobs if entry[0] > self._num_polls]
        self._num_polls += 1
        # Jobs can end in another order than they were submitted.
        return [self._end(generation, job) for _, generation, job in reversed(due)]

    def _end(self, generation: int, job: TransferJob) -> JobResult:
        successful: dict[OffloadKey, bytes | None] = {}
        for key, chunk_id, attached in zip(job.keys, job.chunk_ids, job.digests, strict=True):
            chunk = self._region.chunk(chunk_id)
            if job.is_promotion:
                data, attached = self.bytes.get(key, (b"", None))
                is_good = bool(data) and self.outcome(key)
                chunk[:] = data if is_good else random.randbytes(len(chunk))
                if is_good:
                    successful[key] = attached
                elif not self.keeps_failed:
                    self.forget(key)
            elif self.outcome(key) and generation == self._generation and (job.job_id, key) not in self._forgotten:
                if key not in self.bytes:
                    self._events.stored(key)
                self.bytes[key] = (bytes(chunk), attached)
                successful[key] = attached
        num_bytes = sum(self._region.bytes_of(group) for group, _ in successful)
        keys, digests = tuple(successful), tuple(successful.values())
        return JobResult(job.job_id, keys, digests, job.is_promotion, num_bytes, self.seconds)

    def drain_jobs(self) -> None:
        self._num_polls += self.num_delays

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        self.touched = list(keys)

    def forget(self, key: OffloadKey) -> None:
        self._forgotten += [(job.job_id, key) for _, _, job in self._jobs]
        if self.bytes.pop(key, None):
            self._events.removed(key)

    def reset(self) -> None:
        self._generation += 1
        for key in list(self.bytes):
            self.forget(key)

    def take_events(self) -> list[OffloadEvent]:
        return self._events.take()

    def has_pending_work(self) -> bool:
        return bool(self._jobs)

    def stats(self) -> TierStats:
        return TierStats(self.medium, num_chunks=len(self.bytes))

    def shutdown(self) -> None:
        self._jobs.clear()
