"""The part of a model that each rank holds."""

from __future__ import annotations

import itertools

import pytest

from penstock.parallel.topology import Share, head_share, shards, stages


def test_ranks_are_ordered_by_stage() -> None:
    assert shards(2, 3) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]


@pytest.mark.parametrize(("size", "count"), list(itertools.product((1, 7, 16, 101), (1, 2, 3, 5))))
def test_shares_cover_everything_once(size: int, count: int) -> None:
    parts = [share.part(size) for share in Share(0, count).all]
    assert [number for part in parts for number in part] == list(range(size))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "count"),
    [
        (num_kv_heads * group, num_kv_heads, count)
        for num_kv_heads in (1, 2, 3, 8)
        for group in (1, 2, 4)
        for count in range(1, num_kv_heads * group + 1)
    ],
)
def test_every_query_head_has_one_rank_that_has_its_kv_head(num_heads: int, num_kv_heads: int, count: int) -> None:
    found = [head_share(num_heads, num_kv_heads, share) for share in Share(0, count).all]
    assert [head for each in found for head in each.queries] == list(range(num_heads))
    assert {head for each in found for head in each.kv} == set(range(num_kv_heads))
    group = num_heads // num_kv_heads
    for each in found:
        assert sorted({head // group for head in each.queries}) == list(each.kv)
        # The kernels need equally many query heads for every KV head.
        assert len(each.queries) % len(each.kv) == 0
        assert len({sum(head // group == kv for head in each.queries) for kv in each.kv}) == 1


@pytest.mark.parametrize(("num_layers", "num_stages"), [(1, 1), (6, 4), (28, 3), (7, 2), (5, 5), (29, 8)])
def test_stages_have_all_layers_in_order(num_layers: int, num_stages: int) -> None:
    found = stages(num_layers, num_stages)
    assert [layer for stage in found for layer in stage.layers] == list(range(num_layers))
    assert max(len(stage.layers) for stage in found) - min(len(stage.layers) for stage in found) <= 1
    assert [stage.is_first for stage in found] == [True] + [False] * (num_stages - 1)
    assert [stage.is_last for stage in found] == [False] * (num_stages - 1) + [True]


def test_the_ends_of_the_pipeline_have_fewer_layers_if_they_do_not_divide_evenly() -> None:
    assert [len(stage.layers) for stage in stages(6, 4)] == [1, 2, 2, 1]
    assert [len(stage.layers) for stage in stages(7, 2)] == [4, 3]


def test_layers_of_stages_may_be_given() -> None:
    assert [stage.layers for stage in stages(28, 3, (10, 12, 6))] == [range(10), range(10, 22), range(22, 28)]
