"""The real `OffloadingConnector` in a world: its manager, policies, copies and digests, on a disk and a manual clock.

Every engine has its own memory tier, which is lost when it dies. All engines share one disk, which survives them and
stores whole blocks, so that engines with different ranks find each other's KV. The disk applies the world's transfer
faults to its jobs: it delays, loses or fails them, or reports success with wrong bytes. Copies between the memory tier
and an engine take time if its host runs ahead of its device, as with a GPU, and may get a bit wrong; so may memory.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import cast

import msgspec
import numpy as np

from penstock.kv_transfer.connector import Match, RequestView
from penstock.kv_transfer.digest import Attestation
from penstock.kv_transfer.forwarding import Forwarding
from penstock.kv_transfer.offload import OffloadKey
from penstock.kv_transfer.offload.manager import OffloadingManager
from penstock.kv_transfer.offload.messages import OffloadMetadata, StateChunks
from penstock.kv_transfer.offload.policies import ARCPolicy, CachePolicy, LRUPolicy
from penstock.kv_transfer.offload.region import OffloadRegion
from penstock.kv_transfer.offload.scheduler import OffloadingScheduler, OffloadPolicy, OffloadRules
from penstock.kv_transfer.offload.tiers.base import JobResult, OffloadEvent, TierStats, TransferJob
from penstock.kv_transfer.offload.worker import OffloadingWorker
from penstock.kv_transfer.topology.chunks import ChunkFormat, RankHeads
from penstock.kv_transfer.view import KVCacheView, Place, Take, Transfer
from penstock.kv_transfer.view import Parts as BlockParts
from penstock.messages.kv_events import MEDIUM_STORAGE
from penstock.messages.kv_transfer import KVConnectorMetadata, ShardId, TransferId
from penstock.messages.scheduler_output import BlockIds, SchedulerOutput
from penstock.simulation.backing import Backing, BackingContext, Parts, Site, Touch
from penstock.simulation.memory_transport import Fault, FaultKind
from penstock.simulation.oracle import NUM_HEADS, OracleMemory
from penstock.simulation.ranks import RankConfig
from penstock.simulation.trace import ViolationError, hash_name
from penstock.utils.digest import digest_units, sum_digests
from penstock.utils.math import cdiv
from penstock.utils.wire import register_kind

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


class _Region(OffloadRegion):
    """The real one, without the thread that populates it ahead of time."""

    def _make_ready(self, kind: int, used: int) -> None: ...


class SimDisk:
    """One engine's jobs on the disk (`SecondaryTierManager`); `files` are all engines', at most `disk_chunks`."""

    medium = MEDIUM_STORAGE

    def __init__(self, files: dict[OffloadKey, _File], region: OffloadRegion, context: BackingContext) -> None:
        self._files = files
        self._region = region
        self._context = context
        self._jobs: list[_Job] = []
        self._unwanted: set[tuple[int, OffloadKey]] = set()

    def lookup(self, key: OffloadKey) -> bool:
        return key in self._files

    def submit_store(self, job: TransferJob) -> bool:
        fault = self._context.fault_of()
        # A disk that never answers is modelled as one that answers too late.
        delay = _NEVER if fault.kind is FaultKind.LOST_COMPLETION and job.is_promotion else fault.delay
        self._jobs.append(_Job(job, self._context.clock.now() + delay, fault.kind))
        return True

    submit_load = submit_store

    def get_finished_jobs(self) -> list[JobResult]:
        # When faults have stopped, hanging jobs end too.
        now = self._context.clock.now() if self._context.has_faults else 2 * _NEVER
        due = [job for job in self._jobs if job.due <= now]
        self._jobs = [job for job in self._jobs if job.due > now]
        ended = [self._finish(each) for each in due]
        return [each for each in ended for _ in range(1 + self._context.is_repeated())]

    def _finish(self, ended: _Job) -> JobResult:
        job = ended.job
        is_successful = self._load if job.is_promotion else self._store
        done = [index for index in range(len(job.keys)) if is_successful(job, index, ended.fault)]
        return JobResult(
            job_id=job.job_id,
            successful_keys=tuple(job.keys[index] for index in done),
            digests=tuple(self._files[job.keys[index]].digest for index in done),
            is_promotion=job.is_promotion,
            num_bytes=sum(self._region.bytes_of(job.keys[index][0]) for index in done),
            seconds=0.0,
        )

    def _store(self, job: TransferJob, index: int, fault: FaultKind) -> bool:
        key = job.keys[index]
        unwanted = (job.job_id, key) in self._unwanted
        self._unwanted.discard((job.job_id, key))
        if fault in _FAILED or unwanted or len(self._files) >= self._context.setup.disk_chunks:
            return False
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
            del self._files[job.keys[index]]
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
        self._files.pop(key, None)

    def reset(self) -> None:
        for key in list(self._files):
            self.forget(key)

    def take_events(self) -> list[OffloadEvent]:
        return []

    def has_pending_work(self) -> bool:
        return bool(self._jobs)

    def stats(self) -> TierStats:
        return TierStats(self.medium, num_chunks=len(self._files), num_queued=len(self._jobs))

    def shutdown(self) -> None: ...


class _Manager(OffloadingManager):
    """The real one, which also notes what it has accepted."""

    accepted: list[tuple[OffloadKey, bytes]]

    def complete_store(self, key: OffloadKey, digest: bytes | None, success: bool) -> None:
        super().complete_store(key, digest, success)
        if digest is not None:
            self.accepted.append((key, digest))


@register_kind
class SimOffloadMetadata(OffloadMetadata, msgspec.Struct, frozen=True, tag=True):
    is_sync: bool = False

    @property
    def has_sync_loads(self) -> bool:
        return self.is_sync


class _Scheduler(OffloadingScheduler):
    """The real one, but a share of the requests loads in the step that needs the KV, as a connector may decide."""

    sync_share = 0.0
    _is_sync = False

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> Match:
        match = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return replace(match, is_async=not self._loads_in_step(request)) if match.num_tokens else match

    def update_state_after_alloc(
        self, request: RequestView, transfer_id: TransferId, block_ids: BlockIds, num_computed_tokens: int, end: int
    ) -> None:
        super().update_state_after_alloc(request, transfer_id, block_ids, num_computed_tokens, end)
        self._is_sync |= self._loads_in_step(request)

    def _loads_in_step(self, request: RequestView) -> bool:
        return random.Random(request.request_id).random() < self.sync_share

    def build_connector_meta(self, plan: SchedulerOutput) -> OffloadMetadata:
        metadata = super().build_connector_meta(plan)
        is_sync, self._is_sync = self._is_sync, False
        return SimOffloadMetadata(metadata.stores, metadata.loads, metadata.cancelled, is_sync)


class _Copy:
    """A `Transfer` that takes place when it is polled after its time."""

    def __init__(self, run: Callable[[], object], is_due: Callable[[], bool]) -> None:
        self.is_done = False
        self._run = run
        self._is_due = is_due

    def done(self) -> bool:
        if self._is_due():
            self.result()
        return self.is_done

    def result(self) -> None:
        if not self.is_done:
            self.is_done = True
            self._run()


class _CopiedView(Forwarding):
    """A rank's cache as its connector sees it: copies take time if the host `runs_ahead`, like those of a GPU."""

    inner: OracleMemory

    def __init__(self, inner: OracleMemory, context: BackingContext, runs_ahead: bool) -> None:
        super().__init__(inner)
        self._context = context
        self._runs_ahead = runs_ahead
        self.loads: list[tuple[_Copy, Sequence[Place], Callable[[str], None]]] = []

    def read_blocks(self, places: Sequence[Place], take: Take) -> Transfer:
        parts = [[memoryview(bytes(part)) for part in self.inner.block_parts(*place)] for place in places]
        return self._begin(lambda: [take(number, each) for number, each in enumerate(parts)], self._context.fault_of())

    def write_blocks(self, places: Sequence[Place], data: Sequence[BlockParts], take: Take) -> Transfer:
        fault = self._context.fault_of()
        wrong = int(fault.at * len(places)) if fault.kind is FaultKind.CORRUPT else -1

        def write(layer_name: str = "") -> None:
            for number, ((group, block_id), pieces) in enumerate(zip(places, data, strict=True)):
                content = bytearray(b"".join(pieces))
                content[int(fault.at * len(content))] ^= number == wrong
                start = 0
                for name in self.inner.layer_names(group):
                    end = start + self.inner.stride(name)
                    if name == (layer_name or name):
                        self.inner.write_layer(name, block_id, memoryview(content)[start:end])
                    start = end

        def run() -> None:
            write()
            for number, place in enumerate(places):
                take(number, self.inner.block_parts(*place))

        copy = self._begin(run, fault)
        self.loads = [*self.open_loads(), (copy, places, write)]
        return copy

    def _begin(self, run: Callable[[], object], fault: Fault) -> _Copy:
        clock = self._context.clock
        due = clock.now() + (fault.delay if self._runs_ahead else 0.0)
        return _Copy(run, lambda: clock.now() >= due)

    def open_loads(self) -> list[tuple[_Copy, Sequence[Place], Callable[[str], None]]]:
        """Returns the copies that may still write, where, and the function that writes one of their layers now."""
        return [each for each in self.loads if not each[0].is_done]


