"""The location and layout of KV memory: described once per rank, for tiers, transports and peers."""

from __future__ import annotations

import msgspec

PAIR_TOKENS = 16
"""Adjacent tokens, from a multiple of it on, whose numbers are stored together in a layer that is in pairs."""


class MemoryRegion(msgspec.Struct, frozen=True):
    """Named memory. `address` is its address in the describing process, 0 if only the path matters. Other processes of
    the same user open `path` to map it; None if they cannot.
    """

    name: str
    num_bytes: int
    device: str = "cpu"
    address: int = 0
    path: str | None = None


class LayerLayout(msgspec.Struct, frozen=True):
    """One layer's KV: an array of named axes at `offset` of a region, `strides` in bytes.

    The axes are "block", "head", "token", "kv" (keys and values) and "dim", in memory order; "dim" is a row as
    `KVCacheSpec` defines it. `heads` is the interval [first, end) of the model's KV heads that are here. A block's
    bytes are contiguous. Along "block" the ids begin at `first_block`. A recurrent layer has one row for a block
    instead of one for each token. `in_pairs`: within each head and plane, the bytes of `PAIR_TOKENS` tokens are in
    another order than that of rows (`kernels.kv_rows`).
    """

    name: str
    group: int
    region: str
    offset: int
    dtype: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    heads: tuple[int, int]
    first_block: int = 0
    is_recurrent: bool = False
    in_pairs: bool = False

    @property
    def block_bytes(self) -> int:
        return self.strides[self.axes.index("block")]


class KVLayout(msgspec.Struct, frozen=True):
    """One rank's KV memory. Layers of different groups may share memory: a block belongs to one group at a time."""

    block_size: int
    regions: tuple[MemoryRegion, ...]
    layers: tuple[LayerLayout, ...]

    @property
    def is_host_visible(self) -> bool:
        return all(region.device == "cpu" for region in self.regions)

    def layers_of(self, group: int) -> tuple[LayerLayout, ...]:
        """Returns the layers in the order of a block's bytes, a speculator's layers last."""
        return tuple(layer for layer in self.layers if layer.group == group)

    def block_bytes(self, group: int) -> int:
        """Bytes of one block in all layers of the group."""
        return sum(layer.block_bytes for layer in self.layers_of(group))
