"""One KV cache for all ranks: the plan does not depend on how the model is divided, and every rank has its part."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from msgspec import structs

from penstock.config.kv_cache_groups import cache_of_one_rank
from penstock.engine.cache_plan import bytes_per_block, plan_cache
from penstock.messages.kv_cache_spec import KVCacheConfig, KVCacheSpec
from penstock.messages.kv_transfer import ShardId
from penstock.messages.memory_budget import MemoryBudget
from penstock.runner.kv_cache import KVCache, allocate_kv_cache, layout_of
from penstock.utils.errors import ConfigError
from penstock.worker.messages import WorkerFacts
from tests.unit.rank_fakes import (
    DRAFT,
    HEAD_SIZE,
    NUM_HEADS,
    PLENTY,
    WINDOWS,
    heads_of,
    layer_name,
    make_engine_config,
    make_facts,
    make_rank,
)

GRIDS = [(pp, tp, None) for pp, tp in itertools.product(range(1, 5), range(1, 5))]
UNEVEN = [(2, 3, (6, 1)), (3, 2, (1, 1, 5)), (2, 5, (3, 4)), (4, 7, (2, 1, 3, 1))]
MIB = 1 << 20


def part_of(cache: KVCacheConfig, facts: WorkerFacts) -> KVCacheConfig:
    return cache.part({**facts.kv_cache_specs, **facts.draft_kv_cache_specs})


def allocate(cache: KVCacheConfig) -> KVCache:
    return allocate_kv_cache(cache, lambda num_bytes: torch.zeros(num_bytes, dtype=torch.uint8))


@pytest.mark.parametrize(("pp", "tp", "counts"), GRIDS + UNEVEN)
def test_the_plan_equals_that_of_one_rank(pp: int, tp: int, counts: tuple[int, ...] | None) -> None:
    config = make_engine_config(num_gpu_blocks_override=40)
    limits, cache = plan_cache(config, make_facts(pp, tp, counts))
    limits_of_one, cache_of_one = plan_cache(config, make_facts(1, 1))
    assert limits == limits_of_one
    assert cache == cache_of_one
    assert [group.spec.heads for group in cache.groups] == [(0, NUM_HEADS)] * 2
    assert cache.attached[0].spec.heads == (0, NUM_HEADS // 2)
    assert (cache.attached[0].group, cache.num_tokens_ahead) == (0, 1)


@pytest.mark.parametrize(("pp", "tp", "counts"), GRIDS + UNEVEN)
def test_every_rank_has_its_layers_and_heads(pp: int, tp: int, counts: tuple[int, ...] | None) -> None:
    """Together the layouts hold every head of every layer, each layer in the group that the plan gives it."""
    facts = make_facts(pp, tp, counts)
    _, cache = plan_cache(make_engine_config(num_gpu_blocks_override=40), facts)
    held: Counter[tuple[str, int]] = Counter()
    for each in facts:
        part = part_of(cache, each)
        assert [group.spec.sliding_window for group in part.groups] == [32, 0]
        layout = layout_of(allocate(part))
        for layer in layout.layers:
            window = DRAFT.get(layer.name)
            if window is None:
                window = WINDOWS[int(layer.name.split(".")[2])]
            assert layer.group == (0 if window else 1), layer
            total = NUM_HEADS // (2 if layer.name in DRAFT else 1)
            assert layer.heads == heads_of(total, each.shard[1], tp)
            assert layer.shape == (40, 2, layer.heads[1] - layer.heads[0], 16, HEAD_SIZE)
            held.update((layer.name, head) for head in range(*layer.heads))
    target = {(layer_name(number), head) for number in range(len(WINDOWS)) for head in range(NUM_HEADS)}
    assert held.keys() == target | {(name, head) for name in DRAFT for head in range(NUM_HEADS // 2)}
    if tp in (1, 2):
        assert set(held.values()) == {1}


@pytest.mark.parametrize(("pp", "tp", "counts"), [*GRIDS, *UNEVEN])
def test_a_part_takes_exactly_the_planned_bytes(pp: int, tp: int, counts: tuple[int, ...] | None) -> None:
    facts = make_facts(pp, tp, counts)
    _, cache = plan_cache(make_engine_config(num_gpu_blocks_override=40), facts)
    per_rank = bytes_per_block(cache, facts)
    for each in facts:
        tensors = allocate(part_of(cache, each)).tensors.values()
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        assert sum(storages.values()) == 40 * per_rank[each.shard]


def per_rank_of(facts: list[WorkerFacts]) -> dict[ShardId, int]:
    _, cache = plan_cache(make_engine_config(num_gpu_blocks_override=40), facts)
    return bytes_per_block(cache, facts)


def test_the_rank_with_the_least_room_decides() -> None:
    per_rank = per_rank_of(make_facts(2, 2))
    budgets = {shard: MemoryBudget(total=MIB * (200 + 10 * shard[1]), in_use=MIB * 100) for shard in per_rank}
    _, cache = plan_cache(make_engine_config(), make_facts(2, 2, memory=budgets))
    left = int(MIB * 200 * 0.9) - MIB * 100
    assert cache.num_blocks == left // max(per_rank[0, 0], per_rank[1, 0])
    budgets[0, 1] = MemoryBudget(total=MIB * 200, in_use=MIB * 170)
    _, cache = plan_cache(make_engine_config(), make_facts(2, 2, memory=budgets))
    assert cache.num_blocks == (int(MIB * 200 * 0.9) - MIB * 170) // per_rank[0, 1]
    budgets[1, 1] = MemoryBudget(total=MIB * 200, in_use=MIB * 190)
    with pytest.raises(ConfigError, match="gpu_memory_utilization"):
        plan_cache(make_engine_config(), make_facts(2, 2, memory=budgets))


ATTENTION = KVCacheSpec.keys_and_values(4, HEAD_SIZE, "bfloat16")
STATE = KVCacheSpec.states(4, 2 * 16 * HEAD_SIZE, 0, 4)  # as many bytes as two blocks of an attention


def hybrid_facts(stages: Sequence[str], memory: MemoryBudget = PLENTY) -> list[WorkerFacts]:
    """Returns the facts of stages with these layers: A has attention, and R is recurrent."""
    return [
        structs.replace(
            make_rank((stage, 0)),
            kv_cache_specs={f"{stage}.{n}": STATE if kind == "R" else ATTENTION for n, kind in enumerate(kinds)},
            memory=memory,
        )
        for stage, kinds in enumerate(stages)
    ]


@pytest.mark.parametrize(
    "stages", [("AR",), ("ARRR", "A"), ("A", "AR"), ("RRRR", "AA"), ("RRRRRR", "A", "A", "A")], ids="-".join
)
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_no_rank_has_more_blocks_and_states_than_fit(stages: tuple[str, ...], share: float) -> None:
    """Though a stage may have most of the recurrent layers, or no other ones."""
    budget = MemoryBudget(total=MIB * 200, in_use=MIB * 100)
    facts = hybrid_facts(stages, budget)
    _, cache = plan_cache(make_engine_config(state_cache_share=share), facts)
    taken = [part_of(cache, each).num_bytes for each in facts]
    assert 0.99 * budget.left(0.9) < max(taken) <= budget.left(0.9)
    of_states = sum(cache.num_states * part_of(cache, each).bytes_per_state for each in facts)
    assert of_states / sum(taken) == pytest.approx(share, abs=0.01)


def test_a_request_needs_no_more_states_than_it_has_tokens_for() -> None:
    """However large a step is; and an error names what has too many of them kept."""
    common: dict[str, int | str] = {"max_num_batched_tokens": 8192, "state_checkpoint_interval": 16}
    _, cache = plan_cache(make_engine_config(kv_cache_memory=40 * 4096, **common), hybrid_facts(["AR"]))
    assert cache.num_states == 20
    with pytest.raises(ConfigError, match=r"for 5 states .* needs up to \d\d: raise .* or state_checkpoint_interval"):
        plan_cache(make_engine_config(kv_cache_memory=10 * 4096, **common), hybrid_facts(["AR"]))


def test_ranks_in_one_memory_share_it(caplog: pytest.LogCaptureFixture) -> None:
    """On a host without devices, the parts of all ranks must fit into one budget."""
    per_rank = per_rank_of(make_facts(2, 2))
    one = MemoryBudget(total=MIB * 200, in_use=MIB * 100, most=MIB * 50, pool="host")
    budgets = {shard: structs.replace(one, in_use=MIB * (100 + shard[0])) for shard in per_rank}
    _, cache = plan_cache(make_engine_config(), make_facts(2, 2, memory=budgets))
    assert cache.num_blocks == MIB * 50 // sum(per_rank.values())
    _, cache = plan_cache(make_engine_config(kv_cache_memory=MIB), make_facts(2, 2, memory=budgets))
    assert cache.num_blocks == MIB // sum(per_rank.values())
    assert "leave too little memory" not in caplog.text
    with caplog.at_level(logging.WARNING):
        plan_cache(make_engine_config(kv_cache_memory=MIB * 100), make_facts(2, 2, memory=budgets))
    assert "leave too little memory" in caplog.text


def test_memory_of_blocks_that_groups_leave_unused_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    """There are four layers with a window and a drafter's half of one, and three layers without."""
    with caplog.at_level(logging.INFO, "penstock"):
        plan_cache(make_engine_config(num_gpu_blocks_override=40), make_facts(2, 2))
    assert "parts of a KV block's memory: 100% with a window of 32, 67% with no window" in caplog.text


