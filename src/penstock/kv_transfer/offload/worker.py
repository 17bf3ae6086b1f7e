"""The workers' part of the `OffloadingConnector`: each copies the rank's part between engine blocks and chunks.

A digest is computed from the bytes in the engine's cache and checked against the bytes loaded into it, so that errors
on the way, in memory, on a disk or by a wrong chunk id, are detected.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from penstock.kv_transfer.null import NullWorkerConnector
from penstock.kv_transfer.offload.messages import LoadBlock, OffloadMetadata, OffloadStore
from penstock.kv_transfer.offload.region import OffloadRegion
from penstock.kv_transfer.topology.chunks import ChunkFormat, RankChunks, RankHeads
from penstock.kv_transfer.view import KVCacheView, Parts, Transfer
from penstock.messages.kv_transfer import (
    BadRange,
    KVConnectorMetadata,
    KVConnectorOutput,
    ShardId,
    TransferId,
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
    """A store or load in progress. `digests` are those of the blocks of a store. Of a load, `waiting` holds the blocks
    that no step has begun to copy, and `bad` the tokens that are not loaded.
    """

    job_id: TransferId
    transfers: list[Transfer] = field(default_factory=list[Transfer])
    digests: list[bytes] = field(default_factory=list[bytes])
    waiting: deque[LoadBlock] = field(default_factory=deque[LoadBlock])
    bad: list[BadRange] = field(default_factory=list[BadRange])

    def is_done(self) -> bool:
        return not self.waiting and all(transfer.done() for transfer in self.transfers)

    def wait(self) -> None:
        for transfer in self.transfers:
            transfer.result()

    def report(self, shard: ShardId) -> TransferReport:
        status = TransferStatus.FAILED if self.bad else TransferStatus.DONE
        return TransferReport(self.job_id, shard, status, tuple(self.bad), tuple(self.digests))


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
        self._metadata = OffloadMetadata()
        self._clock: Clock = SystemClock()
        self._began = self._seconds = 0.0

    def register_kv_caches(self, view: KVCacheView) -> None:
        self._view = view
        self._chunks = RankChunks(self._format, view.layout, self._shard, self._heads)
        self._block_bytes = {layer.group: view.layout.block_bytes(layer.group) for layer in view.layout.layers}
        # A device copies in parallel with the steps, so the load is not divided.
        most = _LOAD_BYTES_PER_STEP if view.layout.is_host_visible else sys.maxsize
        self._bytes_per_step = max([most, *self._block_bytes.values()])

    def begin_step(self, metadata: KVConnectorMetadata | None) -> None:
        assert isinstance(metadata, OffloadMetadata), metadata
        self._began = self._clock.now()
        self._metadata = metadata
        self._jobs += map(self._store, metadata.stores)

    def start_load_kv(self) -> None:
        for load in self._metadata.loads:
            waiting = deque(block for block in load.blocks if self._chunks.has(block.group))
            self._jobs.append(_Job(load.job_id, waiting=waiting))
        for job in self._jobs:
            if job.job_id in self._metadata.cancelled:
                job.bad += map(self._range, job.waiting)
                job.waiting.clear()
        room = max(self._bytes_per_step, int(self._seconds * _LOAD_BYTES_PER_SECOND))
        for job in self._jobs:
            room = self._copy(job, room)

    def get_finished(self, finished_request_ids: frozenset[str]) -> KVConnectorOutput:
        ended = [job for job in self._jobs if job.is_done()]
        self._jobs = [job for job in self._jobs if job not in ended]
        for job in ended:
            job.wait()
        return KVConnectorOutput(tuple(job.report(self._shard) for job in ended))

    def end_step(self) -> None:
        self._metadata = OffloadMetadata()
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
        return _Job(store.job_id, [transfer], digests)

    def _copy(self, job: _Job, room: int) -> int:
        """Begins to copy the next blocks of a load, up to `room` bytes. Returns the room left for later loads."""
        blocks: list[LoadBlock] = []
        while job.waiting and (num_bytes := self._block_bytes[job.waiting[0].group]) <= room:
            blocks.append(job.waiting.popleft())
            room -= num_bytes
        if blocks:
            places = [(block.group, block.block_id) for block in blocks]
            data = [self._chunks.pieces(block.group, self._region.chunk(block.chunk_id)) for block in blocks]
            job.transfers.append(self._view.write_blocks(places, data, partial(self._check, job, blocks)))
        return 0 if job.waiting else room

    def _check(self, job: _Job, blocks: Sequence[LoadBlock], number: int, parts: Parts) -> None:
        block = blocks[number]
        chunk = self._region.chunk(block.chunk_id)
        if block.digest is not None and not self._chunks.is_right(block.group, parts, chunk, block.digest):
            job.bad.append(self._range(block))

    def _range(self, block: LoadBlock) -> BadRange:
        return BadRange(block.group, block.index * self._block_size, (block.index + 1) * self._block_size)
