"""The placement of experts: whatever the loads, every expert has a rank, and no rank has two copies of one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config.expert_parallel import SPARE, EPLBConfig, ExpertParallelConfig
from penstock.core import expert_placement
from penstock.core.expert_placement import (
    MIN_GAIN,
    Target,
    experts_of,
    next_round,
    pack,
    plan_target,
    rank_loads,
    replicate,
)


@st.composite
def parallels(draw: st.DrawFn) -> ExpertParallelConfig:
    num_ranks = draw(st.integers(2, 6))
    num_experts = draw(st.integers(num_ranks, 40))
    most = num_experts * (num_ranks - 1)
    redundant = draw(st.sampled_from([n for n in range(most + 1) if (num_experts + n) % num_ranks == 0]))
    return ExpertParallelConfig(
        num_experts=num_experts, num_redundant=redundant, num_ranks=num_ranks, balancing=EPLBConfig()
    )


def loads_of(parallel: ExpertParallelConfig) -> st.SearchStrategy[list[int]]:
    # Skewed as routers' loads are, and with equal and zero loads.
    load = st.one_of(st.integers(0, 3), st.integers(0, 1000), st.just(5000))
    return st.lists(load, min_size=parallel.num_experts, max_size=parallel.num_experts)


def check(placement: tuple[int, ...], parallel: ExpertParallelConfig) -> None:
    """Checks that all slots are filled, every expert is somewhere, and no rank has two copies of one."""
    ranks = experts_of(placement, parallel.num_ranks)
    assert [len(rank) for rank in ranks] == [parallel.num_slots] * parallel.num_ranks
    assert len(placement) - placement.count(SPARE) == parallel.num_slots * parallel.num_ranks, "two copies on a rank"
    assert set(placement) >= set(range(parallel.num_experts))


@given(parallels())
def test_the_initial_placement(parallel: ExpertParallelConfig) -> None:
    check(parallel.initial_placement(), parallel)


def walk(placement: tuple[int, ...], target: Target, parallel: ExpertParallelConfig) -> tuple[int, ...]:
    """Runs rounds until the target is reached; checks each."""
    for _ in range(parallel.num_slots * parallel.num_ranks + 1):
        after, copies = next_round(placement, target)
        if not copies:
            break
        check(after, parallel)
        for each in copies:
            assert placement[each.target] == SPARE
            assert placement[each.source] == each.expert == after[each.target]
        moved = {each.target for each in copies}
        assert len(moved) == len(copies)
        for buffer, (old, new) in enumerate(zip(placement, after, strict=True)):
            # Experts that stay keep their buffers.
            assert new in (old, SPARE) or buffer in moved
            rank = buffer // parallel.num_buffers
            assert new != SPARE or old == SPARE or old not in target[rank]
        placement = after
    assert experts_of(placement, parallel.num_ranks) == target
    return placement


@settings(max_examples=150)
@given(st.data())
def test_rounds_lead_from_any_placement_to_a_better_one(data: st.DataObject) -> None:
    parallel = data.draw(parallels())
    placement = parallel.initial_placement()
    for _ in range(3):
        loads = data.draw(loads_of(parallel))
        current = experts_of(placement, parallel.num_ranks)
        target = plan_target(loads, current)
        if target is None:
            continue
        before, after = (max(rank_loads(loads, ranks)) for ranks in (current, target))
        assert after <= (1 - MIN_GAIN) * before
        placement = walk(placement, target, parallel)


@settings(max_examples=100)
@given(st.data())
def test_any_target_is_reached(data: st.DataObject) -> None:
    """Also those that the policy would not choose."""
    parallel = data.draw(parallels())
    random = data.draw(st.randoms(use_true_random=False))
    placement = parallel.initial_placement()
    for _ in range(2):
        names = random.sample(range(parallel.num_experts), parallel.num_experts)
        target = tuple(
            frozenset(names[expert] for expert in rank) for rank in experts_of(placement, parallel.num_ranks)
        )
        placement = walk(placement, tuple(random.sample(target, len(target))), parallel)


@pytest.mark.parametrize("redundant", [0, 8, 32])
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_a_skewed_load_becomes_balanced(redundant: int, num_ranks: int) -> None:
    parallel = ExpertParallelConfig(num_experts=64, num_redundant=redundant, num_ranks=num_ranks)
    loads = [1000 / (71 - expert) for expert in range(64)]
    current = experts_of(parallel.initial_placement(), num_ranks)
    target = plan_target(loads, current)
    assert target is not None
    before, after = rank_loads(loads, current), rank_loads(loads, target)
    assert max(before) / (sum(before) / num_ranks) > 1.2
    assert max(after) / (sum(after) / num_ranks) < 1.1


def test_a_small_gain_changes_nothing() -> None:
    current = (frozenset({0, 1}), frozenset({2, 3}))
    assert plan_target([102, 100, 98, 100], current) is None
    assert plan_target([0, 0, 0, 0], current) is None
    assert plan_target([120, 100, 80, 20], current) is not None


@given(st.lists(st.integers(0, 99), min_size=1, max_size=20), st.integers(2, 6), st.integers(0, 20))
def test_redundant_copies_go_to_the_highest_load_per_copy(loads: list[int], num_ranks: int, further: int) -> None:
    slots = min(len(loads) + further, len(loads) * num_ranks)
    counts = replicate(loads, slots, num_ranks)
    assert sum(counts) == slots
    assert min(counts) >= 1
    assert max(counts) <= num_ranks
    for expert, count in enumerate(counts):
        if count < num_ranks:
            assert all(loads[expert] / count <= loads[i] / (n - 1) for i, n in enumerate(counts) if n > 1)


def test_groups_stay_in_one_node() -> None:
    loads = [19, 19, 9, 9, 1, 1, 2, 2, 2, 2, 2, 2, 5, 5, 5, 5]
    current = tuple(frozenset(range(first, first + 4)) for first in range(0, 16, 4))
    target = plan_target(loads, current, num_groups=4, num_nodes=2)
    assert target is not None
    for group in range(4):
        members = set(range(group * 4, group * 4 + 4))
        assert len({rank // 2 for rank, experts in enumerate(target) if members & experts}) == 1
    # Two nodes cannot divide three groups.
    loads, current = loads[:12], (frozenset(range(6)), frozenset(range(6, 12)))
    assert plan_target(loads, current, num_groups=3, num_nodes=2) == plan_target(loads, current)


def _pack_with_duplicates(loads: list[float], keys: list[int], num_packs: int) -> list[frozenset[int]]:
    """Packs as DeepSeek's function does, without regard to the keys."""
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    totals = Counter[int]()
    for item in sorted(range(len(loads)), key=lambda item: -loads[item]):
        able = [number for number in range(num_packs) if len(packs[number]) < len(loads) // num_packs]
        best = min(able, key=lambda number: totals[number])
        packs[best].append(keys[item])
        totals[best] += loads[item]
    return [frozenset(each) for each in packs]


def test_two_copies_are_never_on_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """deepseek-ai/EPLB#22. The same loads show the bug in a function that has it."""
    loads, keys = [10, 10, 9, 1, 1, 1], [0, 0, 1, 2, 3, 3]
    assert [len(each) for each in pack(loads, keys, 2)] == [3, 3]
    parallel = ExpertParallelConfig(num_experts=4, num_redundant=2, num_ranks=2, balancing=EPLBConfig())
    check_all: Callable[[], Any] = lambda: [  # noqa: E731
        len(rank)
        for a in range(12)
        for rank in plan_target([a, 9, 1, 2], experts_of(parallel.initial_placement(), 2)) or ()
    ]
    assert set(check_all()) == {3}
    monkeypatch.setattr(expert_placement, "pack", _pack_with_duplicates)
    assert set(check_all()) != {3}
