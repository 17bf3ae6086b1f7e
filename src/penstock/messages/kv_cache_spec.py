"""How layers store keys and values: declared by the model, planned once, read by both scheduler and runner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

NULL_BLOCK = 0
"""Represents padding and blocks that left a sliding window; no request owns it and it is never read."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
SCALE_BYTES = 4
"""Of the float32 behind the integers of every vector that is stored as int8 (`kernels/kv_rows.py`)."""


@dataclass(frozen=True, slots=True)
class KVPlane:
    """One of the vectors that a layer stores for every token, divided into heads."""

    name: str
    num_heads: int
    head_size: int


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """One layer's cache, with all of the model's KV heads or with those of one rank.

    `sliding_window` is the number of tokens that a query sees, itself included; 0 means all. Other ranks have the
    `heads_before` and `heads_behind` those of `planes`. A row is what is stored of a token and a head in one plane:
    with `dtype` int8, integers and then their scale.

    A recurrent layer's block holds one row of each plane and head, whatever its size in tokens: the state after the
    last computed token of the block. The next token reads it and nothing else, as with a window of two tokens. Of a
    token that is a draft, `draft_inputs` numbers of each head are kept outside the cache until it is accepted.
    """

    planes: tuple[KVPlane, ...]
    dtype: str
    sliding_window: int = 0
    heads_before: int = 0
    heads_behind: int = 0
    is_recurrent: bool = False
    draft_inputs: int = 0

    @classmethod
    def keys_and_values(
        cls,
        num_heads: int,
        head_size: int,
        dtype: str,
        sliding_window: int = 0,
        first_head: int = 0,
        total_heads: int | None = None,
    ) -> KVCacheSpec:
        """The usual cache: a key and a value of `num_heads` heads each.

        They are the heads from `first_head` on of the model's `total_heads`, by default all of them.
        """
        planes = tuple(KVPlane(name, num_heads, head_size) for name in ("keys", "values"))
        behind = 0 if total_heads is None else total_heads - first_head - num_heads
        assert first_head >= 0 and behind >= 0, f"heads {first_head} + {num_heads} of {total_heads}"
        return cls(planes, dtype, sliding_window, first_head, behind)

    @classmethod
    def latents(cls, size: int, dtype: str) -> KVCacheSpec:
        """The cache of latent attention: one vector per token, which all heads and all ranks read."""
        return cls((KVPlane("latents", 1, size),), dtype)

    @classmethod
    def states(
        cls, num_heads: int, head_size: int, first_head: int, total_heads: int, draft_inputs: int = 0
    ) -> KVCacheSpec:
        """A recurrent layer's cache: `head_size` float32 numbers for each head, which depend on no other head."""
        plane = KVPlane("states", num_heads, head_size)
        behind = total_heads - first_head - num_heads
        assert first_head >= 0 and behind >= 0, f"heads {first_head} + {num_heads} of {total_heads}"
        return cls((plane,), "float32", 2, first_head, behind, is_recurrent=True, draft_inputs=draft_inputs)

    @property
    def heads(self) -> tuple[int, int]:
        """The interval [first, end) of the model's KV heads that are stored. All planes have the same."""
        (num_heads,) = {plane.num_heads for plane in self.planes}
        return self.heads_before, self.heads_before + num_heads

    def whole(self) -> KVCacheSpec:
        """The same layer with all of the model's KV heads."""
        others = self.heads_before + self.heads_behind
        planes = tuple(replace(plane, num_heads=plane.num_heads + others) for plane in self.planes)
        return replace(self, planes=planes, heads_before=0, heads_behind=0)

    def row_size(self, plane: KVPlane) -> int:
        """Returns the elements of `dtype` in a row of the plane."""
        return plane.head_size + (SCALE_BYTES if self.dtype == "int8" else 0)

    @property
    def token_bytes(self) -> int:
        """Bytes that this layer stores of a token, or of a state, all planes together."""
        return sum(plane.num_heads * self.row_size(plane) for plane in self.planes) * DTYPE_BYTES[self.dtype]

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block of this layer, all planes together."""
        return self.token_bytes * self.rows_per_block(block_size)

    def rows_per_block(self, block_size: int) -> int:
        """How many rows a block has of each plane and head: one for each token, or a single state."""
        return 1 if self.is_recurrent else block_size

    def first_needed_block(self, num_computed_tokens: int, block_size: int) -> int:
        """Returns the index of the request's first block that the query at position `num_computed_tokens` still
        reads.
        """
        if not self.sliding_window:
            return 0
        return max(0, num_computed_tokens - self.sliding_window + 1) // block_size


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Layers with the same kind of storage, which share one block table; a rank may have none of a group's layers."""

    layer_names: tuple[str, ...]
    spec: KVCacheSpec


