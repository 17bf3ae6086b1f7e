"""One rank's reads from the ranks of another engine: connections, transfers, and their end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.kv_transfer.p2p.dialler import Background, Dialler
from penstock.kv_transfer.p2p.messages import ReadJob, Shard
from penstock.kv_transfer.topology.planner import LayerSlice, plan_runs
from penstock.kv_transfer.transports.base import DataTransport, PeerId, TransferHandle, TransferState
from penstock.messages.kv_layout import KVLayout
from penstock.messages.kv_transfer import BadRange, ShardId
from penstock.utils.errors import PeerError
from penstock.utils.logging import get_logger

logger = get_logger(__name__)

_MOST_RUNS = 1 << 19
"""Of a transfer; every transport accepts so many. If the engines' blocks differ in size, a long prompt has more."""

Slices = tuple[LayerSlice, ...]
"""The parts of layers that one rank sends to another."""


@dataclass(slots=True)
class _Transfer:
    """`is_cut`: its connection has been ended, so that it settles."""

    peer: PeerId
    handle: TransferHandle
    is_cut: bool = False


@dataclass(slots=True, eq=False)
class Read:
    """All that a rank knows of a job: transfers from each rank of `peer`, several if it is very long, and then the
    comparison of digests.

    `parts` has the transfers that have not begun; `retried` has the ranks to which a connection has been made again.
    `check` is the comparison, which reads the bytes when all transfers have ended (`have_landed`). It yields the number
    of bytes compared and adds `bad_ranges`.
    """

    job: ReadJob
    peer: Mapping[ShardId, Shard]
    parts: dict[ShardId, Slices]
    retried: set[ShardId] = field(default_factory=set[ShardId])
    has_failed: bool = False
    transfers: list[_Transfer] = field(default_factory=list[_Transfer])
    check: Iterator[int] = field(default_factory=lambda: iter(()))
    have_landed: bool = False
    bad_ranges: list[BadRange] = field(default_factory=list[BadRange])
    is_checked: bool = False


class Mover:
    """Moves the bytes of one rank. `reads` are those in progress; `background` makes connections.

    A transfer in progress can be ended only by `disconnect`, which ends all transfers with that peer. So a cancelled
    transfer runs on while another one with the peer is wanted; no further one begins meanwhile, so this has an end.
    """

    def __init__(self, layout: KVLayout, transport: DataTransport, background: Background) -> None:
        self.reads: list[Read] = []
        self._layout = layout
        self._transport = transport
        self._dialler = Dialler(transport, background)

    def forget(self, shards: Sequence[Shard]) -> None:
        """Ends the connections to these ranks of an engine, with which nothing moves, until they are needed again."""
        for shard in shards:
            self._dialler.disconnect(shard.descriptor)

    def add(self, read: Read) -> None:
        self.reads.append(read)
        self._begin(read)

    def advance(self, read: Read) -> list[TransferState]:
        """Begins the transfers that can begin, and gives the read up if one has failed. Returns the states of all."""
        self._begin(read)
        states = [self._transport.poll(each.handle) for each in read.transfers]
        if any(state in (TransferState.FAILED_SETTLED, TransferState.FAILED_UNSETTLED) for state in states):
            self.give_up(read)
        return states

    def give_up(self, read: Read) -> None:
        """Ends a read. Its transfers settle as soon as the transport can promise that nothing moves any more."""
        read.parts.clear()
        if not read.has_failed:
            read.has_failed = True
            self.cut_unwanted()

    def cut_unwanted(self) -> None:
        """Ends the connections over which only reads that were given up still move. Called when all have advanced."""
        unwanted = self._unwanted_peers()
        if not unwanted:
            return
        for peer in unwanted - {each.peer for read in self.reads if not read.has_failed for each in self._moving(read)}:
            for each in (each for read in self.reads for each in read.transfers if each.peer == peer):
                each.is_cut = True
            self._dialler.hang_up(peer)

    def _unwanted_peers(self) -> set[PeerId]:
        """Returns the peers with which a read that was given up still moves bytes."""
        return {each.peer for read in self.reads if read.has_failed for each in self._moving(read)}

    def _moving(self, read: Read) -> Iterator[_Transfer]:
        """Yields the transfers in progress over connections that have not been ended."""
        return (each for each in read.transfers if not each.is_cut and not self._transport.poll(each.handle).is_settled)

    def _begin(self, read: Read) -> None:
        """Begins the transfers with each rank that is connected by now."""
        job = read.job
        tables = tuple(zip(job.block_ids, job.remote_block_ids, strict=True))
        try:
            for shard, slices in list(read.parts.items()):
                other = read.peer[shard]
                peer = self._dialler.find(other.descriptor)
                if peer is None or peer in self._unwanted_peers():
                    return
                runs = plan_runs(self._layout, other.layout, slices, tables, job.first, job.end)
                try:
                    for at in range(0, max(1, len(runs)), _MOST_RUNS):
                        read.transfers.append(_Transfer(peer, self._transport.submit(peer, runs[at : at + _MOST_RUNS])))
                except PeerError:
                    # The connection may have ended since it was last used.
                    self._dialler.forget(other.descriptor)
                    if shard in read.retried:
                        raise
                    read.retried.add(shard)
                    return
                del read.parts[shard]
        except PeerError as error:
            logger.warning("KV of %s cannot be moved: %s", job.job_id, error)
            self.give_up(read)
