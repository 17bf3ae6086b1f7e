"""The disk tier: one file per chunk, in folders that outlive the engine: one for each size of chunks.

The index, its order and the occupied places belong to the scheduler's thread; two small thread pools, separate so that
loads do not wait for stores, only read, write and delete files. While a file is being written or deleted its key is
*busy*, and no second change of it begins. The limit on bytes holds at every moment: a store that needs room deletes its
victims before it writes.

Several engines may share a folder. Each has its own index, so each sees the files that were there when it started and
those that it wrote, and keeps its own limit; a file that another engine deleted is a miss.
"""

from __future__ import annotations

import errno
import queue
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

from penstock.kv_transfer.offload import OffloadKey
from penstock.kv_transfer.offload.region import OffloadRegion
from penstock.kv_transfer.offload.tiers.base import EventLog, JobResult, OffloadEvent, TierStats, TransferJob
from penstock.kv_transfer.offload.tiers.chunk_file import ChunkFolder, VerifiedChunk
from penstock.messages.kv_events import MEDIUM_STORAGE
from penstock.utils.clock import SystemClock
from penstock.utils.errors import ConfigError
from penstock.utils.logging import get_logger
from penstock.utils.machine import give_way

_logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class DiskTierConfig:
    """`num_threads` load and as many store; a job that would exceed `max_queued_chunks` waiting chunks is refused: by
    default half of the region's, at least 256.
    """

    path: Path
    capacity_bytes: int
    num_threads: int = 4
    max_queued_chunks: int | None = None


@dataclass(frozen=True, slots=True)
class _Store:
    job_id: int
    key: OffloadKey
    chunk_id: int
    digest: bytes | None
    victims: tuple[OffloadKey, ...]


@dataclass(frozen=True, slots=True)
class _Load:
    job_id: int
    key: OffloadKey
    chunk_id: int


@dataclass(frozen=True, slots=True)
class _Delete:
    keys: tuple[OffloadKey, ...]


@dataclass(frozen=True, slots=True)
class _Outcome:
    """A thread's report. Keys in `undeleted` still have their files."""

    is_successful: bool
    time: float
    digest: bytes | None = None
    error: OSError | None = None
    undeleted: tuple[OffloadKey, ...] = ()


@dataclass(slots=True)
class _Job:
    job: TransferJob
    submitted: float
    num_left: int = 0
    last_time: float = 0.0
    successful: dict[OffloadKey, bytes | None] = field(default_factory=dict[OffloadKey, "bytes | None"])