@dataclass(frozen=True, slots=True)
class AttachedLayer:
    """A layer that uses a group's block table with separate storage: a speculator's, whose shape may differ. Its
    content at position p depends on the tokens up to p + `num_tokens_ahead`.
    """

    name: str
    spec: KVCacheSpec
    group: int
    num_tokens_ahead: int = 0


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """The planned cache, of the whole engine or of one rank (`part`): the groups have the same numbers in both.

    Block ids are shared by all groups. On every rank the j-th layers of the groups that store equally many bytes per
    token share a tensor; groups of another size have tensors of their own, so that an id has memory of every size.
    Block 0 is the null block: it represents padding and blocks that left a sliding window, and is never read.
    For a model that stores nothing (an encoder) there are no groups, and the null block is the only block.

    The group of recurrent layers, if there is one, has `num_states` blocks of its own size, whose ids follow those of
    the others (`first_block`). The state after a whole block is kept for other requests (a checkpoint) at the end of a
    prompt, at the end of an answer, and after every `checkpoint_interval` tokens. `num_uncertain_tokens` is how many
    tokens of a request's blocks may be drafts, or room for them: the state is that before them.
    """

    num_blocks: int
    block_size: int
    groups: tuple[KVCacheGroup, ...]
    attached: tuple[AttachedLayer, ...] = ()
    num_states: int = 0
    checkpoint_interval: int = 0
    num_uncertain_tokens: int = 0

    @property
    def has_states(self) -> bool:
        return any(group.spec.is_recurrent for group in self.groups)

    def first_block(self, spec: KVCacheSpec) -> int:
        """Returns the lowest id of the blocks that a layer with this spec has memory for."""
        return self.num_blocks if spec.is_recurrent else 0

    def num_blocks_of(self, spec: KVCacheSpec) -> int:
        """Returns how many blocks a layer with this spec has memory for, the null block included if it has one."""
        return self.num_states if spec.is_recurrent else self.num_blocks

    def block_bytes(self, group: int) -> int:
        """Bytes of one block in all layers of a group and the layers attached to it."""
        own = self.groups[group]
        specs = [own.spec] * len(own.layer_names) + [layer.spec for layer in self.attached if layer.group == group]
        return sum(spec.block_bytes(self.block_size) for spec in specs)

    def part(self, specs: Mapping[str, KVCacheSpec]) -> KVCacheConfig:
        """Returns one rank's part of the cache. `specs` are those of the rank's layers, including a speculator's, with
        the rank's heads. A group without layers on this rank keeps its number, and its spec is the whole model's.
        """
        planned = {name: group.spec for group in self.groups for name in group.layer_names}
        planned |= {layer.name: layer.spec for layer in self.attached}
        for name, spec in specs.items():
            assert planned.get(name) == spec.whole(), f"{name} stores {spec}, planned is {planned.get(name)}"
        groups: list[KVCacheGroup] = []
        for group in self.groups:
            names = tuple(name for name in group.layer_names if name in specs)
            groups.append(KVCacheGroup(names, specs[names[0]] if names else group.spec))
        attached = (replace(layer, spec=specs[layer.name]) for layer in self.attached if layer.name in specs)
        return replace(self, groups=tuple(groups), attached=tuple(attached))

    @property
    def shared_specs(self) -> dict[int, list[KVCacheSpec]]:
        """The specs of the tensors that groups of one size share, one for each, by their `KVCacheSpec.token_bytes`;
        recurrent layers share none.
        """
        shared: dict[int, list[KVCacheSpec]] = {}
        for group in self.groups:
            size, specs = group.spec.token_bytes, [group.spec] * len(group.layer_names)
            if not group.spec.is_recurrent and len(specs) > len(shared.get(size, [])):
                shared[size] = specs
        return shared

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block id: its share of every tensor of one rank's cache, without recurrent layers."""
        specs = [spec for of_size in self.shared_specs.values() for spec in of_size]
        specs += [layer.spec for layer in self.attached]
        return sum(spec.block_bytes(self.block_size) for spec in specs)

    @property
    def bytes_per_state(self) -> int:
        """Bytes of one block of the recurrent layers of one rank."""
        return sum(self.block_bytes(number) for number, group in enumerate(self.groups) if group.spec.is_recurrent)

    @property
    def num_bytes(self) -> int:
        """Bytes of one rank's cache."""
        return self.num_blocks * self.bytes_per_block + self.num_states * self.bytes_per_state

    @property
    def num_tokens_ahead(self) -> int:
        """How many tokens after a position determine, in addition to those up to it, the content of any layer there."""
        return max((layer.num_tokens_ahead for layer in self.attached), default=0)
