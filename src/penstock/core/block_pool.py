"""The block pool: the only place where the ownership of KV blocks changes.

Every block is in one state:

    FREE      no owner, and its content has no meaning
    CACHED    no owner, and its content can be found by its hash until it is evicted
    OWNED     it is in the block tables of one or more requests
    LOADING   a transfer is writing into it, outside the forward pass

A block may also be *pinned*: by transfers that read or write it, and by a step in flight that may still write it (a
fence). A block is reallocated only when it has neither owner nor pin. `release` removes an owner, `unpin` the pins of a
transfer and `on_step_processed` a fence; each ends at its own terminal event and never because time has passed. Each
allocation increments the block's generation, by which `unpin` checks that a pinned block has not been reallocated.

Block 0 is the null block: it has no owner and is never allocated. A model with recurrent layers has a second kind of
blocks, for their states: the same rules apply to them, and only allocation and availability are counted by kind.
"""

from __future__ import annotations

import enum
import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from penstock.messages.kv_cache_spec import NULL_BLOCK
from penstock.messages.kv_transfer import TransferId
from penstock.messages.stats import BlockMap, StateCounts
from penstock.utils.math import cdiv

BlockKey = tuple[int, bytes]
"""(KV group, block hash): the lookup key of a cached block."""

_BUSY = "fcpol"
"""The letters of `BlockMap`, ordered from idle to busy: the states, and p for a pinned block without an owner."""


class BlockState(enum.Enum):
    FREE = "f"
    CACHED = "c"
    OWNED = "o"
    LOADING = "l"


@dataclass(slots=True)
class Block:
    num_owners: int = 0
    num_pins: int = 0
    num_writers: int = 0
    generation: int = 0
    key: BlockKey | None = None


@dataclass(slots=True)
class _Pinned:
    """A transfer's pinned blocks, with their generations at the time of the pin."""

    writes: bool
    blocks: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])


def _ignore_removal(_: BlockKey) -> None: ...


class _Available:
    """The available blocks of one kind: first those without content, the last freed first, then cached ones by last
    use.
    """

    def __init__(self, block_ids: range) -> None:
        self.num_usable = len(block_ids)
        self.free = list(reversed(block_ids))
        self.evictable: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self.free) + len(self.evictable)

    def take(self, num_blocks: int) -> list[int]:
        assert num_blocks <= len(self), (num_blocks, len(self))
        block_ids = [self.free.pop() for _ in range(min(num_blocks, len(self.free)))]
        return block_ids + [self.evictable.popitem(last=False)[0] for _ in range(num_blocks - len(block_ids))]