class _Worker(OffloadingWorker):
    """The real one, which copies as `_CopiedView` does. A load that its step needs is awaited: before the step, or
    layer by layer while it runs.
    """

    def __init__(
        self, region: OffloadRegion, shard: ShardId, chunks: ChunkFormat, ranks: RankConfig, context: BackingContext
    ) -> None:
        super().__init__(region, shard, chunks, _heads_of(ranks))
        self._context = context
        self._runs_ahead = ranks.runs_ahead
        self.layer_hooks = self if context.setup.layerwise else None

    def register_kv_caches(self, view: KVCacheView) -> None:
        assert isinstance(view, OracleMemory), view
        self.copies = _CopiedView(view, self._context, self._runs_ahead)
        super().register_kv_caches(cast(KVCacheView, self.copies))

    def begin_step(self, metadata: KVConnectorMetadata | None) -> None:
        super().begin_step(metadata)
        self._is_awaited = metadata is not None and metadata.has_sync_loads and self.layer_hooks is None

    def start_load_kv(self) -> None:
        before = self.copies.loads
        super().start_load_kv()
        for each in self.copies.loads if self._is_awaited else ():
            if each not in before:
                each[0].result()

    def wait_for_layer_load(self, layer_name: str) -> None:
        for _, _, write in self.copies.open_loads():
            write(layer_name)

    def save_kv_layer(self, layer_name: str) -> None: ...