def test_blocks_of_groups_of_several_sizes_do_not_overlap() -> None:
    """A block belongs to one group: what is written there changes no block of another group, whatever its size."""
    specs = {
        "full": KVCacheSpec.keys_and_values(1, 32, "bfloat16"),
        "window": KVCacheSpec.keys_and_values(1, 32, "bfloat16", 32),
        "wide": KVCacheSpec.keys_and_values(2, 64, "bfloat16", 48),
        "drafts": KVCacheSpec.keys_and_values(1, 16, "bfloat16"),
    }
    layers = {f"{kind}.{number}": specs[kind] for kind in ("full", "window", "wide") for number in range(3)}
    groups = cache_of_one_rank(layers, {"drafts": specs["drafts"]}, 1, 16)
    memory = allocate(replace(groups, num_blocks=10))
    owned = {block: block % 3 for block in range(1, 10)}
    for block, group in owned.items():
        memory.fill(group, [block], block)
    for block, group in owned.items():
        for name in memory.config.groups[group].layer_names:
            assert (memory.tensors[name].view(torch.uint8)[block] == block).all()
    assert len(layout_of(memory).regions) == 3 + 3 + 1


def test_a_part_that_was_not_planned_is_an_assertion_error() -> None:
    facts = make_facts(1, 2)
    _, cache = plan_cache(make_engine_config(num_gpu_blocks_override=40), facts)
    own = dict(facts[0].kv_cache_specs)
    with pytest.raises(AssertionError, match="planned is None"):
        cache.part({**own, "model.layers.7.self_attn": own[layer_name(0)]})
    with pytest.raises(AssertionError, match="planned is"):
        cache.part({layer_name(0): KVCacheSpec.keys_and_values(2, HEAD_SIZE, "bfloat16", 32, 0, 5)})