class DiskTier:
    """A `SecondaryTierManager` over files. `fingerprint` covers everything that a KV block's bytes depend on.

    Raises:
        ConfigError: the folder cannot be used, or not even one chunk fits.
    """

    medium = MEDIUM_STORAGE

    def __init__(self, config: DiskTierConfig, fingerprint: bytes, region: OffloadRegion) -> None:
        self._region = region
        self._max_queued = config.max_queued_chunks or max(256, region.num_chunks // 2)
        self._folders = [ChunkFolder(config.path, fingerprint, region.chunk_bytes)]
        if region.states is not None:
            self._folders.append(ChunkFolder(config.path, fingerprint, region.states.chunk_bytes, "-states"))
        self._max_bytes = config.capacity_bytes
        least = sum(folder.file_bytes for folder in self._folders)
        if self._max_bytes < least:
            what = "one chunk" if region.states is None else "one chunk and one state of recurrent layers"
            raise ConfigError(f"disk_bytes_to_use must be at least {least}, {what}")
        self._clock = SystemClock()
        self._loaders = ThreadPoolExecutor(config.num_threads, thread_name_prefix="kv-disk-load")
        self._storers = ThreadPoolExecutor(config.num_threads, thread_name_prefix="kv-disk-store", initializer=give_way)
        for pool in (self._loaders, self._storers):
            _start_threads(pool, config.num_threads)
        self._done: queue.SimpleQueue[Future[_Outcome]] = queue.SimpleQueue()
        self._tasks: dict[Future[_Outcome], _Store | _Load | _Delete] = {}
        self._num_queued = 0
        self._jobs: dict[int, _Job] = {}
        self._finished: list[JobResult] = []
        # Ordered from the least to the most recently used.
        self._index: OrderedDict[OffloadKey, None] = OrderedDict()
        self._loading: Counter[OffloadKey] = Counter()
        self._busy: set[OffloadKey] = set()
        # Busy keys that must not be found when their change has ended.
        self._doomed: set[OffloadKey] = set()
        # Of all files in the index and all busy ones, without victims: their places already belong to their stores.
        self._num_bytes = 0
        self._events = EventLog(self.medium)
        self._counts: Counter[str] = Counter()
        self._logged: set[str] = set()
        self._adopt_found()

    def lookup(self, key: OffloadKey) -> bool:
        return key in self._index

    def submit_store(self, job: TransferJob) -> bool:
        record = self._accept(job)
        if record is None:
            return False
        for key, chunk_id, digest in zip(job.keys, job.chunk_ids, job.digests, strict=True):
            if key in self._index:
                self._index.move_to_end(key)
                record.successful[key] = digest
            elif key in self._busy or (victims := self._take_place(key)) is None:
                self._counts["num_refused"] += 1
            else:
                self._busy.add(key)
                task = _Store(job.job_id, key, chunk_id, digest, victims)
                record.num_left += 1
                self._start(self._storers, task, lambda task=task: self._store(task))
        self._finish_if_done(record)
        return True

    def submit_load(self, job: TransferJob) -> bool:
        record = self._accept(job)
        if record is None:
            return False
        for key, chunk_id in zip(job.keys, job.chunk_ids, strict=True):
            if key not in self._index:
                self._counts["num_vanished"] += 1
                continue
            self._loading[key] += 1
            task = _Load(job.job_id, key, chunk_id)
            record.num_left += 1
            self._start(self._loaders, task, lambda task=task: self._load(task))
        self._finish_if_done(record)
        return True

    def get_finished_jobs(self) -> list[JobResult]:
        while not self._done.empty():
            self._collect(self._done.get())
        finished, self._finished = self._finished, []
        return finished

    def wait(self, seconds: float) -> None:
        wait(self._tasks, seconds, FIRST_COMPLETED)

    def drain_jobs(self) -> None:
        while self._tasks:
            self._collect(self._done.get())

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        # The head is touched last, so that it is the youngest.
        for key in reversed(keys):
            if key in self._index:
                self._index.move_to_end(key)

    def forget(self, key: OffloadKey) -> None:
        if key in self._index:
            self._delete([key])
        elif key in self._busy:
            self._doomed.add(key)

    def reset(self) -> None:
        self._doomed |= self._busy
        self._delete(list(self._index))

    def take_events(self) -> list[OffloadEvent]:
        return self._events.take()

    def has_pending_work(self) -> bool:
        return bool(self._jobs or self._finished)

    def stats(self) -> TierStats:
        return TierStats(self.medium, num_chunks=len(self._index), num_queued=self._num_queued, **self._counts)

    def shutdown(self) -> None:
        for pool in (self._loaders, self._storers):
            pool.shutdown(wait=True, cancel_futures=True)
        # What was forgotten must not be found after a restart.
        self._remove_files(tuple(self._doomed))

    def _adopt_found(self) -> None:
        found = [each for folder in self._folders for each in folder.take_found() if self._folder(each.key) is folder]
        for chunk in sorted(found, key=lambda chunk: chunk.last_use):
            self._add_to_index(chunk.key)
            self._num_bytes += self._file_bytes(chunk.key)
        self._evict(self._num_bytes - self._max_bytes)
        # Nothing else runs yet, and the limit must hold from the start.
        self.drain_jobs()

    def _folder(self, key: OffloadKey) -> ChunkFolder:
        states = self._region.states
        return self._folders[states is not None and key[0] == states.group]

    def _file_bytes(self, key: OffloadKey) -> int:
        return self._folder(key).file_bytes

    def _accept(self, job: TransferJob) -> _Job | None:
        """Accepts any job if the queue is empty, because one that is too long would otherwise be refused forever."""
        if self._num_queued and self._num_queued + len(job.keys) > self._max_queued:
            self._counts["num_refused"] += len(job.keys)
            return None
        return self._jobs.setdefault(job.job_id, _Job(job, self._clock.now()))

    def _take_place(self, key: OffloadKey) -> tuple[OffloadKey, ...] | None:
        """Reserves the place of a file and returns the keys to delete for it; None if there is no room."""
        num_bytes = self._file_bytes(key)
        victims = self._oldest(self._num_bytes + num_bytes - self._max_bytes)
        if victims is None:
            return None
        for victim in victims:
            self._remove_from_index(victim)
            self._busy.add(victim)
            self._num_bytes -= self._file_bytes(victim)
        self._num_bytes += num_bytes
        return victims

    def _oldest(self, num_bytes: int) -> tuple[OffloadKey, ...] | None:
        """Returns the oldest keys whose files have this many bytes and are not being read; None if there are fewer."""
        found: list[OffloadKey] = []
        for key in self._index:
            if num_bytes <= 0:
                break
            if not self._loading[key]:
                found.append(key)
                num_bytes -= self._file_bytes(key)
        return tuple(found) if num_bytes <= 0 else None

    def _evict(self, num_bytes: int) -> None:
        """Deletes the oldest files that have this many bytes together; none if there are fewer."""
        victims = self._oldest(num_bytes) or ()
        self._counts["num_evicted"] += len(victims)
        self._delete(victims)

    def _remove_from_index(self, key: OffloadKey) -> None:
        del self._index[key]
        self._events.removed(key)

    def _add_to_index(self, key: OffloadKey) -> None:
        self._index[key] = None
        self._events.stored(key)

    def _delete(self, keys: Iterable[OffloadKey]) -> None:
        """Deletes the files of keys in the index, or of busy keys that have exclusive use of their file now."""
        task = _Delete(tuple(keys))
        for key in [key for key in task.keys if key in self._index]:
            self._remove_from_index(key)
        self._busy.update(task.keys)
        self._doomed.update(task.keys)
        if task.keys:
            self._start(self._storers, task, lambda: self._remove_files(task.keys))

    def _start(self, pool: ThreadPoolExecutor, task: _Store | _Load | _Delete, run: Callable[[], _Outcome]) -> None:
        future = pool.submit(run)
        self._tasks[future] = task
        self._num_queued += not isinstance(task, _Delete)
        future.add_done_callback(self._done.put)

    # The following runs on the pools' threads.

    def _store(self, task: _Store) -> _Outcome:
        removal = self._remove_files(task.victims)
        if not removal.is_successful:
            return removal
        try:
            self._folder(task.key).write(task.key, self._region.chunk(task.chunk_id), task.digest)
        except OSError as error:
            return _Outcome(False, self._clock.now(), error=error)
        return _Outcome(True, self._clock.now(), task.digest)

    def _load(self, task: _Load) -> _Outcome:
        try:
            chunk: VerifiedChunk | None = self._folder(task.key).read(task.key, self._region.chunk(task.chunk_id))
        except OSError as error:
            return _Outcome(False, self._clock.now(), error=error)
        return _Outcome(chunk is not None, self._clock.now(), chunk and chunk.attached_digest)

    def _remove_files(self, keys: tuple[OffloadKey, ...]) -> _Outcome:
        undeleted: list[OffloadKey] = []
        first_error = None
        for key in keys:
            try:
                self._folder(key).remove(key)
            except OSError as error:
                undeleted.append(key)
                first_error = first_error or error
        return _Outcome(not undeleted, self._clock.now(), error=first_error, undeleted=tuple(undeleted))

    # The following runs on the scheduler's thread.

    def _collect(self, future: Future[_Outcome]) -> None:
        task = self._tasks.pop(future)
        outcome = future.result()
        if isinstance(task, _Delete):
            self._on_deleted(task, outcome)
            return
        self._num_queued -= 1
        is_successful = self._on_stored(task, outcome) if isinstance(task, _Store) else self._on_loaded(task, outcome)
        record = self._jobs[task.job_id]
        record.num_left -= 1
        record.last_time = max(record.last_time, outcome.time)
        if is_successful:
            record.successful[task.key] = outcome.digest
        self._finish_if_done(record)

    def _on_stored(self, task: _Store, outcome: _Outcome) -> bool:
        self._busy.remove(task.key)
        for victim in task.victims:
            self._on_victim(victim, is_deleted=victim not in outcome.undeleted)
        if not outcome.is_successful:
            self._doomed.discard(task.key)
            self._num_bytes -= self._file_bytes(task.key)
            self._on_failed("store", outcome)
            if outcome.error is not None and outcome.error.errno in (errno.ENOSPC, errno.EDQUOT):
                # Below the limit, but others fill the disk too: the oldest files make room for the next ones.
                self._evict(self._file_bytes(task.key))
            return False
        if task.key in self._doomed:
            self._delete([task.key])
            return False
        self._add_to_index(task.key)
        self._counts["num_stored"] += 1
        self._counts["num_bytes_stored"] += self._region.bytes_of(task.key[0])
        return True

    def _on_victim(self, victim: OffloadKey, is_deleted: bool) -> None:
        self._busy.remove(victim)
        if is_deleted:
            self._doomed.discard(victim)
            self._counts["num_evicted"] += 1
            return
        self._num_bytes += self._file_bytes(victim)
        if victim in self._doomed:
            self._delete([victim])
        else:
            self._add_to_index(victim)
            self._index.move_to_end(victim, last=False)

    def _on_loaded(self, task: _Load, outcome: _Outcome) -> bool:
        self._loading -= Counter([task.key])
        if outcome.is_successful:
            self._counts["num_loaded"] += 1
            self._counts["num_bytes_loaded"] += self._region.bytes_of(task.key[0])
            if task.key in self._index:
                self._index.move_to_end(task.key)
            return True
        # Forgotten meanwhile, or by an earlier load of the same file.
        if task.key not in self._index:
            return False
        if isinstance(outcome.error, FileNotFoundError):
            self._counts["num_vanished"] += 1
            self._remove_from_index(task.key)
            self._num_bytes -= self._file_bytes(task.key)
            return False
        if outcome.error is None:
            self._counts["num_corrupted"] += 1
            self._log_once("corrupted", "The disk tier found a damaged file; its tokens are computed again")
        else:
            self._on_failed("load", outcome)
        if outcome.error is None or outcome.error.errno == errno.EIO:
            self._delete([task.key])
        elif outcome.error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            # The file may be intact and readable for another engine; this one no longer looks it up.
            self._remove_from_index(task.key)
            self._busy.add(task.key)
        return False

    def _on_deleted(self, task: _Delete, outcome: _Outcome) -> None:
        # A file that cannot be deleted keeps its place, and its key stays busy so that no lookup finds it.
        deleted = set(task.keys) - set(outcome.undeleted)
        self._busy -= deleted
        self._num_bytes -= sum(map(self._file_bytes, deleted))
        self._doomed.difference_update(task.keys)
        if not outcome.is_successful:
            self._on_failed("delete", outcome)

    def _on_failed(self, what: str, outcome: _Outcome) -> None:
        assert outcome.error is not None, what
        self._counts["num_failed"] += 1
        kind = f"{what} {errno.errorcode.get(outcome.error.errno or 0, 'unknown')}"
        self._log_once(kind, f"The disk tier failed to {what} a chunk and continues without it: {outcome.error}")

    def _log_once(self, kind: str, message: str) -> None:
        if kind not in self._logged:
            self._logged.add(kind)
            _logger.warning("%s (further ones of this kind are only counted)", message)

    def _finish_if_done(self, record: _Job) -> None:
        if record.num_left:
            return
        job = record.job
        del self._jobs[job.job_id]
        keys = tuple(key for key in job.keys if key in record.successful)
        self._finished.append(
            JobResult(
                job_id=job.job_id,
                successful_keys=keys,
                digests=tuple(record.successful[key] for key in keys),
                is_promotion=job.is_promotion,
                num_bytes=sum(self._region.bytes_of(group) for group, _ in keys),
                seconds=max(0.0, record.last_time - record.submitted),
            )
        )

    def check_integrity(self) -> None:
        """Asserts that each key and each place is in one list, and that the limit holds."""
        assert not self._busy & self._index.keys(), self._busy & self._index.keys()
        assert self._doomed <= self._busy, self._doomed - self._busy
        victims = [victim for task in self._tasks.values() if isinstance(task, _Store) for victim in task.victims]
        num_bytes = sum(map(self._file_bytes, (self._index.keys() | self._busy) - set(victims)))
        assert num_bytes == self._num_bytes <= self._max_bytes, (num_bytes, self._num_bytes, self._max_bytes)
        loads = Counter(task.key for task in self._tasks.values() if isinstance(task, _Load))
        assert +self._loading == loads, (self._loading, loads)
        num_left = sum(record.num_left for record in self._jobs.values())
        num_tasks = sum(not isinstance(task, _Delete) for task in self._tasks.values())
        assert num_left == num_tasks == self._num_queued, (num_left, num_tasks, self._num_queued)


def _start_threads(pool: ThreadPoolExecutor, num_threads: int) -> None:
    """Starts all threads of a pool. It would start each with a job, which it cannot take back if the system allows no
    more threads by then. Raises ConfigError.
    """
    may_end = threading.Event()
    try:
        for _ in range(num_threads):
            pool.submit(may_end.wait)
    except RuntimeError as error:
        raise ConfigError(f"disk_path needs {num_threads} threads more: {error}; raise the limit on them") from None
    finally:
        may_end.set()
