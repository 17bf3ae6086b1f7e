"""The worker's part of the `OffloadingConnector`: copies between engine blocks and chunks, makes and checks digests.

A digest is made from the bytes in the engine's cache and checked on the bytes that have landed there, so that whatever
happens on the way, in memory, on a disk or by a wrong chunk id, shows.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.kv_transfer.null import NullWorkerConnector
from penstock.kv_transfer.offload.messages import LoadBlock, OffloadLoad, OffloadMetadata, OffloadStore, StoreBlock
from penstock.kv_transfer.offload.region import OffloadRegion
from penstock.kv_transfer.view import KVCacheView, Parts, Transfer
from penstock.messages.kv_transfer import (
    BadRange,
    KVConnectorMetadata,
    KVConnectorOutput,
    ShardId,
    TransferReport,
    TransferStatus,
)
from penstock.utils.digest import digest


class OffloadingWorker(NullWorkerConnector):
    """Transfers begin in the order of the steps, so that no block is overwritten before it was read. They end when they
    end, which is at once where the host sees the cache, and are reported with the step that finds them ended."""

    def __init__(self, region: OffloadRegion, shard: ShardId, block_size: int) -> None:
        self._region = region
        self._shard = shard
        self._block_size = block_size
        self._loads: tuple[OffloadLoad, ...] = ()
        self._open: list[tuple[Transfer, Callable[[], TransferReport]]] = []

    def register_kv_caches(self, view: KVCacheView) -> None:
        self._view = view

    def begin_step(self, metadata: KVConnectorMetadata | None) -> None:
        assert isinstance(metadata, OffloadMetadata), metadata
        self._loads = metadata.loads
        self._open += map(self._store, metadata.stores)

    def start_load_kv(self) -> None:
        self._open += map(self._load, self._loads)

    def get_finished(self, finished_request_ids: frozenset[str]) -> KVConnectorOutput:
        ended = [(transfer, report) for transfer, report in self._open if transfer.done()]
        self._open = [each for each in self._open if each not in ended]
        for transfer, _ in ended:
            transfer.result()
        return KVConnectorOutput(tuple(report() for _, report in ended))

    def end_step(self) -> None:
        self._loads = ()

    def shutdown(self) -> None:
        for transfer, _ in self._open:
            transfer.result()

    def _store(self, store: OffloadStore) -> tuple[Transfer, Callable[[], TransferReport]]:
        chunks = [self._chunk(block) for block in store.blocks]
        digests = [b""] * len(chunks)  # empty where none was asked for

        def take(number: int, parts: Parts) -> None:
            start = 0
            for part in parts:
                chunks[number][start : start + len(part)] = part
                start += len(part)
            if store.blocks[number].is_attested:
                digests[number] = digest(*parts)

        transfer = self._view.read_blocks([(block.group, block.block_id) for block in store.blocks], take)
        return transfer, lambda: TransferReport(store.job_id, self._shard, TransferStatus.DONE, digests=tuple(digests))

    def _load(self, load: OffloadLoad) -> tuple[Transfer, Callable[[], TransferReport]]:
        bad: list[BadRange] = []

        def take(number: int, parts: Parts) -> None:
            block = load.blocks[number]
            if block.digest is not None and block.digest != digest(*parts):
                bad.append(self._range(block))

        def report() -> TransferReport:
            status = TransferStatus.FAILED if bad else TransferStatus.DONE
            return TransferReport(load.job_id, self._shard, status, tuple(bad))

        chunks = [self._chunk(block) for block in load.blocks]
        places = [(block.group, block.block_id) for block in load.blocks]
        return self._view.write_blocks(places, chunks, take), report

    def _chunk(self, block: StoreBlock | LoadBlock) -> memoryview:
        return self._region.chunk(block.chunk_id)[: self._view.block_bytes(block.group)]

    def _range(self, block: LoadBlock) -> BadRange:
        return BadRange(block.group, block.index * self._block_size, (block.index + 1) * self._block_size)
