"""The jobs of the workers of all ranks: what they do with the next step, and the results of their reports.

A job is named by the engine's epoch and the transfer, so that a late report from an earlier epoch matches no job. It
ends when every rank of this engine has reported, even one that has no part in it: so the expected reports do not depend
on what a peer declares, and no rank can still compute digests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from penstock.kv_transfer.ledger import TransferLedger, bad_ranges
from penstock.kv_transfer.p2p.consumer import Read
from penstock.kv_transfer.p2p.messages import (
    AttestJob,
    Hello,
    P2PMetadata,
    PeerShards,
    ReadJob,
    Shard,
    ShardDigests,
)
from penstock.kv_transfer.p2p.producer import Attest
from penstock.kv_transfer.p2p.session import engine_key
from penstock.kv_transfer.topology.pieces import check_order, digest_edges, digest_unit
from penstock.kv_transfer.topology.tables import TransferTopology, engine_infos
from penstock.messages.kv_cache_spec import NULL_BLOCK
from penstock.messages.kv_transfer import BadRange, ShardId, TransferId, TransferReport, TransferStatus
from penstock.messages.scheduler_output import BlockIds
from penstock.utils.errors import PeerError
from penstock.utils.math import cdiv

_OWN = "this engine"
"""This engine's name in its own table; the names of other engines, from `engine_key`, contain a slash."""


@dataclass(frozen=True, slots=True)
class Attested:
    """`digests` is None if a rank could not make them."""

    job_id: TransferId
    digests: tuple[ShardDigests, ...] | None


