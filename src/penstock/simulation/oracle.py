"""Memory and a model whose every token depends on every KV slot that it reads.

A slot holds, in every layer and for each of two heads, a digest of (token, position, layer, head, digest of the slot
before). The next token is a function of the digests *read through the block table* in every layer. A wrong block, a
stale or torn slot, a bad rewind, a lost window or a layer that was not transferred therefore changes the output, and
the correct output is `continuation`, a pure function of the prompt. Memory that was never written is poisoned, not
zero. The slots of wide layers have more words, each a function of the digest.

A recurrent layer stores one digest for a block, that of its last computed token; since it contains the digest before,
it depends on all tokens, like a state.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from zlib import crc32

from penstock.kv_transfer.view import read_now, write_now
from penstock.messages.adapters import Adapter
from penstock.messages.kv_cache_spec import NULL_BLOCK, AttachedLayer, KVCacheConfig, KVCacheGroup, KVCacheSpec
from penstock.messages.kv_layout import KVLayout, LayerLayout, MemoryRegion
from penstock.messages.kv_transfer import ShardId

NUM_HEADS = 2
WORD_BYTES = 4
"""Size in bytes of a slot in one layer and head, unless the layer is wide."""

VOCAB_SIZE = 4093

WIDE = 3
"""The words of a slot of a wide layer, whose group is of another size."""

RECURRENT = -1
"""In the place of a group's window: its layers are recurrent."""

_POISON = bytes.fromhex("efbeadde")
_MASK = 0xFFFFFFFF


@functools.cache
def layer_salts(layer_name: str) -> tuple[int, ...]:
    """Returns the salts that distinguish the layer's heads from all others."""
    return tuple(crc32(f"{layer_name}/{head}".encode()) for head in range(NUM_HEADS))


def adapter_seed(adapter: Adapter | None) -> int:
    """Returns what an adapter adds to the layers' salts; 0 without one."""
    return 0 if adapter is None else crc32(adapter.digest)


def slot_digest(token: int, position: int, salt: int, before: int) -> int:
    """Returns 32 bits. `before` is the digest in the previous slot, 0 at the start."""
    value = (before ^ (token * 0x9E3779B1 + position * 0x85EBCA77 + salt)) * 0xC2B2AE3D & _MASK
    return value ^ (value >> 15)


def stored_words(digests: Iterable[int], num_words: int) -> array[int]:
    """Returns the words of slots with these digests, of which the first is the digest."""
    return array("I", [digest + number * 0x9E3779B9 & _MASK for digest in digests for number in range(num_words)])


@dataclass(frozen=True, slots=True)
class OracleLayer:
    """`group` is its KV group; `window` is how many slots a query sees, 0 for all; `num_words` are those of a slot in
    one head. A draft layer does not influence tokens.
    """

    name: str
    group: int
    window: int
    is_draft: bool = False
    num_words: int = 1

    @property
    def is_recurrent(self) -> bool:
        return self.window == RECURRENT

    @property
    def num_tokens_ahead(self) -> int:
        """A drafter's slot also depends on the following token, as with multi-token prediction."""
        return int(self.is_draft)

    def first_seen(self, position: int) -> int:
        """Returns the first slot that influences the token at `position`."""
        return max(0, position - abs(self.window)) if self.window else 0


def make_layers(
    windows: Sequence[int], num_layers: int, has_drafter: bool, wide_groups: Container[int] = ()
) -> tuple[OracleLayer, ...]:
    """Makes `num_layers` layers in each of the groups, one group per window; the drafter's layer is in the first
    group.
    """
    layers = [
        OracleLayer(f"layer.{number}.{group}", group, window, num_words=WIDE if group in wide_groups else 1)
        for number in range(num_layers)
        for group, window in enumerate(windows)
    ]
    return (*layers, OracleLayer("draft.0", 0, windows[0], is_draft=True)) if has_drafter else tuple(layers)


