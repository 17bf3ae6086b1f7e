"""The reference connector: engines save blocks to an external store and load them from it over a transport.

The store is a memory and a directory. A block's place in it has room for all layers and heads, so engines with
different splits share it. Every (layer, head) of a block has the digest of the bytes that were saved; a load checks the
received bytes. Ownership:

    a place    belongs to one key from `begin_save` on; it is given to another only when it has no reader and nothing
               that was begun for it can still write (the saver has reported, or its endpoint is quiet)
    a load     pins the places that it reads until all shards have reported
    a save     copies a block aside before the step writes anything ("staged"), or, when the request has ended, writes
               straight out of the engine's blocks and holds them ("direct")
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import msgspec

from penstock.core.kv_cache_groups import AttentionGroup
from penstock.kv_transfer.connector import (
    FREED,
    NO_MATCH,
    PENDING,
    ConnectorEvent,
    FinishAction,
    FinishResult,
    LoadEnded,
    Match,
    Released,
    RequestView,
)
from penstock.kv_transfer.ledger import TransferLedger, bad_ranges
from penstock.kv_transfer.null import NullSchedulerConnector
from penstock.messages.kv_cache_spec import NULL_BLOCK, KVCacheConfig
from penstock.messages.kv_transfer import (
    BadRange,
    HandshakePayload,
    KVConnectorMetadata,
    KVConnectorOutput,
    ShardId,
    TransferId,
    TransferReport,
)
from penstock.messages.outputs import FinishReason
from penstock.messages.scheduler_output import BlockIds, BlockTable, SchedulerOutput
from penstock.simulation.memory_transport import MemoryFabric, MemoryTransport
from penstock.simulation.oracle import NUM_HEADS, WORD_BYTES, OracleLayer
from penstock.simulation.trace import ViolationError, hash_name
from penstock.utils.clock import Clock
from penstock.utils.wire import register_kind

BlockKey = tuple[int, bytes]
"""(KV group, block hash)."""

Part = tuple[str, int]
"""(layer name, head)."""


def digest(data: memoryview) -> bytes:
    return blake2b(data, digest_size=8).digest()


@dataclass(slots=True, eq=False)
class Entry:
    """A key's place. It is readable when every part has its digest."""

    key: BlockKey
    place: int
    life: int
    digests: dict[Part, bytes] = field(default_factory=dict[Part, bytes])
    is_ready: bool = False
    readers: list[str] = field(default_factory=list[str])


