"""Plans which shard sends which layers and heads, and where their bytes are on both sides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from penstock.kv_transfer.topology.layouts import Placement, check_fit, extent
from penstock.messages.kv_cache_spec import DTYPE_BYTES, NULL_BLOCK
from penstock.messages.kv_layout import PAIR_TOKENS, KVLayout, LayerLayout
from penstock.messages.kv_transfer import ShardId
from penstock.utils.errors import PeerError
from penstock.utils.math import round_up

ShardTable = Mapping[ShardId, KVLayout]
"""The layouts of all shards of one engine."""

NUM_KNOWN = 64
"""For how many pairs of shards the part of a plan that all their transfers share is kept."""

BlockIdList = Sequence[int]
"""A request's block ids in one group, from its first token on."""


@dataclass(frozen=True, slots=True)
class LayerSlice:
    """Heads [first, end) of a layer, counted among the model's KV heads."""

    name: str
    heads: tuple[int, int]


def sources(local: KVLayout, remote: ShardTable, local_shard: ShardId) -> dict[ShardId, tuple[LayerSlice, ...]]:
    """Returns which remote shards send which layers and heads, so that each of the local ones is sent exactly once.

    If several shards hold a head, the local shard's ranks choose one, so that different shards read from different
    replicas. Raises PeerError if a layer or head is missing or has another type.
    """
    holders: dict[str, list[tuple[ShardId, LayerLayout]]] = {}
    for shard in sorted(remote):
        for layer in remote[shard].layers:
            holders.setdefault(layer.name, []).append((shard, layer))
    found: dict[ShardId, list[LayerSlice]] = {}
    for layer in local.layers:
        if layer.name not in holders:
            raise PeerError(f"the other engine has no KV of layer {layer.name!r}: both engines must run the same model")
        for shard, other in holders[layer.name]:
            check_fit(layer, other)
            if layer.is_recurrent and local.block_size != remote[shard].block_size:
                raise PeerError(
                    f"block_size is {local.block_size} here and {remote[shard].block_size} in the other engine: models "
                    "with recurrent layers, whose states are stored at the ends of blocks, need the same in both"
                )
        for shard, heads in _cover(layer, holders[layer.name], sum(local_shard)):
            found.setdefault(shard, []).append(LayerSlice(layer.name, heads))
    return {shard: tuple(found[shard]) for shard in sorted(found)}


def _cover(
    layer: LayerLayout, holders: Sequence[tuple[ShardId, LayerLayout]], choice: int
) -> list[tuple[ShardId, tuple[int, int]]]:
    first, end = layer.heads
    cuts = {first, end, *(head for _, other in holders for head in other.heads if first < head < end)}
    pieces: list[tuple[ShardId, tuple[int, int]]] = []
    for start, stop in pairwise(sorted(cuts)):
        owners = [shard for shard, other in holders if other.heads[0] <= start and stop <= other.heads[1]]
        if not owners:
            raise PeerError(f"layer {layer.name!r}: no shard of the other engine has the KV heads [{start}, {stop})")
        owner = owners[choice % len(owners)]
        if pieces and pieces[-1][0] == owner:
            start = pieces.pop()[1][0]
        pieces.append((owner, (start, stop)))
    return pieces


def plan_runs(
    local: KVLayout,
    remote: KVLayout,
    slices: Sequence[LayerSlice],
    tables: Sequence[tuple[BlockIdList, BlockIdList]],
    first: int,
    end: int,
) -> np.ndarray:  # [n, 3] int64: local offset, remote offset, bytes
    """Plans the copies of the slices' tokens [first, end) from one shard to another, by ascending local offset.

    `tables` has, for each group, the request's local and remote block ids. Tokens in a NULL_BLOCK of either side are
    not copied. Offsets are flat, as if the regions of a layout were concatenated. Runs that are contiguous on both
    sides are merged. Raises PeerError if the shards or the tables do not fit.
    """
    starts = _pair_layers(local, remote, tuple(slices))
    groups = {pair.group for pair in starts}
    spans = {group: _Spans(tables[group], local.block_size, remote.block_size, first, end) for group in groups}
    # Layers of the same shapes are planned once.
    planned = [(at + pair.runs(spans[pair.group])[None]).reshape(-1, 3) for pair, at in starts.items()]
    return _sort_and_merge(planned)


