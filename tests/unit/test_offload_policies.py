"""Eviction policies compared with simple models, and the bounds of ARC."""

from __future__ import annotations

from collections.abc import Callable, Collection

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.kv_transfer.offload import OffloadKey
from penstock.kv_transfer.offload.policies import ARCPolicy, CachePolicy, LRUPolicy

CAPACITY = 6
KEYS = [(group, bytes([number])) for group in range(2) for number in range(8)]
keys = st.sampled_from(KEYS)
key_sets = st.lists(keys, max_size=4, unique=True)


class NaiveLRU:
    def __init__(self) -> None:
        self.moment = 0
        self.ages: dict[OffloadKey, tuple[int, int]] = {}
        self.pinned: set[OffloadKey] = set()

    def insert(self, key: OffloadKey, moment: int, place: int) -> None:
        self.ages[key] = (moment, -place)

    def refresh(self, used: Collection[OffloadKey]) -> int:
        self.moment += 1
        for key in used:
            self.ages[key] = (self.moment, self.ages[key][1])
        return self.moment

    touch = refresh

    def remove(self, key: OffloadKey) -> None:
        del self.ages[key]
        self.pinned.discard(key)

    def evictable(self, members: Collection[OffloadKey], protected: Collection[OffloadKey]) -> list[OffloadKey]:
        found: list[OffloadKey] = []
        protected_moments: set[int] = set()
        for key in sorted(set(members) - self.pinned, key=lambda key: (*self.ages[key], key)):
            moment, _ = self.ages[key]
            if key in protected:
                protected_moments.add(moment)
            elif moment not in protected_moments:
                found.append(key)
        return found

    def evict(self, count: int, protected: Collection[OffloadKey]) -> list[OffloadKey]:
        victims = self.evictable(self.ages, protected)[:count]
        for key in victims:
            self.remove(key)
        return victims


class NaiveARC(NaiveLRU):
    """Keeps the paper's lists as plain lists, key by key."""

    def __init__(self) -> None:
        super().__init__()
        self.used_again: set[OffloadKey] = set()
        self.b1: list[OffloadKey] = []
        self.b2: list[OffloadKey] = []
        self.target = 0.0

    def insert(self, key: OffloadKey, moment: int, place: int) -> None:
        super().insert(key, moment, place)
        if key in self.b1:
            self.target = min(CAPACITY, self.target + max(1, len(self.b2) / len(self.b1)))
        elif key in self.b2:
            self.target = max(0, self.target - max(1, len(self.b1) / len(self.b2)))
        if key in self.b1 + self.b2:
            self.used_again.add(key)
        self.b1 = [ghost for ghost in self.b1 if ghost != key]
        self.b2 = [ghost for ghost in self.b2 if ghost != key]
        self.trim()

    def touch(self, used: Collection[OffloadKey]) -> int:
        self.used_again |= set(used)
        return self.refresh(used)

    def remove(self, key: OffloadKey) -> None:
        super().remove(key)
        self.used_again.discard(key)

    def evict(self, count: int, protected: Collection[OffloadKey]) -> list[OffloadKey]:
        victims: list[OffloadKey] = []
        while len(victims) < count:
            once = self.evictable(self.ages.keys() - self.used_again, protected)
            again = self.evictable(self.ages.keys() & self.used_again, protected)
            if not once + again:
                break
            num_t1 = len(self.ages.keys() - self.used_again)
            victim = once[0] if once and (num_t1 > self.target or not again) else again[0]
            (self.b1 if victim in once else self.b2).append(victim)
            victims.append(victim)
            self.remove(victim)
        self.trim()
        return victims

    def trim(self) -> None:
        num_t1 = len(self.ages.keys() - self.used_again)
        while num_t1 + len(self.b1) > CAPACITY:
            self.b1.pop(0)
        while len(self.ages) + len(self.b1) + len(self.b2) > 2 * CAPACITY:
            self.b2.pop(0)


class PolicyMachine(RuleBasedStateMachine):
    make_policy: Callable[[], CachePolicy]
    make_model: type[NaiveLRU]

    @initialize()
    def start(self) -> None:
        self.policy = type(self).make_policy()
        self.model = type(self).make_model()

    def members(self, chosen: Collection[OffloadKey]) -> list[OffloadKey]:
        return [key for key in chosen if key in self.model.ages]

    @precondition(lambda self: len(self.model.ages) < CAPACITY)
    @rule(key=keys, place=st.integers(0, 4), used=key_sets)
    def insert(self, key: OffloadKey, place: int, used: list[OffloadKey]) -> None:
        if key in self.model.ages:
            return
        moment = self.policy.refresh(self.members(used))
        assert moment == self.model.refresh(self.members(used))
        self.policy.insert(key, moment, place)
        self.model.insert(key, moment, place)

    @rule(used=key_sets)
    def touch(self, used: list[OffloadKey]) -> None:
        self.policy.touch(self.members(used))
        self.model.touch(self.members(used))

    @rule(chosen=key_sets)
    def pin(self, chosen: list[OffloadKey]) -> None:
        for key in self.members(chosen):
            if key not in self.model.pinned:
                self.policy.pin(key)
                self.model.pinned.add(key)

    @rule(chosen=key_sets)
    def unpin(self, chosen: list[OffloadKey]) -> None:
        for key in self.members(chosen):
            if key in self.model.pinned:
                self.policy.unpin(key)
                self.model.pinned.discard(key)

    @rule(chosen=key_sets)
    def remove(self, chosen: list[OffloadKey]) -> None:
        for key in self.members(chosen)[:1]:
            self.policy.remove(key)
            self.model.remove(key)

    @rule(count=st.integers(0, 5), protected=key_sets)
    def evict(self, count: int, protected: list[OffloadKey]) -> None:
        assert self.policy.evict(count, protected) == self.model.evict(count, protected)

    @invariant()
    def agrees(self) -> None:
        assert self.policy.members() == {key: key in self.model.pinned for key in self.model.ages}
        assert self.policy.num_unpinned == len(self.model.ages) - len(self.model.pinned)