class BlockStore:
    """A store of `num_places` blocks, independent of the life of any engine."""

    def __init__(self, fabric: MemoryFabric, layers: Sequence[OracleLayer], block_size: int, num_places: int) -> None:
        self.fabric = fabric
        self.part_bytes = block_size * WORD_BYTES
        self._offsets = {
            (layer.name, head): (number * NUM_HEADS + head) * self.part_bytes
            for number, layer in enumerate(layers)
            for head in range(NUM_HEADS)
        }
        self._parts = {
            group: frozenset(part for layer in layers if layer.group == group for part in self._parts_of(layer))
            for group in {layer.group for layer in layers}
        }
        self._place_bytes = len(self._offsets) * self.part_bytes
        self.num_places = num_places
        self.num_rejected = 0
        self._open()

    def _open(self) -> None:
        self.transport = self.fabric.endpoint("store")
        self.memory = bytearray(b"\xee" * (self.num_places * self._place_bytes))
        self.transport.register([memoryview(self.memory)])
        self.entries: OrderedDict[BlockKey, Entry] = OrderedDict()
        self._free = list(range(self.num_places))
        self._quarantine: list[tuple[MemoryTransport, int]] = []
        self._saving: dict[Entry, tuple[MemoryTransport, ...]] = {}

    @staticmethod
    def _parts_of(layer: OracleLayer) -> list[Part]:
        return [(layer.name, head) for head in range(NUM_HEADS)]

    def parts(self, group: int) -> frozenset[Part]:
        """Returns the parts of a block of the group."""
        return self._parts[group]

    @property
    def life(self) -> int:
        return self.transport.life

    def restart(self) -> None:
        """Loses all content and continues under the same name."""
        self.fabric.crash(self.transport)
        self._open()

    def offset(self, place: int, part: Part) -> int:
        return place * self._place_bytes + self._offsets[part]

    def find(self, key: BlockKey) -> Entry | None:
        """Returns the entry if it can be loaded."""
        entry = self.entries.get(key)
        return entry if entry is not None and entry.is_ready else None

    def pin(self, entry: Entry, reader: str) -> None:
        entry.readers.append(reader)
        self.entries.move_to_end(entry.key)

    def unpin(self, entry: Entry, reader: str) -> None:
        entry.readers.remove(reader)

    def begin_save(self, key: BlockKey, savers: tuple[MemoryTransport, ...]) -> Entry | None:
        """Returns a place for a block that the store does not have, or None. Evicts the least recently used entry."""
        if key in self.entries:
            return None
        if not self._free:
            victim = next((each for each in self.entries.values() if each.is_ready and not each.readers), None)
            if victim is None:
                self.num_rejected += 1
                return None
            self._drop(victim)
        entry = Entry(key, self._free.pop(), self.life)
        self.entries[key] = entry
        self._saving[entry] = savers
        return entry

    def end_save(self, entry: Entry, digests: Mapping[Part, bytes]) -> None:
        """Called when all shards have reported and nothing writes to the place any more. It is kept if all its parts
        have a digest.
        """
        if entry.life != self.life or entry not in self._saving:
            return
        del self._saving[entry]
        if digests.keys() == self._parts[entry.key[0]]:
            entry.digests = dict(digests)
            entry.is_ready = True
        else:
            self._drop(entry)

    def forget_saver(self, saver: MemoryTransport) -> None:
        """A saver has died: its places are quarantined until none of its transfers is in flight."""
        for entry in [entry for entry, savers in self._saving.items() if saver in savers]:
            others = self._saving.pop(entry)
            del self.entries[entry.key]
            self._quarantine += [(each, entry.place) for each in others]

    def forget_reader(self, name: str) -> None:
        """All lives of the engine `name` have ended and read nothing any more."""
        for entry in self.entries.values():
            entry.readers = [reader for reader in entry.readers if reader.rpartition(".")[0] != name]

    def tick(self) -> None:
        waiting, self._quarantine = self._quarantine, []
        self._quarantine = [(who, place) for who, place in waiting if not self.fabric.is_quiet(who)]
        held = {place for _, place in self._quarantine}
        self._free += sorted({place for _, place in waiting} - held)

    def _drop(self, entry: Entry) -> None:
        del self.entries[entry.key]
        self._free.append(entry.place)

    def check_integrity(self) -> None:
        used = [entry.place for entry in self.entries.values()]
        held = {place for _, place in self._quarantine}
        every = sorted([*used, *self._free, *held])
        assert every == list(range(self.num_places)), f"places of the store: {every}"

    def check_digests(self, entry: Entry, contents: Callable[[int, bytes, str, int], bytes | None]) -> None:
        """Checks that the content saved under a key is what every prompt with that key determines."""
        group, block_hash = entry.key
        for layer_name, head in sorted(self._parts[group]):
            right = contents(group, block_hash, layer_name, head)
            found = entry.digests.get((layer_name, head))
            if right is None or found != digest(memoryview(right)):
                name = hash_name(block_hash)
                raise ViolationError(f"the store accepted wrong KV: {name}, {layer_name}", name)

    def check_idle(self) -> None:
        assert not self._saving, f"{len(self._saving)} saves never ended"
        assert not self._quarantine, "places of the store never leave quarantine"
        pinned = [entry.place for entry in self.entries.values() if entry.readers]
        assert not pinned, f"places of the store are pinned without a reader: {pinned}"


class BlockCopy(msgspec.Struct, frozen=True):
    """One block between an engine and the store. `index` is its place in the request's table."""

    group: int
    index: int
    block_id: int
    place: int
    digests: dict[Part, bytes]


class StoreJob(msgspec.Struct, frozen=True):
    """`transfer_id` is unique among all lives of the engine; `store` is the store's descriptor."""

    transfer_id: TransferId
    store: bytes
    copies: tuple[BlockCopy, ...]
    is_sync: bool = False
    is_staged: bool = True


@register_kind
class StoreMetadata(KVConnectorMetadata, msgspec.Struct, frozen=True, tag=True):
    loads: tuple[StoreJob, ...] = ()
    saves: tuple[StoreJob, ...] = ()

    @property
    def has_sync_loads(self) -> bool:
        return any(job.is_sync for job in self.loads)


@register_kind
class StoreHandshake(HandshakePayload, msgspec.Struct, frozen=True, tag=True):
    """The parts of a block that a rank has, in the order of the digests that it reports."""

    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StorePolicy:
    """`sync_share` of the requests load in the step that needs the KV. `direct_saves`: also save the last blocks of a
    finished request, directly from the blocks. Directory answers take `lookup_seconds`.
    """

    sync_share: float = 0.0
    direct_saves: bool = False
    lookup_seconds: float = 0.0


