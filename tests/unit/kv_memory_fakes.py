"""Engines whose KV memory is bytes: every cell (layer, head, token, kv plane, dim) has a unique value.

Addresses are computed cell by cell from the declared layouts, so that plans of whole runs can be compared with them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.messages.kv_cache_spec import NULL_BLOCK
from penstock.messages.kv_layout import KVLayout, LayerLayout, MemoryRegion
from penstock.messages.kv_transfer import ShardId
from penstock.utils.math import interval

PRODUCTION = ("block", "kv", "head", "token", "dim")
SIMULATION = ("block", "head", "token", "kv")
TOKEN_MAJOR = ("block", "token", "kv", "head", "dim")
PLANES_APART = ("kv", "block", "token", "head", "dim")
ITEM_BYTES = 2
UNTOUCHED = 0xDD
SOMETHING_ELSE = 0xEE
Cell = tuple[str, int, int, int, int]


@dataclass(frozen=True)
class FakeLayer:
    """A layer of the model, with all its heads. Layers with equal `place` share memory."""

    name: str
    group: int
    num_heads: int
    place: int
    num_planes: int = 2
    dim: int = 2


def model(num_heads: int, num_planes: int = 2, dim: int = 2) -> tuple[FakeLayer, ...]:
    """Returns three layers with full attention, two with a window in the memory of the first two, and a drafter's layer
    with fewer heads."""
    target = [
        FakeLayer(f"layer.{number}", group, num_heads, place, num_planes, dim)
        for number, (group, place) in enumerate([(0, 0), (1, 0), (0, 1), (1, 1), (0, 2)])
    ]
    return (*target, FakeLayer("draft.0", 0, max(1, num_heads // 2), 3, num_planes, dim))


def split_evenly(layers: Sequence[FakeLayer], pp: int) -> list[Sequence[FakeLayer]]:
    """Divides the target's layers into stages; the drafter's layer is on the last one."""
    cuts = [interval(len(layers) - 1, stage, pp) for stage in range(pp)]
    return split_at(layers, [end for _, end in cuts[:-1]])


def split_at(layers: Sequence[FakeLayer], cuts: Sequence[int]) -> list[Sequence[FakeLayer]]:
    return [layers[start:end] for start, end in itertools.pairwise([0, *cuts, len(layers)])]


def heads_of(num_heads: int, rank: int, tp: int) -> tuple[int, int]:
    """Returns an equal share of the heads, or one of them if there are more ranks than heads."""
    if tp <= num_heads:
        return interval(num_heads, rank, tp)
    head = rank * num_heads // tp
    return head, head + 1


def make_layout(
    layers: Sequence[FakeLayer],
    block_size: int,
    axes: tuple[str, ...] = PRODUCTION,
    num_blocks: int = 24,
    rank: int = 0,
    tp: int = 1,
) -> KVLayout:
    """Returns the layout of a shard with its share of these layers' heads."""
    regions: dict[str, MemoryRegion] = {}
    layouts: list[LayerLayout] = []
    for layer in layers:
        heads = heads_of(layer.num_heads, rank, tp)
        planes, dim = layer.num_planes, layer.dim
        sizes = {"block": num_blocks, "kv": planes, "head": heads[1] - heads[0], "token": block_size, "dim": dim}
        shape = tuple(sizes[axis] for axis in axes)
        strides: list[int] = []
        num_bytes = ITEM_BYTES
        for size in reversed(shape):
            strides.insert(0, num_bytes)
            num_bytes *= size
        # The memory of an odd place has a gap before and after it.
        offset = ITEM_BYTES * (layer.place % 2)
        region = MemoryRegion(f"memory.{layer.place}", num_bytes + 2 * offset)
        assert regions.setdefault(region.name, region) == region
        layouts.append(
            LayerLayout(layer.name, layer.group, region.name, offset, "bfloat16", axes, shape, tuple(strides), heads)
        )
    return KVLayout(block_size, tuple(regions.values()), tuple(layouts))


@dataclass
class FakeEngine:
    """The shards of an engine: `memory` holds the flat space of each, all its regions one after another."""

    stages: Sequence[Sequence[FakeLayer]]
    tp: int
    block_size: int
    axes: tuple[str, ...] = PRODUCTION
    num_blocks: int = 24
    shards: dict[ShardId, KVLayout] = field(default_factory=dict)
    memory: dict[ShardId, bytearray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for stage, layers in enumerate(self.stages):
            for rank in range(self.tp):
                layout = make_layout(layers, self.block_size, self.axes, self.num_blocks, rank, self.tp)
                self.shards[stage, rank] = layout
                num_bytes = sum(region.num_bytes for region in layout.regions)
                self.memory[stage, rank] = bytearray([UNTOUCHED]) * num_bytes

    def fill(self, values: Mapping[Cell, bytes], tables: Sequence[Sequence[int]], tokens: range) -> None:
        """Writes the values of these tokens into every shard that has them, and SOMETHING_ELSE everywhere else."""
        for shard, layout in self.shards.items():
            self.memory[shard][:] = bytearray([SOMETHING_ELSE]) * len(self.memory[shard])
            for layer in layout.layers:
                for cell in cells(layer, tokens):
                    self.write(shard, layer, cell, tables, values[cell])

    def write(
        self, shard: ShardId, layer: LayerLayout, cell: Cell, tables: Sequence[Sequence[int]], value: bytes
    ) -> None:
        at = address(self.shards[shard], layer, cell, tables[layer.group])
        if at is not None:
            self.memory[shard][at : at + ITEM_BYTES] = value


def cells(layer: LayerLayout, tokens: range) -> Iterator[Cell]:
    sizes = dict(zip(layer.axes, layer.shape, strict=True))
    for indices in itertools.product(
        range(*layer.heads), tokens, range(sizes.get("kv", 1)), range(sizes.get("dim", 1))
    ):
        yield (layer.name, *indices)


def address(layout: KVLayout, layer: LayerLayout, cell: Cell, table: Sequence[int]) -> int | None:
    """Returns a cell's offset in the flat space, or None if it is in a NULL_BLOCK."""
    _, head, token, plane, dim = cell
    block = table[token // layout.block_size]
    if block == NULL_BLOCK:
        return None
    index = {"block": block, "kv": plane, "head": head - layer.heads[0], "token": token % layout.block_size, "dim": dim}
    start = 0
    for region in layout.regions:
        if region.name == layer.region:
            break
        start += region.num_bytes
    return start + layer.offset + sum(index[axis] * by for axis, by in zip(layer.axes, layer.strides, strict=True))


@functools.cache
def values_of(layers: tuple[FakeLayer, ...], num_tokens: int) -> dict[Cell, bytes]:
    """Returns a unique value for every cell of the model's tokens."""
    everything = [
        (layer.name, *indices)
        for layer in layers
        for indices in itertools.product(
            range(layer.num_heads), range(num_tokens), range(layer.num_planes), range(layer.dim)
        )
    ]
    assert len(everything) < UNTOUCHED << 8, "too many cells for their bytes"
    return {cell: number.to_bytes(ITEM_BYTES, "big") for number, cell in enumerate(everything)}