def _heads_of(ranks: RankConfig) -> RankHeads:
    ends = {rank: (ranks.heads_of(rank).start, ranks.heads_of(rank).stop) for _, rank in ranks.shards}
    return {(stage, rank): {layer.name: ends[rank] for layer in ranks.layers_of(stage)} for stage, rank in ranks.shards}


def _states_of(chunks: ChunkFormat, num_chunks: int) -> StateChunks | None:
    """Returns a tier's chunks for states, of which there are few checkpoints."""
    if chunks.state_group is None:
        return None
    return StateChunks(chunks.state_group, cdiv(num_chunks, 4), chunks.state_bytes)


@dataclass(frozen=True, slots=True)
class _Life:
    region: OffloadRegion
    disk: SimDisk
    manager: _Manager
    scheduler: _Scheduler
    chunks: ChunkFormat
    workers: Mapping[ShardId, _Worker]


class OffloadBacking(Backing):
    """`Setup.disk_chunks` bounds the disk of all engines, and `Setup.memory_chunks` the memory of each."""

    def __init__(self, context: BackingContext) -> None:
        self._context = context
        self._files: dict[OffloadKey, _File] = {}
        self._lives: dict[str, _Life] = {}
        self._is_lru, self._policy = context.pick(2), list(OffloadPolicy)[context.pick(2)]

    def attach(self, site: Site) -> Parts:
        setup, ranks, context = self._context.setup, site.ranks, self._context
        chunks = ChunkFormat(site.cache, is_head_first=True)
        region = _Region(setup.memory_chunks, chunks.chunk_bytes, _states_of(chunks, setup.memory_chunks))
        disk = SimDisk(self._files, region, context)
        manager = self._make_manager(region, disk)
        scheduler = _Scheduler(
            cache=site.cache,
            shards=frozenset(ranks.shards),
            region=region,
            manager=manager,
            rules=OffloadRules(Attestation.ALL, self._policy, costs=None, load_timeout=setup.load_timeout),
            clock=context.clock,
            epoch=f"{site.name}.{site.life}",
        )
        scheduler.sync_share = setup.sync_share
        given = scheduler.worker_setup()
        attached = _Region.attach(given.memory, given.chunk_bytes, given.states)
        workers = {shard: _Worker(attached, shard, chunks, ranks, context) for shard in ranks.shards}
        self._lives[site.name] = _Life(region, disk, manager, scheduler, chunks, workers)
        return Parts(scheduler, workers)

    def _make_manager(self, region: OffloadRegion, disk: SimDisk) -> _Manager:
        policies: list[CachePolicy] = [
            LRUPolicy() if self._is_lru else ARCPolicy(num_chunks)
            for num_chunks in (region.num_chunks, max(1, region.num_chunk_ids - region.num_chunks))
        ]
        manager = _Manager(region.num_chunks, policies[0], [disk], 8, 8, region.states, policies[1])
        manager.accepted = []
        return manager

    def crash(self, name: str) -> None:
        del self._lives[name]

    def restart(self) -> None:
        """The disk loses its files."""
        for life in self._lives.values():
            life.disk.reset()

    def tick(self) -> None:
        for life in self._lives.values():
            if self._context.is_struck():
                chunk = life.region.chunk(self._context.pick(life.region.num_chunk_ids))
                chunk[len(chunk) // 2] ^= 4

    def touching(self, name: str) -> Iterable[Touch]:
        for worker in self._lives[name].workers.values():
            for _, places, _ in worker.copies.open_loads():
                yield from (Touch(block_id, writes=True) for _, block_id in places)

    def has_news(self, name: str) -> bool:
        """True if there are jobs of the disk or of workers, or blocks for which they have not begun."""
        scheduler, manager = self._lives[name].scheduler, self._lives[name].manager
        return bool(scheduler._offers or scheduler._new_loads or len(scheduler._ledger) or manager._jobs)

    def check(self, contents: Callable[[int, bytes, str, int], bytes | None]) -> None:
        for life in self._lives.values():
            life.manager.check_integrity()
            for (group, block_hash), digest in life.manager.accepted:
                layer_names = life.chunks.places[group]
                right = [contents(group, block_hash, name, head) for name in layer_names for head in range(NUM_HEADS)]
                units = [np.frombuffer(unit or b"", np.uint8) for unit in right]
                if sum_digests(digest_units(units, count())) != digest:
                    name = hash_name(block_hash)
                    raise ViolationError(f"a tier has accepted wrong KV as {name}", name)
            life.manager.accepted.clear()

    def check_idle(self) -> None:
        for life in self._lives.values():
            stats = life.manager.stats
            assert not life.manager.has_pending_work, "a job of a tier never ended"
            assert stats.num_free + stats.num_stored == stats.num_chunks, f"chunks are missing at idle: {stats}"
            assert not any(worker.copies.open_loads() for worker in life.workers.values()), "a load is still copied"