@dataclass(slots=True)
class _Load:
    first: int  # tokens
    end: int
    entries: list[Entry]
    missing: tuple[BadRange, ...]


@dataclass(slots=True)
class _Save:
    entries: list[Entry]
    held_for: TransferId | None = None  # the hold on the blocks that it reads


class StoreScheduler(NullSchedulerConnector):
    """The scheduler's part. `endpoints` are the endpoints of all ranks; `life` names this life."""

    def __init__(
        self,
        store: BlockStore,
        cache: KVCacheConfig,
        endpoints: Mapping[ShardId, MemoryTransport],
        policy: StorePolicy,
        clock: Clock,
        life: str,
    ) -> None:
        self._store = store
        self._groups = [AttentionGroup(group.spec, cache.block_size) for group in cache.groups]
        self._block_size = cache.block_size
        self._endpoints = endpoints
        self._parts: dict[ShardId, tuple[Part, ...]] = {}
        self._policy = policy
        self._clock = clock
        self._life = life
        self._ledger = TransferLedger[None]()
        self._loads: dict[TransferId, _Load] = {}
        self._saves: dict[TransferId, _Save] = {}
        self._new_loads: list[StoreJob] = []
        self._new_saves: list[StoreJob] = []
        self._asked_at: dict[str, float] = {}
        self._num_complete: dict[str, int] = {}
        self._num_saves = 0
        self._num_stale_reports = 0

    def set_xfer_handshake_metadata_pp_aware(self, payloads: Mapping[ShardId, HandshakePayload | None]) -> None:
        assert payloads.keys() == self._endpoints.keys(), f"handshakes of {sorted(payloads)}"
        for shard, payload in payloads.items():
            assert isinstance(payload, StoreHandshake), f"rank {shard} sent {payload} as its handshake"
            self._parts[shard] = payload.parts

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> Match:
        first = num_computed_tokens // self._block_size
        length = (request.num_tokens - 1) // self._block_size
        hashes = request.block_hashes
        while length > first:
            before = length
            for number, group in enumerate(self._groups):
                length = group.longest_hit(
                    lambda i, n=number: i < first or self._store.find((n, hashes[i])) is not None, length
                )
            if length == before:
                break
        if length <= first:
            return NO_MATCH
        asked_at = self._asked_at.get(request.request_id)
        if asked_at is not None and self._clock.now() - asked_at < self._policy.lookup_seconds:
            return PENDING
        return Match((length - first) * self._block_size, is_async=not self._is_sync(request))

    def _is_sync(self, request: RequestView) -> bool:
        return random.Random(request.request_id).random() < self._policy.sync_share

    def on_new_request(self, request: RequestView) -> None:
        self._asked_at[request.request_id] = self._clock.now()

    def update_state_after_alloc(
        self, request: RequestView, transfer_id: TransferId, block_ids: BlockIds, num_computed_tokens: int, end: int
    ) -> None:
        size = self._block_size
        copies: list[BlockCopy] = []
        entries: list[Entry] = []
        missing: list[BadRange] = []
        for group, table in enumerate(block_ids):
            for index in range(num_computed_tokens // size, end // size):
                if table[index] == NULL_BLOCK:
                    continue
                entry = self._store.find((group, request.block_hashes[index]))
                if entry is None:
                    missing.append(BadRange(group, index * size, (index + 1) * size))
                    continue
                self._store.pin(entry, self._life)
                entries.append(entry)
                copies.append(BlockCopy(group, index, table[index], entry.place, entry.digests))
        self._loads[transfer_id] = _Load(num_computed_tokens, end, entries, tuple(missing))
        self._new_loads.append(self._open(transfer_id, copies, is_sync=self._is_sync(request)))

    def on_blocks_complete(self, request: RequestView, block_ids: BlockTable, first: int, end: int) -> None:
        if self._policy.direct_saves:
            self._num_complete[request.request_id] = end
        else:
            self._save(request, block_ids, first, end, is_staged=True)

    def _save(self, request: RequestView, block_ids: BlockTable, first: int, end: int, *, is_staged: bool) -> bool:
        """Saves blocks that the store does not have; returns whether there are any."""
        savers = tuple(self._endpoints.values())
        copies: list[BlockCopy] = []
        entries: list[Entry] = []
        for group, table in enumerate(block_ids):
            for index in range(first, end):
                if table[index] == NULL_BLOCK:
                    continue
                entry = self._store.begin_save((group, request.block_hashes[index]), savers)
                if entry is not None:
                    entries.append(entry)
                    copies.append(BlockCopy(group, index, table[index], entry.place, {}))
        if copies:
            self._num_saves += 1
            transfer_id = TransferId(request.request_id, -1, part=self._num_saves)
            self._saves[transfer_id] = _Save(entries, None if is_staged else request.hold_id)
            self._new_saves.append(self._open(transfer_id, copies, is_staged=is_staged))
        return bool(copies)

    def _open(self, transfer_id: TransferId, copies: Sequence[BlockCopy], **kwargs: bool) -> StoreJob:
        self._ledger.open(transfer_id, self._endpoints, None)
        return StoreJob(self._on_wire(transfer_id), self._store.transport.descriptor(), tuple(copies), **kwargs)

    def _on_wire(self, transfer_id: TransferId) -> TransferId:
        return msgspec.structs.replace(transfer_id, epoch=str(self._life))

    def build_connector_meta(self, plan: SchedulerOutput) -> StoreMetadata:
        for request_id in plan.preempted_request_ids:
            self._num_complete.pop(request_id, None)
        metadata = StoreMetadata(tuple(self._new_loads), tuple(self._new_saves))
        self._new_loads.clear()
        self._new_saves.clear()
        return metadata

    def update_connector_output(self, output: KVConnectorOutput) -> Sequence[ConnectorEvent]:
        events: list[ConnectorEvent] = []
        for report in output.reports:
            transfer_id = msgspec.structs.replace(report.transfer_id, epoch="")
            if report.transfer_id.epoch != self._life:
                self._num_stale_reports += 1
                continue
            _, reports = self._ledger.apply(
                TransferReport(transfer_id, report.shard, report.status, report.bad_ranges, report.digests)
            ) or (None, ())
            if reports and transfer_id in self._loads:
                events.append(self._end_load(transfer_id, reports))
            elif reports:
                events += self._end_save(self._saves.pop(transfer_id), reports)
        return events

    def _end_load(self, transfer_id: TransferId, reports: Sequence[TransferReport]) -> LoadEnded:
        load = self._loads.pop(transfer_id)
        for entry in load.entries:
            self._store.unpin(entry, self._life)
        bad = bad_ranges(reports, len(self._groups), load.first, load.end)
        return LoadEnded(transfer_id, (*bad, *load.missing))

    def _end_save(self, save: _Save, reports: Sequence[TransferReport]) -> list[ConnectorEvent]:
        """Ends a save; each shard reports the digests of its parts, block by block."""
        digests: list[dict[Part, bytes]] = [{} for _ in save.entries]
        for report in reports:
            found = iter(report.digests)
            for entry, of_entry in zip(save.entries, digests, strict=True):
                parts = [part for part in self._parts[report.shard] if part in self._store.parts(entry.key[0])]
                of_entry.update(zip(parts, found, strict=False))
        for entry, of_entry in zip(save.entries, digests, strict=True):
            self._store.end_save(entry, of_entry)
        return [Released(save.held_for)] if save.held_for else []

    def request_finished(self, request: RequestView, block_ids: BlockIds, reason: FinishReason) -> FinishResult:
        self._asked_at.pop(request.request_id, None)
        end = self._num_complete.pop(request.request_id, 0)
        is_read = bool(block_ids) and self._save(request, block_ids, 0, end, is_staged=False)
        return FinishResult(FinishAction.HOLD) if is_read else FREED

    @property
    def has_pending_work(self) -> bool:
        return bool(self._ledger)

    def counters(self) -> Mapping[str, float]:
        return {
            "store_stale_reports_total": self._num_stale_reports,
            "store_duplicate_reports_total": self._ledger.num_duplicates,
            "store_unknown_reports_total": self._ledger.num_unknown,
        }

    def check_integrity(self) -> None:
        self._ledger.check_integrity()
        open_ids = self._loads.keys() | self._saves.keys()
        assert len(open_ids) == len(self._ledger), (open_ids, len(self._ledger))
        self._store.check_integrity()


class StagelessStoreScheduler(StoreScheduler):
    """The same for engines without pipeline stages: ranks are identified by their tensor rank alone."""

    set_xfer_handshake_metadata_pp_aware = NullSchedulerConnector.set_xfer_handshake_metadata_pp_aware

    def set_xfer_handshake_metadata(self, payloads: Mapping[int, HandshakePayload | None]) -> None:
        super().set_xfer_handshake_metadata_pp_aware({(0, number): payload for number, payload in payloads.items()})
