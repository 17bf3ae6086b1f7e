"""The workers' part of the `OffloadingConnector`: each copies the rank's part between engine blocks and chunks.

A digest is computed from the bytes in the engine's cache and checked against the bytes loaded into it, so that errors
on the way, in memory, on a disk or by a wrong chunk id, are detected.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.kv_transfer.null import NullWorkerConnector
from penstock.kv_transfer.offload.messages import LoadBlock, OffloadLoad, OffloadMetadata, OffloadStore
from penstock.kv_transfer.offload.region import OffloadRegion
from penstock.kv_transfer.topology.chunks import ChunkFormat, RankChunks, RankHeads
from penstock.kv_transfer.view import KVCacheView, Parts, Transfer
from penstock.messages.kv_transfer import (
    BadRange,
    KVConnectorMetadata,
    KVConnectorOutput,
    ShardId,
    TransferReport,
    TransferStatus,
)
from penstock.utils.clock import Clock, SystemClock
from penstock.utils.digest import DIGEST_BYTES

# If the host itself copies and digests a load, other requests wait meanwhile. This many bytes take some milliseconds; a
# step may copy as many as about an eighth of the time of the one before it allows, if they are more. The rest continues
# in the following steps.
_LOAD_BYTES_PER_STEP = 8 << 20
_LOAD_BYTES_PER_SECOND = 512 << 20


@dataclass(slots=True, eq=False)
class _Job:
    """A store or load in progress. `waiting` holds those of a load's blocks that no step has begun to copy."""

    report: Callable[[], TransferReport]
    transfers: list[Transfer] = field(default_factory=list[Transfer])
    waiting: deque[LoadBlock] = field(default_factory=deque[LoadBlock])
    take: Callable[[LoadBlock, Parts], None] = lambda block, parts: None

    def is_done(self) -> bool:
        return not self.waiting and all(transfer.done() for transfer in self.transfers)

    def wait(self) -> None:
        for transfer in self.transfers:
            transfer.result()


class OffloadingWorker(NullWorkerConnector):
    """Transfers begin in the order of the steps, so that no block is overwritten before it was read. They are reported
    with the step that finds them ended, which is the same one if the host can access the cache.
    """

    def __init__(self, region: OffloadRegion, shard: ShardId, chunks: ChunkFormat, heads: RankHeads) -> None:
        """`heads` covers all ranks, or is empty for a single rank."""
        self._region = region
        self._shard = shard
        self._format = chunks
        self._heads = heads
        self._block_size = chunks.block_size
        self._jobs: list[_Job] = []
        self._new_loads: tuple[OffloadLoad, ...] = ()
        self._clock: Clock = SystemClock()
        self._began = self._seconds = 0.0

    def register_kv_caches(self, view: KVCacheView) -> None:
        self._view = view
        self._chunks = RankChunks(self._format, view.layout, self._shard, self._heads)
        groups = {layer.group for layer in view.layout.layers}
        self._block_bytes = {group: view.layout.block_bytes(group) for group in groups}
        # A device copies in parallel with the steps, so the load is not divided.
        most = _LOAD_BYTES_PER_STEP if view.layout.is_host_visible else sys.maxsize
        self._bytes_per_step = max(most, *self._block_bytes.values())

    def begin_step(self, metadata: KVConnectorMetadata | None) -> None:
        assert isinstance(metadata, OffloadMetadata), metadata
        self._began = self._clock.now()
        self._new_loads = metadata.loads
        self._jobs += map(self._store, metadata.stores)

    def start_load_kv(self) -> None:
        self._jobs += map(self._load, self._new_loads)
        room = max(self._bytes_per_step, int(self._seconds * _LOAD_BYTES_PER_SECOND))
        for job in self._jobs:
            room = self._copy(job, room)

    def get_finished(self, finished_request_ids: frozenset[str]) -> KVConnectorOutput:
        ended = [job for job in self._jobs if job.is_done()]
        self._jobs = [job for job in self._jobs if job not in ended]
        for job in ended:
            job.wait()
        return KVConnectorOutput(tuple(job.report() for job in ended))

    def end_step(self) -> None:
        self._new_loads = ()
        self._seconds = self._clock.now() - self._began

    def shutdown(self) -> None:
        for job in self._jobs:
            job.wait()
        self._region.close()

    def _store(self, store: OffloadStore) -> _Job:
        # A rank that writes no part of a block adds nothing to its digest; without attestation there is none.
        digests = [bytes(DIGEST_BYTES) if block.is_attested else b"" for block in store.blocks]
        own = [number for number, block in enumerate(store.blocks) if self._chunks.has(block.group)]
        blocks = [store.blocks[number] for number in own]

        def take(index: int, parts: Parts) -> None:
            block = blocks[index]
            chunk = self._region.chunk(block.chunk_id)
            digests[own[index]] = self._chunks.store(block.group, parts, chunk, block.is_attested)

        transfer = self._view.read_blocks([(block.group, block.block_id) for block in blocks], take)
        done = TransferStatus.DONE
        return _Job(lambda: TransferReport(store.job_id, self._shard, done, digests=tuple(digests)), [transfer])

    def _load(self, load: OffloadLoad) -> _Job:
        bad: list[BadRange] = []

        def take(block: LoadBlock, parts: Parts) -> None:
            chunk = self._region.chunk(block.chunk_id)
            if block.digest is not None and not self._chunks.is_right(block.group, parts, chunk, block.digest):
                bad.append(self._range(block))

        def report() -> TransferReport:
            status = TransferStatus.FAILED if bad else TransferStatus.DONE
            return TransferReport(load.job_id, self._shard, status, tuple(bad))

        return _Job(report, waiting=deque(block for block in load.blocks if self._chunks.has(block.group)), take=take)

    def _copy(self, job: _Job, room: int) -> int:
        """Begins to copy the next blocks of a load, up to `room` bytes. Returns the room left for later loads."""
        blocks: list[LoadBlock] = []
        while job.waiting and (num_bytes := self._block_bytes[job.waiting[0].group]) <= room:
            blocks.append(job.waiting.popleft())
            room -= num_bytes
        if blocks:
            places = [(block.group, block.block_id) for block in blocks]
            data = [self._chunks.pieces(block.group, self._region.chunk(block.chunk_id)) for block in blocks]
            transfer = self._view.write_blocks(places, data, lambda number, parts: job.take(blocks[number], parts))
            job.transfers.append(transfer)
        return 0 if job.waiting else room

    def _range(self, block: LoadBlock) -> BadRange:
        return BadRange(block.group, block.index * self._block_size, (block.index + 1) * self._block_size)