def test_heads_that_no_rank_has_are_an_assertion_error() -> None:
    facts = make_facts(1, 3)
    for missing in range(3):
        with pytest.raises(AssertionError, match="no rank has the KV heads"):
            plan_cache(make_engine_config(), [each for each in facts if each.shard[1] != missing])


def test_the_cache_before_the_plan_has_the_drafters_window() -> None:
    """The last stage may have no layer of the target with the drafter's window, although the model has some."""
    last = make_facts(2, 1, (5, 2))[1]
    cache = cache_of_one_rank(last.kv_cache_specs, last.draft_kv_cache_specs, 1, 16)
    assert [(group.layer_names, group.spec.sliding_window) for group in cache.groups] == [
        ((layer_name(5), layer_name(6)), 0),
        ((), 32),
    ]
    assert cache.attached[0].group == 1
    assert set(allocate(cache).tensors) == {layer_name(5), layer_name(6), *DRAFT}


def test_a_drafters_window_that_no_layer_of_the_model_has_is_refused() -> None:
    facts = make_facts(2, 1, (5, 2))
    specs = {name: replace(spec, sliding_window=8) for name, spec in facts[1].draft_kv_cache_specs.items()}
    odd = structs.replace(facts[1], draft_kv_cache_specs=specs)
    with pytest.raises(ConfigError, match="sliding window of 8"):
        plan_cache(make_engine_config(num_gpu_blocks_override=40), [facts[0], odd])
