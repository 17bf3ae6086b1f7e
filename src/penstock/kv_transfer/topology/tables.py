"""The known engines, their stages and layouts, and which of their shards read from which."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import msgspec

from penstock.kv_transfer.topology.layouts import check_fit, check_layout
from penstock.kv_transfer.topology.planner import LayerSlice, ShardTable, sources
from penstock.messages.kv_layout import KVLayout, LayerLayout
from penstock.messages.kv_transfer import ShardId
from penstock.utils.errors import PeerError


class EngineTransferInfo(msgspec.Struct, frozen=True):
    """One pipeline stage of an engine, as the engine declares it to its peers.

    `pp_size` is the engine's number of stages: the engine can be read from when all are known. `block_size` is the
    number of tokens of a block in its block tables; memory may be cut into smaller blocks, all of one size.
    `start_layer` numbers the stage's first layer among all of the engine's layers, including draft layers: each stage
    must begin where the one before it ends, so that a missing or duplicate layer is found when stages are registered.
    `layouts` are those of the stage's shards by tensor rank.
    """

    engine_id: str
    remote_pp_rank: int
    pp_size: int
    block_size: int
    start_layer: int
    layouts: tuple[KVLayout, ...]

    @property
    def end_layer(self) -> int:
        return self.start_layer + len(self.layouts[0].layers)

    def check(self) -> None:
        """Raises PeerError unless the stage is valid; a peer may have sent anything."""
        if (
            not self.engine_id
            or not 0 <= self.remote_pp_rank < self.pp_size
            or not self.layouts
            or self.start_layer < 0
        ):
            raise PeerError(f"engine {self.engine_id!r} declares an impossible pipeline stage {self.remote_pp_rank}")
        for layout in self.layouts:
            check_layout(layout)
            if layout.block_size < 1 or self.block_size < 1 or self.block_size % layout.block_size:
                raise PeerError(
                    f"engine {self.engine_id!r}: a block of {self.block_size} tokens is not a whole number of "
                    f"memory blocks of {layout.block_size} tokens"
                )
            if layout.block_size != self.layouts[0].block_size or _names(layout) != _names(self.layouts[0]):
                raise PeerError(f"engine {self.engine_id!r}: tensor ranks of a stage differ in layers or block size")


def engine_infos(engine_id: str, block_size: int, shards: ShardTable) -> tuple[EngineTransferInfo, ...]:
    """Returns an engine's stages. `block_size` is in tokens, as in its block tables."""
    stages: dict[int, list[KVLayout]] = {}
    for (pp_rank, tp_rank), layout in sorted(shards.items()):
        stage = stages.setdefault(pp_rank, [])
        assert pp_rank == len(stages) - 1 and tp_rank == len(stage), f"shards {sorted(shards)} have gaps"
        stage.append(layout)
    infos: list[EngineTransferInfo] = []
    for pp_rank, layouts in stages.items():
        start = infos[-1].end_layer if infos else 0
        infos.append(EngineTransferInfo(engine_id, pp_rank, len(stages), block_size, start, tuple(layouts)))
    return tuple(infos)