def cache_config(layers: Sequence[OracleLayer], num_blocks: int, block_size: int, num_heads: int) -> KVCacheConfig:
    """Returns the cache of a rank that has these layers and this many heads of each, without room for states."""

    def spec(layer: OracleLayer) -> KVCacheSpec:
        if layer.is_recurrent:
            return KVCacheSpec.states(num_heads, 1, 0, num_heads)
        # Keys and values of one 16-bit number each for every word.
        return KVCacheSpec.keys_and_values(num_heads, layer.num_words, "bfloat16", layer.window)

    groups: dict[int, list[OracleLayer]] = {}
    for layer in layers:
        if not layer.is_draft:
            groups.setdefault(layer.group, []).append(layer)
    return KVCacheConfig(
        num_blocks,
        block_size,
        tuple(KVCacheGroup(tuple(each.name for each in of), spec(of[0])) for _, of in sorted(groups.items())),
        tuple(
            AttachedLayer(each.name, spec(each), each.group, each.num_tokens_ahead) for each in layers if each.is_draft
        ),
    )


@dataclass(slots=True)
class Answer:
    """The expected results of a prompt: its tokens, their continuation, and the content of every slot. An adapter's
    `seed` changes the content of the target's layers.
    """

    layers: tuple[OracleLayer, ...]
    num_prompt_tokens: int
    token_ids: list[int]
    seed: int = 0
    chains: dict[tuple[str, int], array[int]] = field(default_factory=dict[tuple[str, int], "array[int]"])

    def output(self, count: int) -> list[int]:
        """Returns the first `count` tokens after the prompt."""
        self._extend(self.num_prompt_tokens + count)
        return self.token_ids[self.num_prompt_tokens : self.num_prompt_tokens + count]

    def token(self, position: int) -> int:
        self._extend(position + 1)
        return self.token_ids[position]

    def slots(self, layer_name: str, head: int, start: int, end: int) -> bytes:
        """Returns the expected content of the slots [start, end)."""
        self._extend(end + 1)
        num_words = next(layer.num_words for layer in self.layers if layer.name == layer_name)
        return stored_words(self._chain(layer_name, head, end)[start:end], num_words).tobytes()

    def draft_checksum(self, layer: OracleLayer, position: int) -> int:
        """Returns the checksum of the slots that a drafter reads when it predicts the token at `position`."""
        checksum = 0
        for head in range(NUM_HEADS):
            checksum = crc32(self.slots(layer.name, head, layer.first_seen(position), position), checksum)
        return checksum

    def _extend(self, length: int) -> None:
        for position in range(len(self.token_ids), length):
            checksum = 0
            for layer in self.layers:
                for head in range(0 if layer.is_draft else NUM_HEADS):
                    chain = self._chain(layer.name, head, position)
                    seen = chain[layer.first_seen(position) : position]
                    # Most layers store the digests themselves.
                    seen = seen if layer.num_words == 1 else stored_words(seen, layer.num_words)
                    checksum = crc32(seen.tobytes(), checksum)
            self.token_ids.append(checksum % VOCAB_SIZE)

    def _chain(self, layer_name: str, head: int, length: int) -> array[int]:
        chain = self.chains.setdefault((layer_name, head), array("I"))
        if len(chain) < length:
            ahead, is_draft = next((e.num_tokens_ahead, e.is_draft) for e in self.layers if e.name == layer_name)
            salt = layer_salts(layer_name)[head] + (0 if is_draft else self.seed)
            for position in range(len(chain), length):
                before = chain[position - 1] if position else 0
                chain.append(slot_digest(self.token_ids[position + ahead], position, salt, before))
        return chain


class Answers:
    """The correct answer to every prompt with every adapter, computed once."""

    def __init__(self, layers: tuple[OracleLayer, ...]) -> None:
        self._layers = layers
        self._answers: dict[tuple[int, tuple[int, ...]], Answer] = {}

    def of(self, prompt: tuple[int, ...], seed: int = 0) -> Answer:
        if (seed, prompt) not in self._answers:
            self._answers[seed, prompt] = Answer(self._layers, len(prompt), list(prompt), seed)
        return self._answers[seed, prompt]

    def known(self, prompt: tuple[int, ...], seed: int) -> Answer:
        """Returns the answer to a prompt that a client has sent. A rank that takes some output for a part of the prompt
        would apply penalties to the wrong tokens.
        """
        is_known = (seed, prompt) in self._answers
        assert is_known, f"no client has sent a prompt of these {len(prompt)} tokens with this adapter"
        return self._answers[seed, prompt]


