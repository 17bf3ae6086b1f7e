"""The real `OffloadingConnector` in a world: its manager, policies and copies, with a disk on the world's clock.

Every engine has its own memory, which is lost when it dies, and a disk that survives. The disk applies the world's
transfer faults to its jobs: it delays, loses or fails them, or reports success with wrong bytes. Memory may also lose a
bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.kv_transfer.digest import Attestation
from penstock.kv_transfer.offload import OffloadKey
from penstock.kv_transfer.offload.manager import OffloadingManager
from penstock.kv_transfer.offload.policies import ARCPolicy, CachePolicy, LRUPolicy
from penstock.kv_transfer.offload.region import OffloadRegion
from penstock.kv_transfer.offload.scheduler import OffloadingScheduler, OffloadPolicy, OffloadRules
from penstock.kv_transfer.offload.tiers.base import EventLog, JobResult, OffloadEvent, TierStats, TransferJob
from penstock.kv_transfer.offload.worker import OffloadingWorker
from penstock.kv_transfer.topology.chunks import ChunkFormat
from penstock.messages.kv_events import MEDIUM_STORAGE
from penstock.simulation.backing import Backing, BackingContext, Parts, Site
from penstock.simulation.memory_transport import FaultKind

_NEVER = 1e9
_FAILED = (FaultKind.DROP, FaultKind.DIE, FaultKind.DIE_UNSETTLED)


@dataclass(frozen=True, slots=True)
class _File:
    data: bytes
    digest: bytes | None


@dataclass(slots=True)
class _Job:
    job: TransferJob
    due: float
    fault: FaultKind


class SimDisk:
    """A `SecondaryTierManager` with at most `num_places` files, which persist from one life to the next."""

    medium = MEDIUM_STORAGE

    def __init__(
        self, files: dict[OffloadKey, _File], num_places: int, region: OffloadRegion, context: BackingContext
    ) -> None:
        self._files = files
        self._num_places = num_places
        self._region = region
        self._context = context
        self._jobs: list[_Job] = []
        self._unwanted: set[tuple[int, OffloadKey]] = set()
        self._events = EventLog(self.medium)
        for key in files:
            self._events.stored(key)

    def lookup(self, key: OffloadKey) -> bool:
        return key in self._files

    def submit_store(self, job: TransferJob) -> bool:
        return self._submit(job)

    def submit_load(self, job: TransferJob) -> bool:
        return self._submit(job)

    def _submit(self, job: TransferJob) -> bool:
        fault = self._context.fault_of()
        # A disk that never answers is modelled as one that answers too late.
        delay = _NEVER if fault.kind is FaultKind.LOST_COMPLETION and job.is_promotion else fault.delay
        self._jobs.append(_Job(job, self._context.clock.now() + delay, fault.kind))
        return True

    def get_finished_jobs(self) -> list[JobResult]:
        # When faults have stopped, hanging jobs end too.
        now = self._context.clock.now() if self._context.has_faults else 2 * _NEVER
        due = [job for job in self._jobs if job.due <= now]
        self._jobs = [job for job in self._jobs if job.due > now]
        return [self._finish(each) for each in due]

    def _finish(self, ended: _Job) -> JobResult:
        job = ended.job
        is_successful = self._load if job.is_promotion else self._store
        done = [index for index in range(len(job.keys)) if is_successful(job, index, ended.fault)]
        return JobResult(
            job_id=job.job_id,
            successful_keys=tuple(job.keys[index] for index in done),
            digests=tuple(self._files[job.keys[index]].digest for index in done),
            is_promotion=job.is_promotion,
            num_bytes=len(done) * self._region.chunk_bytes,
            seconds=0.0,
        )

    def _store(self, job: TransferJob, index: int, fault: FaultKind) -> bool:
        key = job.keys[index]
        unwanted = (job.job_id, key) in self._unwanted
        self._unwanted.discard((job.job_id, key))
        if fault in _FAILED or unwanted or len(self._files) >= self._num_places:
            return False
        if key not in self._files:
            self._events.stored(key)
        data = bytearray(self._region.chunk(job.chunk_ids[index]))
        data[-1] ^= fault is FaultKind.CORRUPT
        self._files[key] = _File(bytes(data), job.digests[index])
        return True

    def _load(self, job: TransferJob, index: int, fault: FaultKind) -> bool:
        file = self._files.get(job.keys[index])
        chunk = self._region.chunk(job.chunk_ids[index])
        if file is None:
            return False
        if fault in _FAILED and index == len(job.keys) // 2:
            chunk[: len(chunk) // 2] = file.data[: len(chunk) // 2]
            return False
        chunk[:] = file.data
        chunk[0] ^= fault is FaultKind.CORRUPT
        return True

    def wait(self, seconds: float) -> None: ...

    def drain_jobs(self) -> None:
        for job in self._jobs:
            job.due = 0.0

    def touch(self, keys: Sequence[OffloadKey]) -> None: ...

    def forget(self, key: OffloadKey) -> None:
        self._unwanted.update((each.job.job_id, key) for each in self._jobs if not each.job.is_promotion)
        if self._files.pop(key, None) is not None:
            self._events.removed(key)

    def reset(self) -> None:
        for key in list(self._files):
            self.forget(key)

    def take_events(self) -> list[OffloadEvent]:
        return self._events.take()

    def has_pending_work(self) -> bool:
        return bool(self._jobs)

    def stats(self) -> TierStats:
        return TierStats(self.medium, num_chunks=len(self._files), num_queued=len(self._jobs))

    def shutdown(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Life:
    region: OffloadRegion
    disk: SimDisk
    manager: OffloadingManager


def _ends(heads: range) -> tuple[int, int]:
    return heads.start, heads.stop


class OffloadBacking(Backing):
    """Tiers that an engine's ranks share; `Setup.store_places` bounds the disk and `Setup.num_staging` the memory."""

    def __init__(self, context: BackingContext) -> None:
        self._context = context
        self._disks: dict[str, dict[OffloadKey, _File]] = {}
        self._lives: dict[str, _Life] = {}

    def attach(self, site: Site) -> Parts:
        setup, ranks = self._context.setup, site.ranks
        chunks = ChunkFormat(site.cache, is_head_first=True)
        region = OffloadRegion(max(1, setup.num_staging), chunks.chunk_bytes)
        disk = SimDisk(self._disks.setdefault(site.name, {}), setup.store_places, region, self._context)
        policy: CachePolicy = LRUPolicy() if setup.direct_saves else ARCPolicy(region.num_chunks)
        manager = OffloadingManager(region.num_chunks, policy, [disk], max_cascading_chunks=8, max_promoting_chunks=8)
        self._lives[site.name] = _Life(region, disk, manager)
        scheduler = OffloadingScheduler(
            cache=site.cache,
            shards=frozenset(ranks.shards),
            region=region,
            manager=manager,
            rules=OffloadRules(
                attestation=Attestation.ALL,
                policy=OffloadPolicy.CHUNK_LEVEL if setup.direct_saves else OffloadPolicy.REQUEST_LEVEL,
                costs=None,
            ),
            clock=self._context.clock,
            epoch=f"{site.name}.{site.life}",
        )
        setup_of_workers = scheduler.worker_setup()
        attached = OffloadRegion.attach(setup_of_workers.memory, setup_of_workers.chunk_bytes)
        heads = {
            (stage, rank): {layer.name: _ends(ranks.heads_of(rank)) for layer in ranks.layers_of(stage)}
            for stage, rank in ranks.shards
        }
        return Parts(scheduler, {shard: OffloadingWorker(attached, shard, chunks, heads) for shard in ranks.shards})

    def crash(self, name: str) -> None:
        del self._lives[name]

    def restart(self) -> None:
        """The disks of all engines lose their files."""
        for life in self._lives.values():
            life.disk.reset()

    def tick(self) -> None:
        for life in self._lives.values():
            if self._context.is_struck():
                chunk = life.region.chunk(self._context.pick(life.region.num_chunks))
                chunk[len(chunk) // 2] ^= 4

    def check(self, contents: Callable[[int, bytes, str, int], bytes | None]) -> None:
        for life in self._lives.values():
            life.manager.check_integrity()

    def check_idle(self) -> None:
        for life in self._lives.values():
            stats = life.manager.stats
            assert not life.manager.has_pending_work, "a job of a tier never ended"
            assert stats.num_free + stats.num_stored == stats.num_chunks, f"chunks are missing at idle: {stats}"
