"""The jobs of the workers of all ranks: what they do with the next step, and the results of their reports.

A job is named by the engine's epoch and the transfer, so that a late report from an earlier epoch matches no job. It
ends when every rank of this engine has reported, even one that has no part in it: so the expected reports do not depend
on what a peer declares, and no rank is still at work. Digests that are dropped are not awaited.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from penstock.kv_transfer.ledger import TransferLedger, bad_ranges
from penstock.kv_transfer.p2p.consumer import Load
from penstock.kv_transfer.p2p.known_digests import Reading
from penstock.kv_transfer.p2p.messages import (
    DigestJob,
    Grant,
    Hello,
    P2PMetadata,
    PeerShards,
    ReadJob,
    Shard,
    ShardDigests,
)
from penstock.kv_transfer.p2p.producer import Digest
from penstock.kv_transfer.p2p.session import engine_key
from penstock.kv_transfer.topology.pieces import check_order, digest_edges, digest_unit
from penstock.kv_transfer.topology.planner import sources
from penstock.kv_transfer.topology.tables import TransferTopology, engine_infos
from penstock.messages.kv_cache_spec import NULL_BLOCK
from penstock.messages.kv_transfer import BadRange, ShardId, TransferId, TransferReport, TransferStatus
from penstock.utils.errors import PeerError
from penstock.utils.math import cdiv

_OWN = "this engine"
"""This engine's name in its own table; the names of other engines, from `engine_key`, contain a slash."""


@dataclass(frozen=True, slots=True)
class Digested:
    """`digests` is None if a rank could not make them."""

    job_id: TransferId
    digests: tuple[ShardDigests, ...] | None


@dataclass(frozen=True, slots=True)
class ReadEnded:
    """Nothing of the read moves any more. Unless it `is_complete`, none of its KV is usable."""

    load: Load
    bad_ranges: tuple[BadRange, ...]
    is_complete: bool