class BlockPool:
    """`num_blocks` blocks including the null block, so `num_blocks - 1` can be allocated, which may be zero; then
    `num_states` blocks for states.

    `on_removed` is called with the key of content that no block has any more.
    """

    def __init__(
        self, num_blocks: int, on_removed: Callable[[BlockKey], None] = _ignore_removal, num_states: int = 0
    ) -> None:
        assert num_blocks >= 1, num_blocks
        self._on_removed = on_removed
        self.num_usable = num_blocks - 1
        self.num_states = num_states
        self._first_state = num_blocks
        self._blocks = [Block() for _ in range(num_blocks + num_states)]
        self._kv = _Available(range(1, num_blocks))
        self._states = _Available(range(num_blocks, num_blocks + num_states))
        self._cached: dict[BlockKey, dict[int, None]] = {}
        self._pinned: dict[TransferId, _Pinned] = {}
        self._fences: OrderedDict[int, list[int]] = OrderedDict()
        self._processed_step = 0

    @property
    def num_available(self) -> int:
        """Returns the number of blocks that can be allocated now, without those for states."""
        return len(self._kv)

    @property
    def state_counts(self) -> StateCounts:
        return StateCounts(self.num_states - len(self._states), len(self._states.evictable))

    @property
    def is_unused(self) -> bool:
        """Returns whether no block of any kind has an owner or a pin."""
        return all(len(kind) == kind.num_usable for kind in (self._kv, self._states))

    def has_room(self, num_blocks: int, num_states: int, taken: Sequence[int] = (), with_fenced: bool = False) -> bool:
        """Returns whether so many blocks of each kind can be allocated after `taken`, which exist, are acquired;
        `with_fenced` counts unowned blocks that become available once the steps in flight are processed.
        """
        room, room_for_states = len(self._kv) - num_blocks, len(self._states) - num_states
        for block_id in taken:
            room -= block_id in self._kv.evictable
            room_for_states -= block_id in self._states.evictable
        if with_fenced:
            fenced = [i for ids in self._fences.values() for i in ids if self._blocks[i].num_owners == 0]
            states = sum(self._is_state(block_id) for block_id in fenced)
            room, room_for_states = room + len(fenced) - states, room_for_states + states
        return room >= 0 and room_for_states >= 0

    def count(self, block_ids: Iterable[int]) -> Counter[bool]:
        """Counts these blocks by whether they are of states; the null block does not count."""
        return Counter(self._is_state(block_id) for block_id in block_ids if block_id != NULL_BLOCK)

    def _is_state(self, block_id: int) -> bool:
        return block_id >= self._first_state

    def _kind(self, block_id: int) -> _Available:
        return self._states if self._is_state(block_id) else self._kv

    def state(self, block_id: int) -> BlockState:
        block = self._blocks[block_id]
        if block.num_writers:
            return BlockState.LOADING
        if block.num_owners:
            return BlockState.OWNED
        return BlockState.CACHED if block.key is not None else BlockState.FREE

    def map(self, max_cells: int) -> BlockMap:
        """Returns the states of the pool's blocks, without the null block and those of recurrent layers, as at most
        `max_cells` letters.
        """
        letters = [self._letter(block_id) for block_id in range(1, self._first_state)]
        per_cell = max(1, cdiv(len(letters), max_cells))
        cells = (max(letters[start : start + per_cell], key=_BUSY.index) for start in range(0, len(letters), per_cell))
        counts = Counter(letters)
        return BlockMap("".join(cells), {letter: counts[letter] for letter in _BUSY})

    def _letter(self, block_id: int) -> str:
        block = self._blocks[block_id]
        is_pinned = block.num_pins and not (block.num_writers or block.num_owners)
        return "p" if is_pinned else self.state(block_id).value

    def allocate(self, num_blocks: int, for_states: bool = False) -> list[int]:
        """Allocates blocks with one owner each, evicting the oldest cached content first."""
        block_ids = (self._states if for_states else self._kv).take(num_blocks)
        for block_id in block_ids:
            block = self._blocks[block_id]
            self._forget(block_id)
            block.generation += 1
            block.num_owners = 1
        return block_ids

    def find(self, key: BlockKey) -> int | None:
        """Returns a block with this content, or None."""
        ids = self._cached.get(key)
        return next(iter(ids)) if ids else None

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Adds one owner to each of these cached or owned blocks."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            assert block.key is not None, f"block {block_id} is shared without published content"
            block.num_owners += 1
            self._kind(block_id).evictable.pop(block_id, None)

    def is_published(self, block_id: int) -> bool:
        """Returns whether the block's content can be found by its hash."""
        return self._blocks[block_id].key is not None

    def publish(self, block_id: int, key: BlockKey) -> bool:
        """Adds an owned, complete block to the prefix cache; returns True when no other block has this content.

        Its content must never change from now on.
        """
        block = self._blocks[block_id]
        assert block.num_owners and not block.num_writers, (block_id, block)
        assert block.key is None, f"block {block_id} is published twice"
        block.key = key
        ids = self._cached.setdefault(key, {})
        ids[block_id] = None
        return len(ids) == 1

    def release(self, block_ids: Sequence[int], fence: int = 0) -> None:
        """Removes one owner from these blocks, which are ordered from the head of its prompt to the tail.

        Blocks that lose their last owner wait until step `fence` has been processed; then they become available. The
        tail is evicted first, because a head without its tail can still give a prefix hit, but not the reverse.
        """
        orphans: list[int] = []
        for block_id in reversed(block_ids):
            if block_id == NULL_BLOCK:
                continue
            block = self._blocks[block_id]
            assert block.num_owners > 0, f"block {block_id} has no owner to lose"
            block.num_owners -= 1
            if block.num_owners == 0:
                orphans.append(block_id)
        if fence > self._processed_step and orphans:
            for block_id in orphans:
                self._blocks[block_id].num_pins += 1
            self._fences.setdefault(fence, []).extend(orphans)
        else:
            self._make_available(orphans)

    def on_step_processed(self, step: int) -> None:
        """Called when the device has finished `step`: blocks that waited for it become available."""
        assert step >= self._processed_step, (step, self._processed_step)
        self._processed_step = step
        for fence in [fence for fence in self._fences if fence <= step]:
            self._remove_pins(self._fences.pop(fence))

    def pin(self, transfer_id: TransferId, block_ids: Iterable[int], writes: bool) -> None:
        """Pins blocks, which must not be free, for a transfer until `unpin`; `writes` puts them into LOADING."""
        pinned = self._pinned.setdefault(transfer_id, _Pinned(writes))
        assert pinned.writes == writes, transfer_id
        for block_id in block_ids:
            block = self._blocks[block_id]
            assert block.key is None or not writes, f"block {block_id} is published and cannot be written"
            assert self.state(block_id) is not BlockState.FREE or block.num_pins, f"block {block_id} is free"
            pinned.blocks.append((block_id, block.generation))
            block.num_pins += 1
            block.num_writers += writes
            self._kind(block_id).evictable.pop(block_id, None)

    def unpin(self, transfer_id: TransferId) -> None:
        """Removes the pins of a transfer that has ended, with success or failure."""
        pinned = self._pinned.pop(transfer_id)
        for block_id, generation in pinned.blocks:
            block = self._blocks[block_id]
            assert block.generation == generation, f"block {block_id} was reallocated under {transfer_id}: {block}"
            block.num_writers -= pinned.writes
        self._remove_pins(block_id for block_id, _ in pinned.blocks)

    def clear_cache(self) -> bool:
        """Removes all cached content. Returns False, and does nothing, while any block has an owner or a pin."""
        if not self.is_unused:
            return False
        for kind in (self._kv, self._states):
            kind.free.extend(kind.evictable)
            for block_id in kind.evictable:
                self._forget(block_id)
            kind.evictable.clear()
        return True

    def _remove_pins(self, block_ids: Iterable[int]) -> None:
        """Removes one pin from each of these blocks."""
        orphans: list[int] = []
        for block_id in block_ids:
            block = self._blocks[block_id]
            block.num_pins -= 1
            if block.num_owners == 0 and block.num_pins == 0:
                orphans.append(block_id)
        self._make_available(orphans)

    def _make_available(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            block = self._blocks[block_id]
            if block.num_pins:
                continue
            if block.key is None:
                self._kind(block_id).free.append(block_id)
            else:
                self._kind(block_id).evictable[block_id] = None

    def _forget(self, block_id: int) -> None:
        block = self._blocks[block_id]
        if block.key is not None:
            ids = self._cached[block.key]
            del ids[block_id]
            if not ids:
                del self._cached[block.key]
                self._on_removed(block.key)
            block.key = None

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Recomputes every count from the block tables of all requests and from the pins; asserts that all agree."""
        owners = Counter(block_id for table in tables for block_id in table if block_id != NULL_BLOCK)
        pins = Counter(block_id for ids in self._fences.values() for block_id in ids)
        writers: Counter[int] = Counter()
        for transfer_id, pinned in self._pinned.items():
            for block_id, generation in pinned.blocks:
                was_kept = self._blocks[block_id].generation == generation
                assert was_kept, f"block {block_id} was reallocated while {transfer_id} pinned it"
                pins[block_id] += 1
                writers[block_id] += pinned.writes
        free = {*self._kv.free, *self._states.free}
        assert len(free) == len(self._kv.free) + len(self._states.free), "a block is free twice"
        first = self._first_state
        assert max(self._kv.free, default=0) < first <= min(self._states.free, default=first), "mixed kinds"
        # Most blocks of a large pool are free: what follows for each block must be cheap.
        has_counts = [each.num_owners or each.num_pins or each.num_writers for each in self._blocks]
        with_key = {block_id for block_id, each in enumerate(self._blocks) if each.key is not None}
        marked = {*itertools.compress(itertools.count(), has_counts), *with_key, *owners, *pins}
        marked.update(self._kv.evictable, self._states.evictable)
        for block_id in marked:
            block = self._blocks[block_id]
            found = (block.num_owners, block.num_pins, block.num_writers)
            expected = (owners[block_id], pins[block_id], writers[block_id])
            assert found == expected, f"block {block_id}: owners, pins, writers {found}, expected {expected}"
            is_evictable = block_id in self._kind(block_id).evictable
            is_available = block_id != NULL_BLOCK and not owners[block_id] and not pins[block_id]
            assert is_evictable == (is_available and block.key is not None), f"block {block_id}: {block}"
            if block.key is not None:
                assert block_id in self._cached.get(block.key, {}), f"block {block_id} lost its entry"
        marked.add(NULL_BLOCK)
        assert free.isdisjoint(marked), f"free, but with an owner, a pin or content: {free & marked}"
        assert len(free) + len(marked) == len(self._blocks), "a block is lost, which is neither free nor in use"
        num_entries = sum(len(ids) for ids in self._cached.values())
        assert num_entries == len(with_key), (num_entries, len(with_key))