@dataclass(frozen=True, slots=True)
class ReadEnded:
    """Nothing of the read moves any more. Unless it `is_complete`, none of its KV is usable."""

    transfer_id: TransferId
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
        self._is_own_told = False
        self._ledger = TransferLedger()
        self._open: dict[TransferId, AttestJob | ReadJob] = {}
        self._hellos: dict[TransferId, Hello] = {}
        # Engines that have declared their ranks to this one, and those of them that the workers know.
        self._known: set[str] = set()
        self._told: set[str] = set()
        self._peers: list[PeerShards] = []
        self._attests: list[AttestJob] = []
        self._reads: list[ReadJob] = []
        self._cancelled: list[TransferId] = []

    def register(self, peer: Hello, *, is_source: bool) -> None:
        """Adds an engine. Raises PeerError if the KV of one engine does not fit the other."""
        key, layouts = engine_key(peer), {each.shard: each.layout for each in peer.shards}
        self._known.add(key)
        for info in engine_infos(key, peer.shards[0].layout.block_size, layouts):
            self._topology.register(info)
        if is_source:
            for shard, each in self._own.items():
                for sender, slices in self._topology.sources(key, shard).items():
                    check_order(each.layout, layouts[sender], slices)
        else:
            self._topology.readers(key)

    @property
    def is_idle(self) -> bool:
        """Returns whether no job is open."""
        return not self._open

    @property
    def counters(self) -> Mapping[str, float]:
        return {"p2p_duplicate_reports": self._ledger.num_duplicates, "p2p_unknown_reports": self._ledger.num_unknown}

    def attest(self, action: Attest, reader: Hello) -> None:
        job = AttestJob(
            job_id=self._on_wire(action.job_id),
            peer=engine_key(reader),
            block_ids=action.block_ids,
            first=action.first,
            end=action.end,
        )
        self._begin(job, reader)
        self._attests.append(job)

    def read(self, action: Read, block_ids: BlockIds, source: Hello) -> None:
        """Begins a job. Raises PeerError if the grant does not cover the requested tokens."""
        grant = action.grant
        num_blocks = self._check_tables(grant.block_ids, action.end, source)
        job = ReadJob(
            job_id=self._on_wire(action.transfer_id),
            peer=engine_key(source),
            block_ids=block_ids,
            remote_block_ids=tuple(table[:num_blocks] for table in grant.block_ids),
            first=action.first,
            end=action.end,
            digests=grant.digests,
        )
        self._begin(job, source)
        self._reads.append(job)

    def cancel(self, transfer_id: TransferId) -> None:
        self._cancelled.append(self._on_wire(transfer_id))

    def _check_tables(self, block_ids: BlockIds, end: int, owner: Hello) -> int:
        """Returns how many blocks the other engine needs for `end` tokens. Raises PeerError if it names fewer."""
        num_blocks = cdiv(end, owner.shards[0].layout.block_size)
        if len(block_ids) != self._num_groups or any(len(table) < num_blocks for table in block_ids):
            raise PeerError(f"{owner.engine_id} does not name blocks for {end} tokens in every group")
        return num_blocks

    def take(self, live_engines: set[str], has_time: bool) -> P2PMetadata:
        """Returns the metadata of the next step. Forgets engines that are no longer connected."""
        in_use = {job.peer for job in self._open.values()}
        gone = self._known - live_engines - in_use
        forgotten = self._told & gone
        self._known -= gone
        self._told -= gone
        for name in gone:
            self._topology.forget(name)
        own = () if self._is_own_told else tuple(self._own.values())
        self._is_own_told = True
        metadata = P2PMetadata(
            own=own,
            peers=tuple(self._peers),
            forgotten=tuple(sorted(forgotten)),
            attests=tuple(self._attests),
            reads=tuple(self._reads),
            cancelled=tuple(self._cancelled),
            has_time=has_time,
        )
        for each in (self._peers, self._attests, self._reads, self._cancelled):
            each.clear()
        return metadata

    def apply(self, report: TransferReport) -> Attested | ReadEnded | None:
        """Returns the result of the job that ends with this report; None if other reports are missing."""
        reports = self._ledger.apply(report)
        if not reports:
            return None
        job, hello = self._open.pop(report.transfer_id), self._hellos.pop(report.transfer_id)
        name = report.transfer_id.partition(":")[2]
        if isinstance(job, AttestJob):
            return Attested(name, self._collect(job, hello, reports))
        is_complete = all(each.status is TransferStatus.DONE or each.bad_ranges for each in reports)
        bad = [*bad_ranges(reports, self._num_groups, job.first, job.end), *self._find_missing(job, hello)]
        return ReadEnded(name, tuple(dict.fromkeys(bad)), is_complete)

    def _find_missing(self, job: ReadJob, source: Hello) -> Iterator[BadRange]:
        """Yields ranges for which the other engine has no blocks, as before its window: they were not transferred."""
        size, remote_size = self.block_size, source.shards[0].layout.block_size
        for group, (table, remote) in enumerate(zip(job.block_ids, job.remote_block_ids, strict=True)):
            for start in range(job.first, job.end, size):
                end = min(start + size, job.end)
                is_missing = NULL_BLOCK in remote[start // remote_size : cdiv(end, remote_size)]
                if is_missing and table[start // size] != NULL_BLOCK:
                    yield BadRange(group, start, end)

    def _begin(self, job: AttestJob | ReadJob, peer: Hello) -> None:
        self._ledger.open(job.job_id, self._own)
        self._open[job.job_id] = job
        self._hellos[job.job_id] = peer
        if job.peer not in self._told:
            self._told.add(job.peer)
            self._peers.append(PeerShards(job.peer, peer.shards))

    def _collect(
        self, job: AttestJob, reader: Hello, reports: Sequence[TransferReport]
    ) -> tuple[ShardDigests, ...] | None:
        """Divides the ranks' digests, which are reported as one row, by the reader's rank and by group."""
        if any(report.status is not TransferStatus.DONE for report in reports):
            return None
        unit = digest_unit(self.block_size, reader.shards[0].layout.block_size)
        num_units = len(digest_edges(job.first, job.end, unit)) - 1
        collected: list[ShardDigests] = []
        for report in reports:
            row = iter(report.digests)
            for consumer in sorted(self._topology.readers(job.peer)[report.shard]):
                by_group = tuple(tuple(next(row) for _ in range(num_units)) for _ in job.block_ids)
                collected.append(ShardDigests(report.shard, consumer, by_group))
        return tuple(collected)

    def _on_wire(self, name: TransferId) -> TransferId:
        return f"{self._epoch}:{name}"

    def check_integrity(self) -> None:
        self._ledger.check_integrity()
        assert len(self._open) == len(self._ledger), (sorted(self._open), len(self._ledger))
        assert self._open.keys() == self._hellos.keys(), self._open.keys() ^ self._hellos.keys()
        assert self._told <= self._known, self._told - self._known
