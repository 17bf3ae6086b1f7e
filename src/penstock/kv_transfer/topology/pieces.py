"""The locations of KV in the order in which both sides of a transfer digest it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from penstock.kv_transfer.topology.layouts import Placement, extent
from penstock.kv_transfer.topology.planner import (
    NUM_KNOWN,
    BlockIdList,
    LayerSlice,
    SliceShape,
    blocks_of,
    cut_tokens,
    merge,
)
from penstock.messages.kv_cache_spec import NULL_BLOCK
from penstock.messages.kv_layout import KVLayout, LayerLayout
from penstock.utils.errors import PeerError


def digest_unit(a: int, b: int) -> int:
    """Returns the tokens of the largest piece that is within one block on both sides, for these block sizes."""
    return math.gcd(a, b)


def digest_edges(first: int, end: int, unit: int) -> np.ndarray:  # [num_units + 1] int64
    """Cuts tokens [first, end) at the multiples of `unit`: the first and the last unit may be smaller."""
    return cut_tokens(first, end, unit)


def digest_order(sender: KVLayout) -> tuple[str, ...]:
    """Returns the order of axes in which both sides digest the KV of a sender with this layout, which may have none."""
    return sender.layers[0].axes if sender.layers else ()


def check_order(local: KVLayout, sender: KVLayout, slices: Sequence[LayerSlice]) -> None:
    """Raises PeerError if this engine cannot digest the sender's KV in the order of the sender's axes."""
    place = Placement(local)
    for each in slices:
        _check_axes(place.layer(each.name), digest_order(sender))


def unit_runs(
    layout: KVLayout,
    order: tuple[str, ...],
    slices: Sequence[LayerSlice],
    table: BlockIdList,
    group: int,
    edges: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:  # [n, 2] int64, [num_units + 1] int64
    """Returns the locations of the slices' units in one group: `runs` (offset, bytes) and `bounds`.

    Unit i is the tokens [edges[i], edges[i + 1]), which are in one block: `digest_edges` of the `digest_unit`. Its
    pieces are runs[bounds[i]:bounds[i + 1]], none in a NULL_BLOCK. `order`, which is that of the sender's axes, alone
    determines their order: read in it, shards that have the same KV have the same bytes.
    """
    size, starts, lengths = layout.block_size, edges[:-1], np.diff(edges)
    crosses = starts // size != (edges[1:] - 1) // size
    assert not crosses.any(), f"units begin at {starts[crosses]} and end in another block of {size} tokens"
    block_ids = blocks_of(table, size, starts)
    counts = np.zeros(len(starts), np.int64)
    found: list[tuple[np.ndarray, np.ndarray]] = []
    for length in np.unique(lengths):
        units = np.flatnonzero((lengths == length) & (block_ids != NULL_BLOCK))
        rows = [np.empty((len(units), 0, 2), np.int64)]
        for shape, pieces in _pieces_of_unit(layout, order, tuple(slices), group, int(length)):
            rows.append(np.repeat(pieces[None], len(units), axis=0))
            rows[-1][:, :, 0] += shape.token_offsets(block_ids[units], starts[units])[:, None]
        found.append((units, np.concatenate(rows, axis=1)))
        counts[units] = found[-1][1].shape[1]
    bounds = np.concatenate([[0], np.cumsum(counts)])
    runs = np.empty((bounds[-1], 2), np.int64)
    for units, pieces in found:
        runs[bounds[units][:, None] + np.arange(pieces.shape[1])] = pieces
    return runs, bounds


@lru_cache(NUM_KNOWN)
def _pieces_of_unit(
    layout: KVLayout, order: tuple[str, ...], slices: tuple[LayerSlice, ...], group: int, length: int
) -> Sequence[tuple[SliceShape, np.ndarray]]:
    """Returns the pieces, [n, 2], of a unit whose tokens are at offset 0 of their layers, for consecutive slices of
    the same shape. Every transfer between two shards has the same."""
    place = Placement(layout)
    found: list[tuple[SliceShape, list[np.ndarray]]] = []
    for each in slices:
        layer = place.layer(each.name)
        if layer.group != group:
            continue
        _check_axes(layer, order)
        shape = SliceShape.of(layer, each)
        if not found or found[-1][0] != shape:
            found.append((shape, []))
        found[-1][1].append(_ordered(shape, order, length) + np.array([place.start(layer), 0], np.int64))
    return [(shape, np.concatenate(pieces)) for shape, pieces in found]


def _check_axes(layer: LayerLayout, order: tuple[str, ...]) -> None:
    if missing := [axis for axis in layer.axes if axis not in order and extent(layer, axis)[0] > 1]:
        raise PeerError(f"layer {layer.name!r} has axes {missing} that the other engine's order {order} lacks")


def _ordered(shape: SliceShape, order: tuple[str, ...], length: int) -> np.ndarray:  # [n, 2]
    """Returns the pieces of `length` tokens, the first of which is at offset 0."""
    axes = [axis for axis in order if axis != "block"]
    num_bytes = shape.itemsize
    while axes and axes[-1] != "token":
        size, stride = getattr(shape, axes[-1])
        if size > 1 and stride != num_bytes:
            break
        num_bytes *= size
        axes.pop()
    offsets = np.zeros(1, np.int64)
    for axis in axes:
        size, stride = getattr(shape, axis)
        inner = np.arange(shape.num_rows(length) if axis == "token" else size, dtype=np.int64) * stride
        offsets = (offsets[:, None] + inner).reshape(-1)
    return merge(np.stack([offsets, np.full_like(offsets, num_bytes)], axis=1))
