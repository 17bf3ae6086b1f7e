"""The worker's part of the `OffloadingConnector`: copies between engine blocks and chunks, makes and checks digests.

A digest is made from the bytes in the engine's cache and checked on the bytes that have landed there, so that whatever
happens on the way, in memory, on a disk or by a wrong chunk id, shows.
"""

from __future__ import annotations

from penstock.kv_transfer.digest import digest
from penstock.kv_transfer.null import NullWorkerConnector
from penstock.kv_transfer.offload.messages import LoadBlock, OffloadLoad, OffloadMetadata, OffloadStore, StoreBlock
from penstock.kv_transfer.offload.region import OffloadRegion
from penstock.kv_transfer.view import KVCacheView
from penstock.messages.kv_transfer import (
    BadRange,
    KVConnectorMetadata,
    KVConnectorOutput,
    ShardId,
    TransferReport,
    TransferStatus,
)


class OffloadingWorker(NullWorkerConnector):
    """Copies in the worker's thread: in the order of the steps, so that no block is overwritten before it was read."""

    def __init__(self, region: OffloadRegion, shard: ShardId, block_size: int) -> None:
        self._region = region
        self._shard = shard
        self._block_size = block_size
        self._loads: tuple[OffloadLoad, ...] = ()
        self._reports: list[TransferReport] = []

    def register_kv_caches(self, view: KVCacheView) -> None:
        self._view = view

    def begin_step(self, metadata: KVConnectorMetadata) -> None:
        assert isinstance(metadata, OffloadMetadata), metadata
        self._loads = metadata.loads
        self._reports += map(self._store, metadata.stores)

    def start_load_kv(self) -> None:
        self._reports += map(self._load, self._loads)

    def get_finished(self, finished_request_ids: frozenset[str]) -> KVConnectorOutput:
        reports, self._reports = tuple(self._reports), []
        return KVConnectorOutput(reports)

    def end_step(self) -> None:
        self._loads = ()

    def _store(self, store: OffloadStore) -> TransferReport:
        digests = tuple(map(self._store_block, store.blocks))
        return TransferReport(store.job_id, self._shard, TransferStatus.DONE, digests=digests)

    def _store_block(self, block: StoreBlock) -> bytes:
        """The digest, empty where none was asked for."""
        self._view.read_block(block.group, block.block_id, self._chunk(block.group, block.chunk_id))
        return self._digest(block.group, block.block_id) if block.is_attested else b""

    def _load(self, load: OffloadLoad) -> TransferReport:
        bad = tuple(self._range(block) for block in load.blocks if not self._load_block(block))
        status = TransferStatus.FAILED if bad else TransferStatus.DONE
        return TransferReport(load.job_id, self._shard, status, bad)

    def _load_block(self, block: LoadBlock) -> bool:
        self._view.write_block(block.group, block.block_id, self._chunk(block.group, block.chunk_id))
        return block.digest is None or block.digest == self._digest(block.group, block.block_id)

    def _chunk(self, group: int, chunk_id: int) -> memoryview:
        return self._region.chunk(chunk_id)[: self._view.block_bytes(group)]

    def _digest(self, group: int, block_id: int) -> bytes:
        return digest(*self._view.block_parts(group, block_id))

    def _range(self, block: LoadBlock) -> BadRange:
        return BadRange(block.group, block.index * self._block_size, (block.index + 1) * self._block_size)
