"""The reference connector's worker part: moves one rank's bytes to and from the store (`simulation/store.py`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from penstock.kv_transfer.null import NullWorkerConnector
from penstock.kv_transfer.transports.base import PeerId, TransferHandle, TransferState
from penstock.kv_transfer.view import KVCacheView, gather
from penstock.messages.kv_transfer import (
    BadRange,
    KVConnectorMetadata,
    KVConnectorOutput,
    ShardId,
    TransferId,
    TransferReport,
    TransferStatus,
)
from penstock.simulation.memory_transport import MemoryTransport
from penstock.simulation.oracle import OracleMemory
from penstock.simulation.store import (
    BlockCopy,
    BlockStore,
    Part,
    StoreHandshake,
    StoreJob,
    StoreMetadata,
    digest,
)
from penstock.utils.clock import Clock
from penstock.utils.errors import PeerError
from penstock.utils.layer_hooks import LayerHooks


@dataclass(slots=True)
class _Open:
    """A job in progress: its transfers, and the staging slots that they read."""

    job: StoreJob
    is_load: bool
    started: float
    handles: list[TransferHandle] = field(default_factory=list[TransferHandle])
    staging: list[int] = field(default_factory=list[int])
    digests: list[bytes] = field(default_factory=list[bytes])
    peer: PeerId = ""
    has_failed: bool = False
    is_given_up: bool = False


class StoreWorker(NullWorkerConnector):
    """Cancels a transfer after `patience` seconds by closing the connection, which settles everything on it.
    `num_staging` blocks can be staged at once; further saves fail, which only costs a later hit.
    """

    def __init__(
        self,
        shard: ShardId,
        transport: MemoryTransport,
        store: BlockStore,
        clock: Clock,
        patience: float,
        num_staging: int,
    ) -> None:
        self._shard = shard
        self._transport = transport
        self._store = store
        self._clock = clock
        self._patience = patience
        self._num_staging = num_staging
        self._free_staging: list[int] = list(range(num_staging))
        self._metadata = StoreMetadata()
        self._staged: dict[TransferId, _Open] = {}
        self._open: list[_Open] = []
        self.num_bad_digests = 0

    def register_kv_caches(self, view: KVCacheView) -> None:
        assert isinstance(view, OracleMemory), "the store's transfers go straight into the memory"
        self._view = view
        regions = [memoryview(view.regions[region.name]) for region in view.layout.regions]
        ends = list(accumulate(map(len, regions), initial=0))
        self._bases = {region.name: base for region, base in zip(view.layout.regions, ends, strict=False)}
        self._staging_base = ends[-1]
        self._slot_bytes = max(view.layout.block_bytes(group) for group in range(len(view.config.groups)))
        self._staging_memory = bytearray(self._num_staging * self._slot_bytes)
        self._transport.register([*regions, memoryview(self._staging_memory)])

    def block_at(self, offset: int) -> int | None:
        """Returns the block that contains this byte of the registered memory; None for staging memory."""
        if offset >= self._staging_base:
            return None
        base = max(base for base in self._bases.values() if base <= offset)
        return (offset - base) // self._view.stride

    def get_handshake_metadata(self) -> StoreHandshake:
        names = [name for group in range(len(self._view.config.groups)) for name in self._view.layer_names(group)]
        return StoreHandshake(tuple((name, head) for name in names for head in self._view.heads))

    def begin_step(self, metadata: KVConnectorMetadata | None) -> None:
        assert isinstance(metadata, StoreMetadata), metadata
        self._metadata = metadata
        for job in metadata.saves:
            save = _Open(job, is_load=False, started=self._clock.now())
            if job.is_staged:
                self._stage(save)
            save.digests = [digest(self._part(copy, part)) for copy in job.copies for part in self._parts(copy)]
            self._staged[job.transfer_id] = save

    def start_load_kv(self) -> None:
        for job in self._metadata.loads:
            load = _Open(job, is_load=True, started=self._clock.now())
            self._begin(load)
            self._open.append(load)
            if job.is_sync:
                self._await(load)

    def _begin(self, load: _Open) -> None:
        self._submit(load, [self._runs(copy, self._layer_names(copy)) for copy in load.job.copies])

    def _await(self, load: _Open) -> None:
        """Waits for a load that the current step needs."""
        self._wait(load, load.handles)

    def wait_for_save(self) -> None:
        # Only now has the step's own traffic ended on the network.
        for job in self._metadata.saves:
            save = self._staged.pop(job.transfer_id)
            if not save.has_failed:
                slots = save.staging or [-1] * len(job.copies)
                runs = [
                    self._runs(copy, self._layer_names(copy), slot)
                    for copy, slot in zip(job.copies, slots, strict=True)
                ]
                self._submit(save, runs)
            self._open.append(save)

    def get_finished(self, finished_request_ids: frozenset[str]) -> KVConnectorOutput:
        ended = [each for each in self._open if self._has_settled(each)]
        self._open = [each for each in self._open if each not in ended]
        return KVConnectorOutput(tuple(self._report(each) for each in ended))

    def end_step(self) -> None:
        self._metadata = StoreMetadata()

    def shutdown(self) -> None:
        self._transport.close()

    def check_idle(self) -> None:
        """Checks that no job is open and nothing is staged."""
        assert not self._open and not self._staged, f"{self._shard}: {len(self._open)} jobs, {len(self._staged)} saves"
        free = sorted(self._free_staging)
        assert free == list(range(self._num_staging)), f"{self._shard}: staging slots {free} are free"

    def _stage(self, save: _Open) -> None:
        if len(save.job.copies) > len(self._free_staging):
            save.has_failed = True
            return
        for copy in save.job.copies:
            slot = self._free_staging.pop()
            save.staging.append(slot)
            into = memoryview(self._staging_memory)[slot * self._slot_bytes :]
            gather(self._view.block_parts(copy.group, copy.block_id), into)

    def _submit(self, each: _Open, runs: Sequence[np.ndarray]) -> None:
        """Begins one transfer per block, so that some may fail while others are in progress."""
        begin = self._transport.submit if each.is_load else self._transport.write
        try:
            each.peer = self._transport.connect(each.job.store)
            each.handles += [begin(each.peer, of_block) for of_block in runs]
        except PeerError:
            each.has_failed = True

    def _wait(self, each: _Open, handles: list[TransferHandle]) -> None:
        while not (self._has_settled(each) or all(self._transport.poll(handle).is_settled for handle in handles)):
            self._transport.wait(handles, self._patience)

    def _has_settled(self, each: _Open) -> bool:
        states = [self._transport.poll(handle) for handle in each.handles]
        is_late = self._clock.now() - each.started >= self._patience
        is_lost = TransferState.FAILED_UNSETTLED in states or (TransferState.PENDING in states and is_late)
        if is_lost and not each.is_given_up:
            each.is_given_up = True
            self._transport.disconnect(each.peer)
        each.has_failed = each.has_failed or any(state is TransferState.FAILED_SETTLED for state in states)
        return all(state.is_settled for state in states)

    def _report(self, each: _Open) -> TransferReport:
        self._free_staging += each.staging
        transfer_id = each.job.transfer_id
        if each.is_load:
            bad = self._find_bad(each.job)
            status = TransferStatus.FAILED if bad else TransferStatus.DONE
            return TransferReport(transfer_id, self._shard, status, bad)
        if each.has_failed:
            return TransferReport(transfer_id, self._shard, TransferStatus.FAILED)
        return TransferReport(transfer_id, self._shard, TransferStatus.DONE, digests=tuple(each.digests))

    def _find_bad(self, job: StoreJob) -> tuple[BadRange, ...]:
        """Returns the blocks that differ from what was saved, however the transfers ended."""
        size = self._view.block_size
        bad = [copy for copy in job.copies if not self._is_right(copy)]
        self.num_bad_digests += len(bad)
        return tuple(BadRange(copy.group, copy.index * size, (copy.index + 1) * size) for copy in bad)

    def _is_right(self, copy: BlockCopy) -> bool:
        return all(digest(self._part(copy, part)) == copy.digests.get(part) for part in self._parts(copy))

    def _part(self, copy: BlockCopy, part: Part) -> memoryview:
        return self._view.head_bytes(part[0], copy.block_id, part[1])

    def _parts(self, copy: BlockCopy) -> Iterator[Part]:
        return ((name, head) for name in self._view.layer_names(copy.group) for head in self._view.heads)

    def _layer_names(self, copy: BlockCopy) -> tuple[str, ...]:
        return self._view.layer_names(copy.group)

    def _runs(self, copy: BlockCopy, layer_names: Sequence[str], slot: int = -1) -> np.ndarray:
        """Returns the parts of a block in these layers, in the engine's memory or in a staging slot, and their location
        in the store: [n, 3] int64.
        """
        size = self._store.part_bytes
        runs: list[tuple[int, int, int]] = []
        for number, part in enumerate(self._parts(copy)):
            name, head = part
            if name not in layer_names:
                continue
            if slot >= 0:
                local = self._staging_base + slot * self._slot_bytes + number * size
            else:
                local = self._bases[name] + copy.block_id * self._view.stride + (head - self._view.heads.start) * size
            runs.append((local, self._store.offset(copy.place, part), size))
        return np.array(runs, np.int64).reshape(-1, 3)


class LayerwiseStoreWorker(StoreWorker):
    """Waits for a step's own loads layer by layer while it runs, and for the drafter's layers before it drafts."""

    @property
    def layer_hooks(self) -> LayerHooks:
        return self

    def register_kv_caches(self, view: KVCacheView) -> None:
        super().register_kv_caches(view)
        self._awaited: list[tuple[_Open, dict[str, list[TransferHandle]]]] = []
        self._of_layer: dict[str, list[TransferHandle]] = {}

    def _begin(self, load: _Open) -> None:
        self._of_layer = {}
        for copy in load.job.copies:
            for name in self._view.layer_names(copy.group):
                start = len(load.handles)
                self._submit(load, [self._runs(copy, [name])])
                self._of_layer.setdefault(name, []).extend(load.handles[start:])

    def _await(self, load: _Open) -> None:
        self._awaited.append((load, self._of_layer))

    def wait_for_layer_load(self, layer_name: str) -> None:
        for load, of_layer in self._awaited:
            self._wait(load, of_layer.get(layer_name, []))

    def save_kv_layer(self, layer_name: str) -> None: ...

    def get_finished(self, finished_request_ids: frozenset[str]) -> KVConnectorOutput:
        for load, _ in self._awaited:
            self._wait(load, load.handles)
        return super().get_finished(finished_request_ids)

    def end_step(self) -> None:
        super().end_step()
        self._awaited.clear()
