"""Reads from the ranks of another engine: connections, transfers, and their end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.kv_transfer.p2p.dialler import Background, Dialler
from penstock.kv_transfer.p2p.messages import Shard
from penstock.kv_transfer.topology.planner import BlockIdList, LayerSlice, plan_runs
from penstock.kv_transfer.transports.base import DataTransport, PeerId, TransferHandle, TransferState
from penstock.messages.kv_layout import KVLayout
from penstock.messages.kv_transfer import ShardId, TransferId
from penstock.utils.errors import PeerError
from penstock.utils.logging import get_logger

logger = get_logger(__name__)

Slices = tuple[LayerSlice, ...]
"""The parts of layers that one rank sends to another."""


@dataclass(slots=True, eq=False)
class Move:
    """Reads of tokens [first, end) from the ranks of `peer`, at most one from each of them.

    `tables` has this engine's and the other engine's block ids of each group. `parts` has the transfers that have not
    begun; `retried` has the ranks to which a connection has been made again.
    """

    name: TransferId
    peer: Mapping[ShardId, Shard]
    tables: Sequence[tuple[BlockIdList, BlockIdList]]
    first: int
    end: int
    parts: dict[ShardId, Slices]
    retried: set[ShardId] = field(default_factory=set[ShardId])
    has_failed: bool = False
    handles: list[tuple[PeerId, TransferHandle]] = field(default_factory=list[tuple[PeerId, TransferHandle]])


class Mover:
    """Moves the bytes of one rank. `background` makes connections.

    A transfer in progress can be ended only by `disconnect`, which ends all transfers with that peer. So a cancelled
    transfer runs on while another one with the peer is wanted; no further one begins meanwhile, so this has an end.
    """

    def __init__(self, layout: KVLayout, transport: DataTransport, background: Background) -> None:
        self._layout = layout
        self._transport = transport
        self._dialler = Dialler(transport, background)
        self._under_way: dict[PeerId, dict[Move, TransferHandle]] = {}

    def forget(self, shards: Sequence[Shard]) -> None:
        """Ends the connections to these ranks of an engine, with which nothing moves, until they are needed again."""
        for shard in shards:
            self._dialler.disconnect(shard.descriptor)

    def advance(self, move: Move) -> list[TransferState]:
        """Begins the transfers that can begin, and gives the move up if one has failed. Returns the states of all."""
        self.begin(move)
        states = [self._transport.poll(handle) for _, handle in move.handles]
        if any(state in (TransferState.FAILED_SETTLED, TransferState.FAILED_UNSETTLED) for state in states):
            self.give_up(move)
        for (peer, _), state in zip(move.handles, states, strict=True):
            if state.is_settled and move in self._under_way.get(peer, {}):
                self._end_unwanted(peer)
        return states

    def give_up(self, move: Move) -> None:
        """Ends the move. Its transfers settle as soon as the transport can promise that nothing moves any more."""
        move.parts.clear()
        if not move.has_failed:
            move.has_failed = True
            for peer, _ in move.handles:
                self._end_unwanted(peer)

    def _end_unwanted(self, peer: PeerId) -> None:
        """Disconnects if transfers with the peer are in progress and all of them are cancelled."""
        under_way = self._under_way.pop(peer, {})
        moves = {move: handle for move, handle in under_way.items() if not self._transport.poll(handle).is_settled}
        if any(not move.has_failed for move in moves):
            self._under_way[peer] = moves
        elif moves:
            self._dialler.hang_up(peer)

    def _has_unwanted(self, peer: PeerId) -> bool:
        """Returns whether a cancelled transfer with the peer is still in progress."""
        under_way = self._under_way.get(peer, {})
        return any(move.has_failed and not self._transport.poll(each).is_settled for move, each in under_way.items())

    def begin(self, move: Move) -> None:
        """Begins one transfer with each rank that is connected by now."""
        try:
            for shard, slices in list(move.parts.items()):
                other = move.peer[shard]
                peer = self._dialler.find(other.descriptor)
                if peer is None or self._has_unwanted(peer):
                    return
                runs = plan_runs(self._layout, other.layout, slices, move.tables, move.first, move.end)
                try:
                    handle = self._transport.submit(peer, runs)
                except PeerError:
                    # The connection may have ended since it was last used.
                    self._dialler.forget(other.descriptor)
                    if shard in move.retried:
                        raise
                    move.retried.add(shard)
                    return
                move.handles.append((peer, handle))
                self._under_way.setdefault(peer, {})[move] = handle
                del move.parts[shard]
        except PeerError as error:
            logger.warning("KV of %s cannot be moved: %s", move.name, error)
            self.give_up(move)