class LRUMachine(PolicyMachine):
    make_policy = LRUPolicy
    make_model = NaiveLRU


class ARCMachine(PolicyMachine):
    make_policy = staticmethod(lambda: ARCPolicy(CAPACITY))
    make_model = NaiveARC

    @invariant()
    def within_bounds(self) -> None:
        self.policy.check_integrity()
        model = self.model
        assert self.policy._target == pytest.approx(model.target)
        assert list(self.policy._b1) == model.b1
        assert list(self.policy._b2) == model.b2


TestLRU = LRUMachine.TestCase
TestARC = ARCMachine.TestCase
for case in (TestLRU, TestARC):
    case.settings = settings(max_examples=120, stateful_step_count=40)


def fill(policy: CachePolicy, names: str) -> None:
    moment = policy.refresh([])
    for place, name in enumerate(names):
        policy.insert((0, name.encode()), moment, place)


def test_a_tail_is_evicted_before_its_head() -> None:
    for policy in (LRUPolicy(), ARCPolicy(6)):
        fill(policy, "abc")
        assert policy.evict(2, []) == [(0, b"c"), (0, b"b")]


def test_a_protected_key_protects_its_head() -> None:
    for policy in (LRUPolicy(), ARCPolicy(6)):
        fill(policy, "abc")
        fill(policy, "xy")
        assert policy.evict(9, [(0, b"b")]) == [(0, b"c"), (0, b"y"), (0, b"x")]
        assert policy.evict(9, [(0, b"b")]) == []
        assert policy.evict(9, []) == [(0, b"b"), (0, b"a")]


def test_storing_a_later_tail_refreshes_its_head() -> None:
    for policy in (LRUPolicy(), ARCPolicy(6)):
        fill(policy, "ab")
        fill(policy, "xy")
        moment = policy.refresh([(0, b"a"), (0, b"b")])
        policy.insert((0, b"c"), moment, 2)
        assert policy.evict(3, []) == [(0, b"y"), (0, b"x"), (0, b"c")]


def test_a_key_that_is_kept_with_a_prompt_becomes_no_older() -> None:
    for policy in (LRUPolicy(), ARCPolicy(6)):
        fill(policy, "a")
        fill(policy, "b")
        policy.keep_with((0, b"a"), policy.refresh([]))
        policy.keep_with((0, b"b"), 1)
        fill(policy, "c")
        assert policy.evict(3, []) == [(0, b"b"), (0, b"a"), (0, b"c")]


def test_arc_forgets_the_oldest_evicted_keys() -> None:
    policy = ARCPolicy(2)
    for number in range(9):
        key = (0, bytes([number]))
        policy.insert(key, policy.refresh([]), 0)
        policy.touch([key])
        assert policy.evict(1, []) == [key]
        policy.check_integrity()


def test_arc_keeps_reused_keys_during_a_scan() -> None:
    policy = ARCPolicy(4)
    fill(policy, "ab")
    policy.touch([(0, b"a"), (0, b"b")])
    for number in range(20):
        if policy.num_unpinned == 4:
            policy.evict(1, [])
        policy.insert((1, bytes([number])), policy.refresh([]), 0)
        policy.check_integrity()
    assert {(0, b"a"), (0, b"b")} <= policy.members().keys()


def test_arcs_target_stays_within_the_cache() -> None:
    policy = ARCPolicy(2)
    for number in range(6):
        key = (0, bytes([number]))
        policy.insert(key, policy.refresh([]), 0)
        assert policy.evict(1, []) == [key]
        policy.insert(key, policy.refresh([]), 0)
        policy.remove(key)
        policy.check_integrity()
    assert policy._target == 2


def test_many_touches_do_not_grow_the_heaps() -> None:
    policy = LRUPolicy()
    fill(policy, "abc")
    for _ in range(10_000):
        policy.touch([(0, b"a"), (0, b"b")])
    assert sum(map(len, policy._lists[0]._entries.values())) == policy._lists[0]._num_entries <= 2 * 3 + 16
    assert sorted(policy._lists[0]._moments) == sorted(policy._lists[0]._entries)
    assert policy.evict(1, []) == [(0, b"c")]