class TransferTopology:
    """An engine's own shards and those of the engines it knows, by (engine id, pipeline rank).

    An engine is known when all its stages are registered. For other engines, and after `forget`, queries raise
    PeerError.
    """

    def __init__(self, engine_id: str, block_size: int, shards: ShardTable) -> None:
        self.engine_id = engine_id
        self._stages: dict[tuple[str, int], EngineTransferInfo] = {}
        for info in engine_infos(engine_id, block_size, shards):
            self.register(info)

    # ---- Known engines ----

    def register(self, info: EngineTransferInfo) -> None:
        """Adds a stage; repeating it has no effect. Raises PeerError, and adds nothing, if it does not fit."""
        key = info.engine_id, info.remote_pp_rank
        if key in self._stages:
            if self._stages[key] != info:
                raise PeerError(
                    f"engine {info.engine_id!r} declares stage {info.remote_pp_rank} differently than before: forget "
                    "the engine first if it was restarted, or give each engine a unique engine_id"
                )
            return
        info.check()
        self._check_beside_stages(info)
        self._check_against_own(info)
        self._stages[key] = info

    def forget(self, engine_id: str) -> None:
        """Drops an engine, known or not."""
        assert engine_id != self.engine_id, "an engine does not forget itself"
        for key in [key for key in self._stages if key[0] == engine_id]:
            del self._stages[key]

    def get_engine_info(self, engine_id: str, pp_rank: int = 0) -> EngineTransferInfo:
        info = self._stages.get((engine_id, pp_rank))
        if info is None:
            raise PeerError(f"stage {pp_rank} of engine {engine_id!r} is not known: it has not declared its KV layout")
        return info

    def shards(self, engine_id: str) -> ShardTable:
        """Returns the layouts of all shards of an engine."""
        return {
            (info.remote_pp_rank, tp_rank): layout
            for info in self._all_stages(engine_id)
            for tp_rank, layout in enumerate(info.layouts)
        }

    def sources(self, engine_id: str, local_shard: ShardId) -> Mapping[ShardId, tuple[LayerSlice, ...]]:
        """Returns what a shard of this engine reads from which shards of the other one (`planner.sources`)."""
        return sources(self.shards(self.engine_id)[local_shard], self.shards(engine_id), local_shard)

    # ---- Checks ----

    def _all_stages(self, engine_id: str) -> list[EngineTransferInfo]:
        first = self.get_engine_info(engine_id)
        return [first, *(self.get_engine_info(engine_id, pp_rank) for pp_rank in range(1, first.pp_size))]

    def _check_beside_stages(self, info: EngineTransferInfo) -> None:
        """Checks that all stages are of one engine, and that each begins where the one before it ends."""
        others = [stage for (engine_id, _), stage in self._stages.items() if engine_id == info.engine_id]
        for other in others:
            if (other.pp_size, other.block_size) != (info.pp_size, info.block_size):
                raise PeerError(f"engine {info.engine_id!r}: its stages differ in pp_size or block size")
            if both := set(_names(other.layouts[0])) & set(_names(info.layouts[0])):
                raise PeerError(f"engine {info.engine_id!r}: layer {min(both)!r} is on two stages")
        if info.remote_pp_rank == 0 and info.start_layer:
            raise PeerError(f"engine {info.engine_id!r}: its first stage begins at layer {info.start_layer} and not 0")
        for before, behind in pairwise(sorted([*others, info], key=lambda stage: stage.remote_pp_rank)):
            if behind.remote_pp_rank == before.remote_pp_rank + 1 and behind.start_layer != before.end_layer:
                raise PeerError(
                    f"engine {info.engine_id!r}: stage {behind.remote_pp_rank} begins at layer {behind.start_layer}, "
                    f"but stage {before.remote_pp_rank} ends at {before.end_layer}"
                )

    def _check_against_own(self, info: EngineTransferInfo) -> None:
        """Checks that both engines' layers store KV in the same way and have the same total number of KV heads."""
        own = {
            layers[0].name: layers
            for (engine_id, _), stage in self._stages.items()
            if engine_id == self.engine_id
            for layers in _layers_by_rank(stage)
        }
        for theirs in _layers_by_rank(info):
            mine = own.get(theirs[0].name)
            if mine is None or info.engine_id == self.engine_id:
                continue
            for layer in theirs:
                check_fit(mine[0], layer)
            counts = [max(layer.heads[1] for layer in layers) for layers in (mine, theirs)]
            if counts[0] != counts[1]:
                raise PeerError(
                    f"layer {theirs[0].name!r} has {counts[0]} KV heads here and {counts[1]} in engine "
                    f"{info.engine_id!r}: both engines must run the same model"
                )


def _names(layout: KVLayout) -> list[str]:
    return [layer.name for layer in layout.layers]


def _layers_by_rank(info: EngineTransferInfo) -> list[tuple[LayerLayout, ...]]:
    """Returns each layer of the stage, as its tensor ranks hold it."""
    return list(zip(*(layout.layers for layout in info.layouts), strict=True))
