"""Properties of layouts that the planner needs, and the checks of layouts that a peer declares."""

from __future__ import annotations

from itertools import accumulate

from penstock.messages.kv_cache_spec import DTYPE_BYTES
from penstock.messages.kv_layout import PAIR_TOKENS, KVLayout, LayerLayout, MemoryRegion
from penstock.utils.errors import PeerError

AXES = frozenset({"block", "kv", "head", "token", "dim"})

_MAX_BYTES = 1 << 60
"""Limits the total of all regions, and every stride: within it no offset overflows 64 bits."""


def extent(layer: LayerLayout, axis: str) -> tuple[int, int]:
    """Returns (elements, stride in bytes) of an axis; an axis that the layer lacks has a single element."""
    if axis not in layer.axes:
        return 1, 0
    index = layer.axes.index(axis)
    return layer.shape[index], layer.strides[index]


class Placement:
    """A layout's layers by name, and their offsets in the concatenation of its regions."""

    def __init__(self, layout: KVLayout) -> None:
        self.block_size = layout.block_size
        self.layers = {layer.name: layer for layer in layout.layers}
        starts = accumulate((region.num_bytes for region in layout.regions), initial=0)
        self._starts = {region.name: start for region, start in zip(layout.regions, starts, strict=False)}

    def layer(self, name: str) -> LayerLayout:
        if name not in self.layers:
            raise PeerError(f"there is no KV of layer {name!r} on this shard: both engines must have the same layers")
        return self.layers[name]

    def start(self, layer: LayerLayout) -> int:
        return self._starts[layer.region] + layer.offset


def check_fit(local: LayerLayout, remote: LayerLayout) -> None:
    """Checks that a token's KV in one head has the same bytes in both. Raises PeerError that names the difference."""
    pairs = {
        "data type": (local.dtype, remote.dtype),
        "head size": (extent(local, "dim")[0], extent(remote, "dim")[0]),
        "number of kv planes": (extent(local, "kv")[0], extent(remote, "kv")[0]),
        "KV group": (local.group, remote.group),
        "kind": (_kind(local), _kind(remote)),
    }
    for what, (mine, theirs) in pairs.items():
        if mine != theirs:
            raise PeerError(
                f"layer {local.name!r}: the {what} is {mine} here and {theirs} in the other engine; "
                "both engines must run the same model with the same KV data type"
            )
    if local.in_pairs != remote.in_pairs:
        raise PeerError(
            f"layer {local.name!r}: keys and values are stored {_order(local)} here and {_order(remote)} in the other "
            f"engine; both need the same kind of processor, and block sizes that are multiples of {PAIR_TOKENS}"
        )


def _kind(layer: LayerLayout) -> str:
    return "recurrent" if layer.is_recurrent else "attention"


def _order(layer: LayerLayout) -> str:
    return "in pairs" if layer.in_pairs else "by rows"


def check_layout(layout: KVLayout) -> None:
    """Raises PeerError unless every element of every layer is in bounds and no two elements of a layer overlap."""
    regions = {region.name: region for region in layout.regions}
    if len(regions) < len(layout.regions) or any(region.num_bytes < 0 for region in layout.regions):
        raise PeerError("the KV layout is invalid: its regions need unique names and sizes of at least 0")
    if sum(region.num_bytes for region in layout.regions) > _MAX_BYTES:
        raise PeerError("the KV layout is invalid: its regions are larger than any memory")
    if len({layer.name for layer in layout.layers}) < len(layout.layers):
        raise PeerError("the KV layout is invalid: two of its layers have the same name")
    for layer in layout.layers:
        fault = _fault(layer, layout.block_size, regions)
        if fault:
            raise PeerError(f"the KV layout of layer {layer.name!r} is invalid: {fault}")


def _fault(layer: LayerLayout, block_size: int, regions: dict[str, MemoryRegion]) -> str | None:
    if layer.dtype not in DTYPE_BYTES:
        return f"the data type {layer.dtype!r} is unknown; known are {', '.join(DTYPE_BYTES)}"
    if layer.region not in regions:
        return f"there is no region {layer.region!r}"
    axes = set(layer.axes)
    if len(axes) < len(layer.axes) or not axes <= AXES or not axes >= {"block", "token"}:
        return f"its axes {layer.axes} must be distinct, from {sorted(AXES)}, and include block and token"
    if not len(layer.axes) == len(layer.shape) == len(layer.strides) or min(layer.shape) < 1 or layer.offset < 0:
        return f"shape {layer.shape}, strides {layer.strides} or offset {layer.offset} is impossible"
    num_rows = 1 if layer.is_recurrent else block_size
    if extent(layer, "token")[0] != num_rows:
        return f"a block has {extent(layer, 'token')[0]} tokens and not {num_rows}"
    if not 0 <= layer.first_block <= _MAX_BYTES:
        return f"its blocks cannot begin at {layer.first_block}"
    if layer.heads[0] < 0 or layer.heads[1] - layer.heads[0] != extent(layer, "head")[0]:
        return f"heads {layer.heads} are not the {extent(layer, 'head')[0]} heads of its shape"
    if min(layer.strides) < 0 or max(layer.strides) > _MAX_BYTES:
        return f"strides {layer.strides} are impossible"
    end = DTYPE_BYTES[layer.dtype]
    for stride, size in sorted(zip(layer.strides, layer.shape, strict=True)):
        if size > 1 and stride < end:
            return f"its elements overlap: strides {layer.strides} of shape {layer.shape}"
        end += stride * (size - 1)
    if layer.offset + end > regions[layer.region].num_bytes:
        return f"it ends after its region of {regions[layer.region].num_bytes} bytes"
    return None