@lru_cache(NUM_KNOWN)
def _pair_layers(
    local: KVLayout, remote: KVLayout, slices: tuple[LayerSlice, ...]
) -> Mapping[_Pair, np.ndarray]:  # [layers, 1, 3] int64: local start, remote start, 0
    """Groups the slices by their shapes on both sides. Every transfer between two shards has the same."""
    here, there = Placement(local), Placement(remote)
    starts: dict[_Pair, list[tuple[int, int, int]]] = {}
    for each in slices:
        mine, theirs = here.layer(each.name), there.layer(each.name)
        check_fit(mine, theirs)
        pair = _Pair(mine.group, SliceShape.of(mine, each), SliceShape.of(theirs, each))
        starts.setdefault(pair, []).append((here.start(mine), there.start(theirs), 0))
    return {pair: np.array(at, np.int64)[:, None] for pair, at in starts.items()}


@dataclass(frozen=True, slots=True)
class SliceShape:
    """Determines the offsets of a slice's bytes relative to its layer. The pairs are (elements, stride) of an axis."""

    block: tuple[int, int]
    token: tuple[int, int]
    head: tuple[int, int]
    kv: tuple[int, int]
    dim: tuple[int, int]
    first_head: int
    itemsize: int
    first_block: int
    is_recurrent: bool
    in_pairs: bool

    @classmethod
    def of(cls, layer: LayerLayout, part: LayerSlice) -> SliceShape:
        first, end = part.heads
        if not layer.heads[0] <= first < end <= layer.heads[1]:
            raise PeerError(f"layer {layer.name!r}: KV heads {part.heads} are not among {layer.heads} of a shard")
        return cls(
            block=extent(layer, "block"),
            token=extent(layer, "token"),
            head=(end - first, extent(layer, "head")[1]),
            kv=extent(layer, "kv"),
            dim=extent(layer, "dim"),
            first_head=first - layer.heads[0],
            itemsize=DTYPE_BYTES[layer.dtype],
            first_block=layer.first_block,
            is_recurrent=layer.is_recurrent,
            in_pairs=layer.in_pairs,
        )

    def token_offsets(self, block_ids: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Returns the offsets of the slice's first bytes of the tokens in these blocks, relative to the layer."""
        first, end = self.first_block, self.first_block + self.block[0]
        if block_ids.size and not first <= block_ids.min() <= block_ids.max() < end:
            raise PeerError(f"a block table has ids outside of [{first}, {end}), the blocks of its shard")
        size, stride = self.token
        return (block_ids - first) * self.block[1] + tokens % size * stride + self.first_head * self.head[1]

    def num_rows(self, num_tokens: int) -> int:
        """Returns how many vectors of each plane and head these tokens of one block have."""
        return 1 if self.is_recurrent else num_tokens


class _Spans:
    """Tokens [first, end) cut where a block ends on either side, without those in a NULL_BLOCK."""

    def __init__(
        self, table: tuple[BlockIdList, BlockIdList], local_size: int, remote_size: int, first: int, end: int
    ) -> None:
        cuts = cut_tokens(first, end, local_size, remote_size)
        starts = cuts[:-1]
        local_ids = blocks_of(table[0], local_size, starts)
        remote_ids = blocks_of(table[1], remote_size, starts)
        is_copied = (local_ids != NULL_BLOCK) & (remote_ids != NULL_BLOCK)
        self.starts, self.lengths = starts[is_copied], np.diff(cuts)[is_copied]
        self.local_ids, self.remote_ids = local_ids[is_copied], remote_ids[is_copied]


def cut_tokens(first: int, end: int, *sizes: int) -> np.ndarray:  # [n + 1] int64
    """Cuts tokens [first, end) at the multiples of these sizes; returns both ends and the cuts between them."""
    assert 0 <= first <= end, (first, end)
    inner = [np.arange(round_up(first + 1, size), end, size, dtype=np.int64) for size in sizes]
    cuts = np.sort(np.concatenate([np.array([first, end], np.int64), *inner]))
    return cuts[np.diff(cuts, prepend=-1) > 0]


def blocks_of(table: BlockIdList, block_size: int, tokens: np.ndarray) -> np.ndarray:
    """Returns the block ids of these ascending tokens. Raises PeerError if the table is too short or has ids that are
    too large.
    """
    if not len(tokens):
        return np.empty(0, np.int64)
    indices = tokens // block_size
    first, last = int(indices[0]), int(indices[-1])
    if last >= len(table):
        raise PeerError(f"a block table of {len(table)} blocks of {block_size} tokens ends before token {tokens[-1]}")
    try:
        return np.asarray(table[first : last + 1], np.int64)[indices - first]
    except OverflowError:
        raise PeerError("a block table has ids that do not fit into 64 bits") from None


@dataclass(frozen=True, slots=True)
class _Pair:
    """A slice's shapes on both sides."""

    group: int
    local: SliceShape
    remote: SliceShape

    def runs(self, spans: _Spans) -> np.ndarray:  # [n, 3]
        """Returns the copies, relative to the start of the layer on either side."""
        parts = [np.empty((0, 3), np.int64)]
        for length in np.unique(spans.lengths):
            chosen = spans.lengths == length
            starts = spans.starts[chosen]
            inside = self._inside(int(length))
            runs = np.repeat(inside[None], len(starts), axis=0)
            runs[:, :, 0] += self.local.token_offsets(spans.local_ids[chosen], starts)[:, None]
            runs[:, :, 1] += self.remote.token_offsets(spans.remote_ids[chosen], starts)[:, None]
            parts.append(runs.reshape(-1, 3))
        return _sort_and_merge(parts)

    @lru_cache(NUM_KNOWN)  # noqa: B019 - equal pairs share it
    def _inside(self, num_tokens: int) -> np.ndarray:  # [n, 3]
        """Returns the pieces of `num_tokens` tokens of one block, relative to the first of them."""
        local, remote = self.local, self.remote
        if local.in_pairs and num_tokens % PAIR_TOKENS:
            raise PeerError(f"{num_tokens} tokens are not a whole number of {PAIR_TOKENS}, which are stored together")
        axes = [(local.num_rows(num_tokens), local.token[1], remote.token[1])]
        for mine, theirs in ((local.head, remote.head), (local.kv, remote.kv), (local.dim, remote.dim)):
            axes.append((mine[0], mine[1], theirs[1]))
        axes = [axis for axis in axes if axis[0] > 1]
        num_bytes = local.itemsize
        while contiguous := [axis for axis in axes if axis[1:] == (num_bytes, num_bytes)]:
            axes.remove(contiguous[0])
            num_bytes *= contiguous[0][0]
        offsets = np.zeros((1, 2), np.int64)
        for size, *strides in sorted(axes, key=lambda axis: -axis[1]):
            offsets = (offsets[:, None] + np.arange(size)[:, None] * np.array(strides)).reshape(-1, 2)
        return np.column_stack([offsets, np.full(len(offsets), num_bytes)])


def _sort_and_merge(parts: Sequence[np.ndarray]) -> np.ndarray:
    runs = np.concatenate(parts) if parts else np.empty((0, 3), np.int64)
    if (runs[1:, 0] < runs[:-1, 0]).any():
        runs = runs[np.argsort(runs[:, 0], kind="stable")]
    return merge(runs)


def merge(runs: np.ndarray) -> np.ndarray:
    """Joins neighbours that are contiguous by every column of offsets; the last column is bytes.

    A run may cross from one region into the next, as memory of states has no NULL_BLOCK at its start: transports cut it
    there (`AddressSpace`).
    """
    joins = np.ones(max(0, len(runs) - 1), np.bool_)
    for column in range(runs.shape[1] - 1):
        joins &= runs[:-1, column] + runs[:-1, -1] == runs[1:, column]
    if not joins.any():
        return runs
    firsts = np.flatnonzero(np.concatenate([[True], ~joins]))
    merged = runs[firsts]
    merged[:, -1] = np.add.reduceat(runs[:, -1], firsts)
    return merged
