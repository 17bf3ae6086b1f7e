"""Where the parts of ranks are in a chunk, which holds a block of all layers and heads of the model.

    layers      of the block's KV group, a speculator's last; each as in the engine's memory, with all KV heads
    table       the digest of every unit: one head's contiguous bytes of one layer, its keys or its values
    zeros       to the end of the chunk

None of it depends on the number of stages and ranks: an engine that is divided differently finds its parts in the same
chunk. A rank copies its heads, and digests unit by unit. If several ranks have the same heads, the first of them
writes. The sum of a block's digests is sent separately from the chunk, so that the table itself can be checked.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock.kv_transfer.topology.layouts import extent
from penstock.messages.kv_cache_spec import KVCacheConfig
from penstock.messages.kv_layout import KVLayout, LayerLayout
from penstock.messages.kv_transfer import ShardId
from penstock.utils.digest import DIGEST_BYTES, digest_units, sum_digests
from penstock.utils.math import round_up

RankHeads = Mapping[ShardId, Mapping[str, tuple[int, int]]]
"""The interval of KV heads that each rank has of each of its layers."""

_PAGE = 4096
# Chunks of this size and more consist of whole pages, so that a disk can bypass the page cache.
_LARGE = 16 * _PAGE


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """A layer's bytes in a chunk, and its first unit in the table."""

    start: int
    num_bytes: int
    num_heads: int
    first_unit: int


class ChunkFormat:
    """The chunks of an engine: `cache` is the whole engine's.

    `is_head_first`: the axis of heads comes first within a block, so that a head's keys and values are contiguous.
    A chunk has `state_bytes` for a block of the group of recurrent layers, `state_group`, and `chunk_bytes` for others.
    """

    def __init__(self, cache: KVCacheConfig, is_head_first: bool = False) -> None:
        self.block_size = cache.block_size
        self.places: list[dict[str, LayerPlace]] = []
        self.table_starts: list[int] = []
        self._num_units: list[int] = []
        for number, group in enumerate(cache.groups):
            specs = dict.fromkeys(group.layer_names, group.spec)
            specs |= {layer.name: layer.spec for layer in cache.attached if layer.group == number}
            places: dict[str, LayerPlace] = {}
            start = num_units = 0
            for name, spec in specs.items():
                num_bytes = spec.block_bytes(cache.block_size)
                places[name] = LayerPlace(start, num_bytes, spec.heads[1], num_units)
                start += num_bytes
                num_units += spec.heads[1] * (1 if is_head_first else len(spec.planes))
            self.places.append(places)
            self.table_starts.append(round_up(start, DIGEST_BYTES))
            self._num_units.append(num_units)
        ends = [at + count * DIGEST_BYTES for at, count in zip(self.table_starts, self._num_units, strict=True)]
        recurrent = [number for number, group in enumerate(cache.groups) if group.spec.is_recurrent]
        self.state_group = recurrent[0] if recurrent else None
        self.state_bytes = _chunk_bytes(ends.pop(recurrent[0])) if recurrent else 0
        self.chunk_bytes = _chunk_bytes(max(ends))

    def table(self, group: int, chunk: memoryview) -> np.ndarray:  # [num_units, DIGEST_BYTES] uint8
        start = self.table_starts[group]
        end = start + self._num_units[group] * DIGEST_BYTES
        return np.frombuffer(chunk[start:end], np.uint8).reshape(-1, DIGEST_BYTES)

    def digest(self, group: int, chunk: memoryview) -> bytes:
        """Returns the [16 bytes] digest of a whole block from its chunk's table: the sum of its writers' digests."""
        return sum_digests(self.table(group, chunk))


