"""The worker side of the `P2PConnector`: digests of KV for other engines, reads, and checks of received KV.

Bytes move in parallel with the steps, on the transport's threads. Digests, which this rank computes itself, take a
bounded share of the time, however long a step is, so that other requests do not wait for them. A step that computes
nothing else waits briefly for transfers, so that the engine does not ask for their end again and again. A read is
reported when nothing of it can move any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from penstock.kv_transfer.null import NullWorkerConnector
from penstock.kv_transfer.p2p.dialler import Background
from penstock.kv_transfer.p2p.digests import UnitDigests
from penstock.kv_transfer.p2p.messages import DigestJob, P2PHandshake, P2PMetadata, ReadJob, Shard
from penstock.kv_transfer.p2p.moves import Mover, Read, Slices
from penstock.kv_transfer.topology.pieces import digest_order, digest_unit
from penstock.kv_transfer.topology.planner import sources
from penstock.kv_transfer.transports.base import DataTransport
from penstock.kv_transfer.view import KVCacheView
from penstock.messages.kv_layout import KVLayout
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
from penstock.utils.errors import PeerError
from penstock.utils.logging import get_logger

logger = get_logger(__name__)

# About an eighth of what a core digests in a second, for steps that also compute; all of it in other steps, but not
# longer than `_IDLE_SECONDS`, because a request that arrives meanwhile waits.
_DIGEST_BYTES_PER_SECOND = 1 << 30
_IDLE_FACTOR = 8
_IDLE_SECONDS = 0.01
_MIN_SECONDS = 0.001
# A request that arrives while a step waits for transfers waits too.
_WAIT_SECONDS = 0.002
_BEGIN_SECONDS = 0.0001


@dataclass(slots=True, eq=False)
class _Digesting:
    """`work` yields the number of bytes that it has digested, unit by unit, and fills `digests`."""

    job_id: TransferId
    work: Iterator[int]
    digests: list[bytes]
    is_done: bool = False


class P2PWorker(NullWorkerConnector):
    """Serves one rank. `make_transport` is called when its memory is known; `background` connects it to peers. A step
    in which nothing is computed waits up to `wait_seconds` for transfers. Steps digest `digest_bytes` per second."""

    def __init__(
        self,
        shard: ShardId,
        make_transport: Callable[[KVLayout], DataTransport],
        background: Background,
        *,
        needs_shared_memory: bool = False,
        digest_bytes: float = _DIGEST_BYTES_PER_SECOND,
        wait_seconds: float = _WAIT_SECONDS,
        clock: Clock = SystemClock(),  # noqa: B008 - it has no state
    ) -> None:
        self.needs_shared_memory = needs_shared_memory
        self._shard = shard
        self._make_transport = make_transport
        self._background = background
        self._digest_bytes = digest_bytes
        self._clock = clock
        self._began = self._collected = clock.now()
        self._wait_seconds = wait_seconds
        self._tables: dict[str, dict[ShardId, Shard]] = {}
        self._own: dict[ShardId, Shard] = {}
        self._metadata = P2PMetadata()
        self._digesting: list[_Digesting] = []
        self._readers: dict[str, tuple[tuple[Slices, int], ...]] = {}
        self._reports: list[TransferReport] = []

    def register_kv_caches(self, view: KVCacheView) -> None:
        self._layout = view.layout
        regions = view.region_memory()
        self._transport = self._make_transport(view.layout)
        self._transport.register(regions)
        self._mover = Mover(view.layout, self._transport, self._background)
        self._digests = UnitDigests(view.layout, regions)

    def get_handshake_metadata(self) -> P2PHandshake:
        return P2PHandshake(self._layout, self._transport.descriptor())

    def begin_step(self, metadata: KVConnectorMetadata | None) -> None:
        assert isinstance(metadata, P2PMetadata), metadata
        self._metadata = metadata
        self._began = self._clock.now()
        if metadata.own:
            self._own = {each.shard: each for each in metadata.own}
        for peer in metadata.peers:
            self._tables[peer.peer] = {each.shard: each for each in peer.shards}
        for name in metadata.forgotten:
            self._mover.forget(tuple(self._tables.pop(name, {}).values()))
            self._readers.pop(name, None)
        self._digesting = [each for each in self._digesting if each.job_id not in metadata.dropped]
        self._digesting += [self._digest(job) for job in metadata.digests if job.job_id not in metadata.dropped]
        for read in self._mover.reads:
            if read.job.job_id in metadata.cancelled:
                self._mover.give_up(read)

    def start_load_kv(self) -> None:
        reads = [self._make_read(job) for job in self._metadata.reads]
        for read in reads:
            self._mover.add(read)
        if reads and self._metadata.has_time:
            # What is to be digested is found while the bytes move: after the transport's threads, which may share this
            # core, have asked for them.
            self._wait(_BEGIN_SECONDS)
            for read in reads:
                if not read.has_failed:
                    self._check(read, 0)

    def get_finished(self, finished_request_ids: frozenset[str]) -> KVConnectorOutput:
        room = self._collect(self._room())
        if self._metadata.has_time and not self._reports and room > 0 and self._mover.reads:
            self._wait(self._wait_seconds)
            self._collect(room)
        reports, self._reports = tuple(self._reports), []
        return KVConnectorOutput(reports)

    def _wait(self, seconds: float) -> None:
        """Waits for a transfer."""
        handles = [each.handle for read in self._mover.reads for each in read.transfers]
        self._transport.wait(handles, min(seconds, self._wait_seconds))

    def _room(self) -> float:
        """Returns how many bytes this step may digest, by its length and the time since the last one."""
        now = self._clock.now()
        pause = min(self._began - self._collected, _IDLE_SECONDS)
        seconds, self._collected = max(_MIN_SECONDS, pause + now - self._began), now
        if self._metadata.has_time:
            seconds = _IDLE_FACTOR * min(seconds, _IDLE_SECONDS)
        return seconds * self._digest_bytes

    def _collect(self, room: float) -> float:
        """Continues all jobs, digests about `room` bytes, and takes the reports of those that have ended.

        Returns the room that is left.
        """
        for read in self._mover.reads:
            self._watch(read)
            if read.have_landed and not read.is_checked and room > 0:
                room = self._check(read, room)
        self._mover.cut_unwanted()
        for each in self._digesting:
            if room > 0:
                room, each.is_done = _advance(each.work, room)
        self._reports += [
            TransferReport(each.job_id, self._shard, TransferStatus.DONE, digests=tuple(each.digests))
            for each in self._digesting
            if each.is_done
        ]
        self._digesting = [each for each in self._digesting if not each.is_done]
        self._reports += [self._report(read) for read in self._mover.reads if read.is_checked]
        self._mover.reads = [read for read in self._mover.reads if not read.is_checked]
        return room

    def end_step(self) -> None:
        self._metadata = P2PMetadata()

    def shutdown(self) -> None:
        self._transport.close()

    # ---- Sending: digests ----

    def _digest(self, job: DigestJob) -> _Digesting:
        digests: list[bytes] = []
        return _Digesting(job.job_id, self._digest_own(job, self._readers_of(job.peer), digests), digests)

    def _digest_own(
        self, job: DigestJob, readers: tuple[tuple[Slices, int], ...], digests: list[bytes]
    ) -> Iterator[int]:
        """Computes the digests for each rank that reads from this one, by group and unit."""
        order = digest_order(self._layout)
        for slices, unit in readers:
            for group, table in enumerate(job.block_ids):
                for _, each, num_bytes in self._digests.of(slices, order, table, group, job.first, job.end, unit):
                    digests.append(each)
                    yield num_bytes

    def _readers_of(self, peer: str) -> tuple[tuple[Slices, int], ...]:
        """Returns what each rank of an engine gets from this rank, in their order, and the unit of its digests."""
        if peer not in self._readers:
            own = {shard: each.layout for shard, each in self._own.items()}
            found: list[tuple[Slices, int]] = []
            for reader, each in sorted((self._tables[peer] if peer else self._own).items()):
                slices = sources(each.layout, own, reader).get(self._shard)
                if slices:
                    found.append((slices, digest_unit(self._layout.block_size, each.layout.block_size)))
            self._readers[peer] = tuple(found)
        return self._readers[peer]

    # ---- Receiving: reads and checks ----

    def _make_read(self, job: ReadJob) -> Read:
        """Returns a read from each rank that has KV for this one; from none if the same step cancels the job."""
        read = Read(job, self._tables.get(job.peer, {}), parts={})
        read.check = self._compare(read)
        try:
            read.parts = self._sources(job)
        except PeerError as error:
            logger.warning("KV of %s cannot be read: %s", job.job_id, error)
            self._mover.give_up(read)
        if job.job_id in self._metadata.cancelled:
            self._mover.give_up(read)
        return read

    def _sources(self, job: ReadJob) -> dict[ShardId, Slices]:
        table = {shard: each.layout for shard, each in self._tables.get(job.peer, {}).items()}
        return sources(self._layout, table, self._shard)

    def _watch(self, read: Read) -> None:
        """Checks the state of the transfers, and begins to compare digests when all have settled."""
        if read.have_landed or read.is_checked:
            return
        states = self._mover.advance(read)
        if read.parts or not all(state.is_settled for state in states):
            return
        read.have_landed = True
        read.is_checked = read.has_failed or not read.job.digests

    def _check(self, read: Read, room: float) -> float:
        """Compares digests of about `room` bytes; returns the room that is left."""
        try:
            room, read.is_checked = _advance(read.check, room)
        except PeerError as error:
            logger.warning("KV of %s cannot be compared with its digests: %s", read.job.job_id, error)
            self._mover.give_up(read)
            read.is_checked = read.have_landed
        return room

    def _compare(self, read: Read) -> Iterator[int]:
        """Yields 0 when it has found the bytes to digest, and then reads them."""
        job = read.job
        parts: list[tuple[int, int, Iterator[bytes], Iterator[tuple[int, bytes, int]]]] = []
        given = {(each.producer, each.consumer): each.digests for each in job.digests}
        for shard, slices in self._sources(job).items():
            layout = self._tables[job.peer][shard].layout
            unit = digest_unit(self._layout.block_size, layout.block_size)
            expected = given.get((shard, self._shard), ())
            order = digest_order(layout)
            for group, table in enumerate(job.block_ids):
                wanted = iter(expected[group] if group < len(expected) else ())
                units = self._digests.of(slices, order, table, group, job.first, job.end, unit)
                parts.append((group, unit, wanted, units))
        yield 0
        for group, unit, wanted, units in parts:
            for token, each, num_bytes in units:
                # Without a block here, nothing was requested.
                if next(wanted, b"") != each and each:
                    read.bad_ranges.append(BadRange(group, token, min(token + unit, job.end)))
                yield num_bytes

    def _report(self, read: Read) -> TransferReport:
        """Returns the report; a failure without ranges means that no KV is usable."""
        if read.has_failed:
            return TransferReport(read.job.job_id, self._shard, TransferStatus.FAILED)
        status = TransferStatus.FAILED if read.bad_ranges else TransferStatus.DONE
        return TransferReport(read.job.job_id, self._shard, status, tuple(read.bad_ranges))


def _advance(work: Iterator[int], room: float) -> tuple[float, bool]:
    """Continues the work for `room` bytes. Returns the room that is left, and whether the work has ended."""
    for num_bytes in work:
        room -= num_bytes
        if room <= 0:
            return 0, False
    return room, True