class OracleMemory:
    """One rank's KV memory, a `KVCacheView`. A block of a layer is [heads of the rank, block_size, words of a slot]; of
    a recurrent layer, [heads of the rank].

    As in a real cache, the j-th layers of all groups of one size share memory, but for the recurrent ones.
    """

    read_blocks, write_blocks = read_now, write_now

    def __init__(self, config: KVCacheConfig, shard: ShardId, heads: range) -> None:
        self.config = config
        self.shard = shard
        self.heads = heads
        self.block_size = config.block_size
        self._specs = {name: group.spec for group in config.groups for name in group.layer_names}
        self._specs |= {layer.name: layer.spec for layer in config.attached}
        shared = {size: [self._allocate(spec) for spec in specs] for size, specs in config.shared_specs.items()}
        self.regions: dict[str, bytearray] = {}
        for group in config.groups:
            spec, names = group.spec, group.layer_names
            own = [self._allocate(spec) for _ in names] if spec.is_recurrent else shared.get(spec.token_bytes, [])
            self.regions.update(zip(names, own, strict=False))
        self.regions.update((layer.name, self._allocate(layer.spec)) for layer in config.attached)
        self.words = {name: memoryview(region).cast("I") for name, region in self.regions.items()}
        self._names = [
            (*group.layer_names, *(layer.name for layer in config.attached if layer.group == number))
            for number, group in enumerate(config.groups)
        ]
        self.layout = self._describe()

    def _allocate(self, spec: KVCacheSpec) -> bytearray:
        return bytearray(_POISON * (self.config.num_blocks_of(spec) * self._num_words(spec)))

    def _num_words(self, spec: KVCacheSpec) -> int:
        """Returns the words of a block of one layer."""
        return len(self.heads) * spec.rows_per_block(self.block_size) * spec.planes[0].head_size

    def stride(self, layer_name: str) -> int:
        """Returns the bytes of a block of one layer."""
        return self._num_words(self._specs[layer_name]) * WORD_BYTES

    def _describe(self) -> KVLayout:
        """Describes the layout: a slot is a key and a value, each of 16 bits for every word, or a state of 32."""
        layers = [self._describe_layer(name, group) for group, names in enumerate(self._names) for name in names]
        regions = [MemoryRegion(name, len(region)) for name, region in self.regions.items()]
        return KVLayout(self.block_size, tuple(regions), tuple(layers))

    def _describe_layer(self, name: str, group: int) -> LayerLayout:
        heads, spec = self.heads, self._specs[name]
        size, num_planes = spec.rows_per_block(self.block_size), len(spec.planes)
        num_words, num_bytes = spec.planes[0].head_size, spec.planes[0].head_size * WORD_BYTES
        return LayerLayout(
            name=name,
            group=group,
            region=name,
            offset=0,
            dtype=spec.dtype,
            axes=("block", "head", "token", "kv", "dim"),
            shape=(self.config.num_blocks_of(spec), len(heads), size, num_planes, num_words),
            strides=(
                self.stride(name),
                size * num_bytes,
                num_bytes,
                num_bytes // num_planes,
                WORD_BYTES // num_planes,
            ),
            heads=(heads.start, heads.stop),
            first_block=self.config.first_block(spec),
            is_recurrent=spec.is_recurrent,
        )

    def layer_names(self, group: int) -> tuple[str, ...]:
        return self._names[group]

    def region_memory(self) -> list[memoryview]:
        return [memoryview(self.regions[region.name]) for region in self.layout.regions]

    def _block(self, layer_name: str, block_id: int) -> memoryview:
        stride = self.stride(layer_name)
        start = (block_id - self.config.first_block(self._specs[layer_name])) * stride
        return memoryview(self.regions[layer_name])[start : start + stride]

    def block_parts(self, group: int, block_id: int) -> list[memoryview]:
        return [self._block(name, block_id) for name in self._names[group]]

    def read_layer(self, layer_name: str, block_id: int, into: memoryview) -> None:
        into[:] = self._block(layer_name, block_id)

    def write_layer(self, layer_name: str, block_id: int, data: memoryview) -> None:
        self._block(layer_name, block_id)[:] = data

    def head_bytes(self, layer_name: str, block_id: int, head: int) -> memoryview:
        """Returns one head of a block of a layer: the words of [block_size] slots, or a state."""
        num_bytes = self.stride(layer_name) // len(self.heads)
        start = (head - self.heads.start) * num_bytes
        return self._block(layer_name, block_id)[start : start + num_bytes]

    def advance(
        self, layer: OracleLayer, table: Sequence[int], start: int, tokens: Sequence[int], num_drafts: int, seed: int
    ) -> dict[tuple[int, int], int]:
        """Computes a recurrent layer's digests of tokens from position `start` on, from the state before them, and
        stores the states after whole blocks that the table has, and after the last token but the drafts. Returns the
        digests by (head, position), with that before the first.
        """
        words, first = self.words[layer.name], self.config.num_blocks
        last = start + len(tokens) - num_drafts - 1
        assert last >= start, f"no token from {start} on is certain"

        def word(position: int, head: int) -> int | None:
            block_id = table[position // self.block_size]
            return None if block_id == NULL_BLOCK else (block_id - first) * len(self.heads) + head - self.heads.start

        digests: dict[tuple[int, int], int] = {}
        for head, salt in ((head, layer_salts(layer.name)[head] + seed) for head in self.heads):
            before = 0
            if start:
                at = word(start - 1, head)
                assert at is not None, f"there is no state before position {start}"
                before = words[at]
            digests[head, start - 1] = before
            for position, token in enumerate(tokens, start):
                before = digests[head, position] = slot_digest(token, position, salt, before)
                if position == last or (position < last and (position + 1) % self.block_size == 0):
                    at = word(position, head)
                    assert at is not None or position != last, f"there is no block for the state after {position}"
                    if at is not None:
                        words[at] = before
        return digests

    def write(self, layer: OracleLayer, table: Sequence[int], start: int, tokens: Sequence[int], seed: int) -> None:
        """Computes the slots of tokens from position `start` on, each from the actual content of the previous slot."""
        words = self.words[layer.name]
        salts = layer_salts(layer.name)
        for head in self.heads:
            salt = salts[head] + seed
            before = words[self._word(layer, table, start - 1, head)] if start else 0
            for position, token in enumerate(tokens, start):
                before = slot_digest(token, position, salt, before)
                word = self._word(layer, table, position, head)
                if layer.num_words == 1:
                    words[word] = before
                else:
                    words[word : word + layer.num_words] = memoryview(stored_words([before], layer.num_words))

    def read(self, layer: OracleLayer, table: Sequence[int], start: int, end: int) -> list[int]:
        """Returns the first words of the slots [start, end), head by head."""
        words = self.words[layer.name]
        places = [(position, head) for head in self.heads for position in range(start, end)]
        return [words[self._word(layer, table, *place)] for place in places]

    def checksum(self, layer: OracleLayer, table: Sequence[int], position: int, before: int) -> int:
        """Returns the checksum of everything that a query at `position` reads, head by head; continues the checksum
        `before`.
        """
        words = self.words[layer.name]
        for head in self.heads:
            start = layer.first_seen(position)
            while start < position:
                end = min(position, (start // self.block_size + 1) * self.block_size)
                word = self._word(layer, table, start, head)
                before = crc32(words[word : word + (end - start) * layer.num_words], before)
                start = end
        return before

    def _word(self, layer: OracleLayer, table: Sequence[int], position: int, head: int) -> int:
        """Returns the place of a slot's first word."""
        index, offset = divmod(position, self.block_size)
        assert NULL_BLOCK < table[index] < self.config.num_blocks, f"the step reads or writes block {table[index]}"
        slot = (table[index] * len(self.heads) + head - self.heads.start) * self.block_size + offset
        return slot * layer.num_words

    def poison(self, block_ids: Iterable[int]) -> None:
        """Poisons these blocks, so that reads of their former content are detected."""
        for block_id in block_ids:
            for name, spec in self._specs.items():
                if spec.is_recurrent == (block_id >= self.config.num_blocks):
                    self._block(name, block_id)[:] = _POISON * self._num_words(spec)
