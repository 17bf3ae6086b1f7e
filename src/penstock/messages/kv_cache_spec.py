"""How layers store their keys and values: declared by the model, planned once, read by scheduler and runner alike."""

from __future__ import annotations

from dataclasses import dataclass

NULL_BLOCK = 0
"""Stands for padding and for blocks that left a sliding window; no request owns it and it is never read."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class KVPlane:
    """One of the vectors that a layer stores of every token, divided into heads."""

    name: str
    num_heads: int
    head_size: int


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """One layer's cache. `sliding_window` is the number of tokens that a query sees, itself included; 0 means all."""

    planes: tuple[KVPlane, ...]
    dtype: str
    sliding_window: int = 0

    @classmethod
    def keys_and_values(cls, num_heads: int, head_size: int, dtype: str, sliding_window: int = 0) -> KVCacheSpec:
        """The usual cache: a key and a value of `num_heads` heads each."""
        return cls(tuple(KVPlane(name, num_heads, head_size) for name in ("keys", "values")), dtype, sliding_window)

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block of this layer, all planes together."""
        return sum(plane.num_heads * plane.head_size for plane in self.planes) * DTYPE_BYTES[self.dtype] * block_size

    def first_needed_block(self, num_computed_tokens: int, block_size: int) -> int:
        """The first block along a request that the query at position `num_computed_tokens` still reads."""
        if not self.sliding_window:
            return 0
        return max(0, num_computed_tokens - self.sliding_window + 1) // block_size


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Layers that store alike and therefore share one block table."""

    layer_names: tuple[str, ...]
    spec: KVCacheSpec


@dataclass(frozen=True, slots=True)
class AttachedLayer:
    """A layer under a group's block table with storage of its own: a speculator's, whose shape may be another.

    What it stores of position p depends on the tokens up to p + `num_tokens_ahead`.
    """

    name: str
    spec: KVCacheSpec
    group: int
    num_tokens_ahead: int = 0


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """The planned cache. Block ids are shared by all groups: the j-th layer of every group lives in tensor j.

    Block 0 is the null block: it stands for padding and for blocks that left a sliding window, and is never read.
    """

    num_blocks: int
    block_size: int
    groups: tuple[KVCacheGroup, ...]
    attached: tuple[AttachedLayer, ...] = ()

    def block_bytes(self, group: int) -> int:
        """Bytes of one block in all layers of a group and in those attached to it."""
        own = self.groups[group]
        specs = [own.spec] * len(own.layer_names) + [layer.spec for layer in self.attached if layer.group == group]
        return sum(spec.block_bytes(self.block_size) for spec in specs)

    @property
    def num_tensors(self) -> int:
        return max(len(group.layer_names) for group in self.groups)

    @property
    def num_tokens_ahead(self) -> int:
        """How many tokens behind a position decide, beside those up to it, what any layer stores there."""
        return max((layer.num_tokens_ahead for layer in self.attached), default=0)
