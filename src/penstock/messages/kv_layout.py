"""Where KV memory is and how it is laid out: described once per rank, for tiers, transports and peers alike."""

from __future__ import annotations

import msgspec


class MemoryRegion(msgspec.Struct, frozen=True):
    """Memory by name. `address` is where the process that describes it has it mapped, 0 where only the path counts.

    `path` is what other processes of the same user open to map it, None where they cannot.
    """

    name: str
    num_bytes: int
    device: str = "cpu"
    address: int = 0
    path: str | None = None


class LayerLayout(msgspec.Struct, frozen=True):
    """One layer's KV: an array of named axes at `offset` of a region, `strides` in bytes.

    The axes are "block", "head", "token", "kv" (keys and values) and "dim", in the order in which they lie. `heads` is
    the interval [first, end) of the model's KV heads that are here. A block's bytes are contiguous.
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

    @property
    def block_bytes(self) -> int:
        return self.strides[self.axes.index("block")]


class KVLayout(msgspec.Struct, frozen=True):
    """One rank's KV memory. Layers of different groups may share some: a block belongs to one group at a time."""

    block_size: int
    regions: tuple[MemoryRegion, ...]
    layers: tuple[LayerLayout, ...]

    @property
    def is_host_visible(self) -> bool:
        return all(region.device == "cpu" for region in self.regions)

    def layers_of(self, group: int) -> tuple[LayerLayout, ...]:
        """In the order in which a block's bytes follow one another, a speculator's layers last."""
        return tuple(layer for layer in self.layers if layer.group == group)

    def block_bytes(self, group: int) -> int:
        """Bytes of one block in all layers of the group."""
        return sum(layer.block_bytes for layer in self.layers_of(group))