class WorkerJobs:
    """`shards` are the engine's ranks, and `num_groups` is its number of KV groups."""

    def __init__(self, epoch: str, shards: Mapping[ShardId, Shard], num_groups: int) -> None:
        self._epoch = epoch
        self._num_groups = num_groups
        self._own = shards
        layouts = {shard: each.layout for shard, each in shards.items()}
        self.block_size = next((layout.block_size for layout in layouts.values()), 1)
        self._topology = TransferTopology(_OWN, self.block_size, layouts)
        self.own_reading = self._make_reading(shards)
        self._readings: dict[str, Reading] = {"": self.own_reading}
        self._is_own_told = False
        self._ledger = TransferLedger[Digest | Load]()
        # Engines that have declared their ranks to this one, and those of them that the workers know.
        self._known: dict[str, Hello] = {}
        self._told: set[str] = set()
        # What the next step's metadata tells the workers.
        self._new_peers: list[PeerShards] = []
        self._new_digests: list[DigestJob] = []
        self._new_reads: list[ReadJob] = []
        self._cancelled: list[TransferId] = []
        self._dropped: list[TransferId] = []

    # ---- Engines ----

    def register(self, peer: Hello, *, is_source: bool) -> None:
        """Adds an engine. Raises PeerError if the KV of one engine does not fit the other.

        What another one declares under the same name has no effect. `forget_unused` removes what a failure leaves.
        """
        key, layouts = engine_key(peer), {each.shard: each.layout for each in peer.shards}
        self._known.setdefault(key, peer)
        for info in engine_infos(key, peer.shards[0].layout.block_size, layouts):
            self._topology.register(info)
        if is_source:
            for shard, each in self._own.items():
                for sender, slices in self._topology.sources(key, shard).items():
                    check_order(each.layout, layouts[sender], slices)
        else:
            reading = self._make_reading({each.shard: each for each in peer.shards})
            self._readings[key] = next((each for each in self._readings.values() if each == reading), reading)

    def _make_reading(self, readers: Mapping[ShardId, Shard]) -> Reading:
        """Returns how these ranks read from this engine's. Raises PeerError if they cannot."""
        own = {shard: each.layout for shard, each in self._own.items()}
        found = {shard: sources(each.layout, own, shard) for shard, each in sorted(readers.items())}
        parts = tuple(
            (producer, tuple((reader, slices[producer]) for reader, slices in found.items() if producer in slices))
            for producer in sorted(own)
        )
        block_size = next((each.layout.block_size for each in readers.values()), 1)
        return Reading(digest_unit(self.block_size, block_size), parts)

    def forget_unused(self, live_engines: set[str]) -> None:
        """Forgets engines that are no longer connected and of which the workers do not know, so that no step is needed
        for it."""
        self._forget(self._known.keys() - live_engines - self._told)

    def _forget(self, gone: set[str]) -> None:
        for name in gone:
            del self._known[name]
            self._readings.pop(name, None)
            self._topology.forget(name)

    def reading_of(self, peer: Hello) -> Reading:
        return self._readings[engine_key(peer)]

    # ---- Jobs ----

    @property
    def is_idle(self) -> bool:
        """Returns whether no job is open, and no worker has one to drop."""
        return not len(self._ledger) and not self._dropped

    @property
    def counters(self) -> Mapping[str, float]:
        return {"p2p_duplicate_reports": self._ledger.num_duplicates, "p2p_unknown_reports": self._ledger.num_unknown}

    def digest(self, action: Digest) -> None:
        """Begins a job. Raises PeerError if no engine with this reading is known any more."""
        readers = (key for key, reading in self._readings.items() if reading is action.reading)
        reader = next(readers, None)
        if reader is None:
            raise PeerError("the reader has disconnected")
        name = self._on_wire(action.job_id)
        self._ledger.open(name, self._own, action)
        if reader:
            self._tell_of(reader, self._known[reader])
        # The workers get the tables without the blocks before the piece.
        before = action.first // self.block_size
        end = cdiv(action.end, self.block_size)
        self._new_digests.append(
            DigestJob(
                job_id=name,
                peer=reader,
                block_ids=tuple(table[before:end] for table in action.block_ids),
                first=action.first - before * self.block_size,
                end=action.end - before * self.block_size,
            )
        )

    def drop_digest(self, job_id: TransferId) -> None:
        """Ends a job whose result is not needed."""
        name = self._on_wire(job_id)
        if name in self._ledger:
            self._ledger.drop(name)
            self._dropped.append(name)

    def read(self, load: Load, grant: Grant, source: Hello) -> None:
        """Begins a job. Raises PeerError if the grant does not cover the requested tokens."""
        num_blocks = cdiv(load.end, source.shards[0].layout.block_size)
        if len(grant.block_ids) != self._num_groups or any(len(table) < num_blocks for table in grant.block_ids):
            raise PeerError(f"{source.engine_id} does not name blocks for {load.end} tokens in every group")
        job = ReadJob(
            job_id=self._on_wire(load.name),
            peer=engine_key(source),
            block_ids=load.block_ids,
            remote_block_ids=tuple(table[:num_blocks] for table in grant.block_ids),
            first=load.first,
            end=load.end,
            digests=grant.digests,
        )
        load.engine, load.bad_ranges = job.peer, tuple(self._find_missing(job, source))
        self._ledger.open(job.job_id, self._own, load)
        self._tell_of(job.peer, source)
        self._new_reads.append(job)

    def cancel_read(self, load: Load) -> None:
        """Ends a read as soon as nothing of it moves any more; a `ReadEnded` follows."""
        self._cancelled.append(self._on_wire(load.name))

    def _tell_of(self, key: str, peer: Hello) -> None:
        """Tells the workers of an engine before its first job."""
        if key not in self._told:
            self._told.add(key)
            self._new_peers.append(PeerShards(key, peer.shards))

    # ---- Steps ----

    def take(self, live_engines: set[str], has_time: bool) -> P2PMetadata:
        """Returns the metadata of the next step. Forgets engines that are no longer connected."""
        in_use = {each.engine for each in self._ledger if isinstance(each, Load)}
        in_use.update(each.peer for each in self._new_digests)
        gone = self._known.keys() - live_engines - in_use
        forgotten = self._told & gone
        self._told -= gone
        self._forget(gone)
        own = () if self._is_own_told else tuple(self._own.values())
        self._is_own_told = True
        metadata = P2PMetadata(
            own=own,
            peers=tuple(self._new_peers),
            forgotten=tuple(sorted(forgotten)),
            digests=tuple(self._new_digests),
            reads=tuple(self._new_reads),
            cancelled=tuple(self._cancelled),
            dropped=tuple(self._dropped),
            has_time=has_time,
        )
        for each in (self._new_peers, self._new_digests, self._new_reads, self._cancelled, self._dropped):
            each.clear()
        return metadata

    def apply(self, report: TransferReport) -> Digested | ReadEnded | None:
        """Returns the result of the job that ends with this report; None if other reports are missing."""
        ended = self._ledger.apply(report)
        if ended is None:
            return None
        owner, reports = ended
        if isinstance(owner, Digest):
            return Digested(owner.job_id, self._collect(owner, reports))
        is_complete = all(each.status is TransferStatus.DONE or each.bad_ranges for each in reports)
        bad = [*bad_ranges(reports, self._num_groups, owner.first, owner.end), *owner.bad_ranges]
        return ReadEnded(owner, tuple(dict.fromkeys(bad)), is_complete)

    def _find_missing(self, job: ReadJob, source: Hello) -> Iterator[BadRange]:
        """Yields ranges for which the other engine has no blocks, as before its window: they were not transferred."""
        size, remote_size = self.block_size, source.shards[0].layout.block_size
        for group, (table, remote) in enumerate(zip(job.block_ids, job.remote_block_ids, strict=True)):
            for start in range(job.first, job.end, size):
                end = min(start + size, job.end)
                is_missing = NULL_BLOCK in remote[start // remote_size : cdiv(end, remote_size)]
                if is_missing and table[start // size] != NULL_BLOCK:
                    yield BadRange(group, start, end)

    def _collect(self, digest: Digest, reports: Sequence[TransferReport]) -> tuple[ShardDigests, ...] | None:
        """Divides the ranks' digests, which are reported as one row, by the reader's rank and by group."""
        if any(report.status is not TransferStatus.DONE for report in reports):
            return None
        num_units = len(digest_edges(digest.first, digest.end, digest.reading.unit)) - 1
        readers = dict(digest.reading.parts)
        collected: list[ShardDigests] = []
        for report in reports:
            row = iter(report.digests)
            for reader, _ in readers[report.shard]:
                by_group = tuple(tuple(next(row) for _ in range(num_units)) for _ in digest.block_ids)
                collected.append(ShardDigests(report.shard, reader, by_group))
        return tuple(collected)

    def _on_wire(self, name: TransferId) -> TransferId:
        return msgspec.structs.replace(name, epoch=self._epoch)

    def check_integrity(self) -> None:
        self._ledger.check_integrity()
        assert self._told <= self._known.keys(), self._told - self._known.keys()