@dataclass(frozen=True, slots=True)
class _LayerPart:
    """A rank's heads [first, end) of a layer that is [outer, num_heads, unit_bytes] in a chunk.

    The rank writes the heads from `first_written` on; ranks before it write the others.
    """

    place: LayerPlace
    outer: int
    first: int
    end: int
    first_written: int
    unit_bytes: int
    own_units: tuple[int, ...] = field(init=False)
    written_units: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "own_units", self.units(self.first))
        object.__setattr__(self, "written_units", self.units(self.first_written))

    def in_chunk(self, chunk: memoryview) -> np.ndarray:  # [outer, end - first, unit_bytes] uint8
        place = self.place
        layer = np.frombuffer(chunk[place.start : place.start + place.num_bytes], np.uint8)
        return layer.reshape(self.outer, place.num_heads, self.unit_bytes)[:, self.first : self.end]

    def in_cache(self, part: memoryview) -> np.ndarray:  # [outer, end - first, unit_bytes] uint8
        return np.frombuffer(part, np.uint8).reshape(self.outer, self.end - self.first, self.unit_bytes)

    def units(self, first: int) -> tuple[int, ...]:
        """Returns the numbers of the units of the heads from `first` on."""
        starts = (self.place.first_unit + outer * self.place.num_heads for outer in range(self.outer))
        return tuple(start + head for start in starts for head in range(first, self.end))

    def pieces(self, chunk: memoryview) -> list[memoryview]:
        """Returns its bytes in the chunk, in the rank's order."""
        step = self.place.num_heads * self.unit_bytes
        starts = [self.place.start + outer * step + self.first * self.unit_bytes for outer in range(self.outer)]
        num_bytes = (self.end - self.first) * self.unit_bytes
        if num_bytes == step:
            return [chunk[starts[0] : starts[-1] + num_bytes]]
        return [chunk[start : start + num_bytes] for start in starts]


class RankChunks:
    """Copies one rank's parts between its blocks, by `layout`, and chunks.

    `heads` covers all ranks, or is empty for a single rank.
    """

    def __init__(self, chunks: ChunkFormat, layout: KVLayout, shard: ShardId, heads: RankHeads) -> None:
        self._format = chunks
        self._parts = [
            [_part(each, places[each.name], _end_before(each.name, shard, heads)) for each in layout.layers_of(group)]
            for group, places in enumerate(chunks.places)
        ]
        # The rows of a group's table, [n] int64 each.
        self._own = [np.array([u for layer in each for u in layer.own_units], np.int64) for each in self._parts]
        self._written = [np.array([u for layer in each for u in layer.written_units], np.int64) for each in self._parts]

    def has(self, group: int) -> bool:
        """Returns whether the rank has layers of the group."""
        return bool(self._parts[group])

    def store(self, group: int, parts: Sequence[memoryview], chunk: memoryview, is_attested: bool) -> bytes:
        """Copies the parts of a block that the rank writes. Returns the sum of its units' digests, or no bytes."""
        digests = [np.empty((0, DIGEST_BYTES), np.uint8)]
        for layer, part in zip(self._parts[group], parts, strict=True):
            skipped = layer.first_written - layer.first
            written = layer.in_cache(part)[:, skipped:]
            if not written.size:
                continue
            np.copyto(layer.in_chunk(chunk)[:, skipped:], written)
            if is_attested:
                digests.append(digest_units(itertools.chain.from_iterable(written), layer.written_units))
        if not is_attested:
            return b""
        found = np.concatenate(digests)
        self._format.table(group, chunk)[self._written[group]] = found
        return sum_digests(found)

    def pieces(self, group: int, chunk: memoryview) -> list[memoryview]:
        """Returns the rank's part of the block in the chunk, in the order of its layers."""
        return [piece for layer in self._parts[group] for piece in layer.pieces(chunk)]

    def is_right(self, group: int, parts: Sequence[memoryview], chunk: memoryview, digest: bytes) -> bool:
        """Returns whether the loaded bytes match those stored under this `digest` of the whole block."""
        if self._format.digest(group, chunk) != digest:
            return False
        found = [
            digest_units(itertools.chain.from_iterable(layer.in_cache(part)), layer.own_units)
            for layer, part in zip(self._parts[group], parts, strict=True)
        ]
        return np.array_equal(np.concatenate(found), self._format.table(group, chunk)[self._own[group]])


def _chunk_bytes(end: int) -> int:
    return round_up(end, _PAGE) if end >= _LARGE else end


def _part(layer: LayerLayout, place: LayerPlace, end_before: int) -> _LayerPart:
    axes = layer.axes
    at = axes.index("head")
    outer = math.prod(layer.shape[1:at])
    own = extent(layer, "head")[0]
    unit_bytes = place.num_bytes // (outer * place.num_heads)
    assert axes[0] == "block" and layer.block_bytes == outer * own * unit_bytes, f"{layer} in {place}"
    first, end = layer.heads
    return _LayerPart(place, outer, first, end, min(end, max(first, end_before)), unit_bytes)


def _end_before(name: str, shard: ShardId, heads: RankHeads) -> int:
    """Returns the end of the last head of this layer that ranks before this one have."""
    return max((heads[other][name][1] for other in heads if other < shard and name in heads[other]), default=0)
