"""The block pool: allocation, eviction order, fences and pins."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.core.block_pool import BlockPool, BlockState
from penstock.messages.kv_transfer import TransferId

READER, WRITER = TransferId("reader", 0), TransferId("writer", 0, part=1)


def key(number: int) -> tuple[int, bytes]:
    return (0, number.to_bytes(4, "big"))


def test_released_blocks_are_free() -> None:
    pool = BlockPool(5)
    ids = pool.allocate(4)
    assert sorted(ids) == [1, 2, 3, 4]
    assert pool.num_available == 0
    pool.release(ids)
    assert pool.map(1).counts["f"] == 4
    pool.check_integrity([])


def test_the_tail_is_evicted_before_its_head_and_the_oldest_first() -> None:
    pool = BlockPool(6)
    old, new = pool.allocate(2), pool.allocate(2)
    for number, block in enumerate(old + new):
        pool.publish(block, key(number))
    pool.release(old)
    pool.release(new)
    # One block never had content and is taken first; then the older request's tail, then its head.
    assert pool.allocate(3) == [5, old[1], old[0]]
    assert pool.find(key(0)) is None
    assert pool.find(key(2)) == new[0]


def test_a_hit_makes_a_cached_block_owned() -> None:
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.publish(block, key(1))
    pool.release([block])
    assert pool.state(block) is BlockState.CACHED
    pool.pin(READER, [block], writes=False)
    pool.acquire([block])
    pool.acquire([block])
    assert pool.state(block) is BlockState.OWNED
    pool.unpin(READER)  # A hit does not change the block's content.
    pool.release([block])
    pool.check_integrity([[block]])
    pool.release([block])
    pool.check_integrity([])


def test_the_reallocation_of_a_pinned_block_is_detected() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.pin(WRITER, [block], writes=True)
    pool.release([block])
    pool._kv.free.append(block)  # the bug
    assert pool.allocate(1) == [block]
    with pytest.raises(AssertionError, match=r"was reallocated while writer#0\.1 pinned it"):
        pool.check_integrity([[block]])
    with pytest.raises(AssertionError, match=r"was reallocated under writer#0\.1"):
        pool.unpin(WRITER)


def test_a_fence_keeps_blocks_until_the_step_is_processed() -> None:
    pool = BlockPool(4)
    ids = pool.allocate(3)
    pool.release(ids, fence=7)
    assert pool.num_available == 0
    assert pool.has_room(3, 0, with_fenced=True)
    assert not pool.has_room(1, 0)
    pool.check_integrity([])
    pool.on_step_processed(6)
    assert pool.num_available == 0
    pool.on_step_processed(7)
    assert pool.num_available == 3
    pool.check_integrity([])


def test_a_fenced_block_can_be_hit_and_is_then_not_freed_by_its_fence() -> None:
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.publish(block, key(1))
    pool.release([block], fence=1)
    pool.acquire([block])
    pool.on_step_processed(1)
    assert pool.state(block) is BlockState.OWNED
    pool.check_integrity([[block]])
    assert pool.num_available == 1


def test_a_pin_outlives_the_owner() -> None:
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.pin(READER, [block], writes=False)
    pool.release([block])
    assert pool.num_available == 1
    assert pool.state(block) is BlockState.FREE
    pool.check_integrity([])
    pool.unpin(READER)
    assert pool.num_available == 2


def test_a_block_is_loading_until_its_writer_ends() -> None:
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.pin(WRITER, [block], writes=True)
    assert pool.state(block) is BlockState.LOADING
    pool.release([block])
    assert pool.state(block) is BlockState.LOADING
    assert pool.num_available == 1, "a destination must not be handed out while bytes may still arrive"
    pool.unpin(WRITER)
    assert pool.num_available == 2
    pool.check_integrity([])


def test_the_cache_is_cleared_only_without_owners_and_pins() -> None:
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.publish(block, key(1))
    assert not pool.clear_cache()
    pool.release([block])
    assert pool.clear_cache()
    assert pool.find(key(1)) is None
    pool.check_integrity([])


def test_states_are_blocks_of_another_kind() -> None:
    pool = BlockPool(4, num_states=3)
    blocks, states = pool.allocate(2), pool.allocate(2, for_states=True)
    assert set(blocks) <= {1, 2, 3}
    assert set(states) <= {4, 5, 6}
    assert pool.count([0, *blocks, *states]) == {False: 2, True: 2}
    assert pool.has_room(1, 1)
    assert not pool.has_room(2, 0)
    assert not pool.has_room(0, 2)
    pool.publish(states[0], (1, b"a"))
    pool.release(states, fence=5)
    assert not pool.has_room(0, 2)
    assert pool.has_room(0, 3, with_fenced=True)
    assert not pool.has_room(2, 3, with_fenced=True), "a fence of states gives no room for tokens"
    pool.on_step_processed(5)
    assert pool.has_room(0, 3)
    assert not pool.has_room(0, 3, taken=[states[0]]), "a cached state that is taken makes no room"
    assert not pool.is_unused
    pool.check_integrity([blocks])
    pool.release(blocks)
    assert pool.is_unused
    assert pool.clear_cache()
    assert pool.find((1, b"a")) is None
    pool.check_integrity([])


DAMAGE: dict[str, tuple[Callable[[BlockPool], object], str]] = {
    "a pin of a free block": (lambda pool: setattr(pool._blocks[7], "num_pins", 1), "block 7: owners, pins, writers"),
    "an owner too many": (lambda pool: setattr(pool._blocks[1], "num_owners", 2), "block 1: owners, pins, writers"),
    "a lost block": (lambda pool: pool._kv.free.remove(7), "a block is lost"),
    "a block that is free twice": (lambda pool: pool._kv.free.append(7), "a block is free twice"),
    "an owned block that is free": (lambda pool: pool._kv.free.append(1), "free, but with an owner"),
    "the null block": (lambda pool: pool._kv.free.append(0), "free, but with an owner"),
    "content of a free block": (lambda pool: setattr(pool._blocks[7], "key", (0, b"k")), "block 7"),
    "an owned block that is evicted next": (lambda pool: pool._kv.evictable.update({1: None}), "block 1"),
    "an entry without its block": (lambda pool: pool._cached.update({(0, b"k"): {7: None}}), "1, 0"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_the_check_finds_damage(damage: str) -> None:
    pool = BlockPool(10)
    table = pool.allocate(2)
    assert table == [1, 2]
    pool.check_integrity([table])
    harm, message = DAMAGE[damage]
    harm(pool)
    with pytest.raises(AssertionError, match=message):
        pool.check_integrity([table])
