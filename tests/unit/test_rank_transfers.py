"""Transfers between engines with the layouts of real caches: every split reads from every other, byte by byte."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache
from zlib import crc32

import numpy as np
import pytest
import torch

from penstock.engine.cache_plan import plan_cache
from penstock.kv_transfer.topology.layouts import check_layout
from penstock.kv_transfer.topology.pieces import digest_edges, unit_runs
from penstock.kv_transfer.topology.planner import plan_runs, sources
from penstock.kv_transfer.topology.tables import TransferTopology, engine_infos
from penstock.messages.kv_cache_spec import NULL_BLOCK
from penstock.messages.kv_layout import KVLayout, LayerLayout
from penstock.messages.kv_transfer import ShardId
from penstock.runner.kv_cache import allocate_kv_cache, layout_of
from penstock.utils.digest import digest
from tests.unit.rank_fakes import DRAFT, HEAD_SIZE, NUM_HEADS, layer_name, make_engine_config, make_facts

Split = tuple[int, int, tuple[int, ...] | None]
GRID: list[Split] = [(pp, tp, None) for pp, tp in itertools.product(range(1, 5), range(1, 5))]
UNEVEN: list[Split] = [(2, 3, (6, 1)), (3, 2, (1, 1, 5)), (1, 7, None)]
NUM_BLOCKS, BLOCK_SIZE = 10, 16
NUM_TOKENS = 45
# The first block of the second group has left its window.
TABLES = {"producer": ((3, 4, 9), (NULL_BLOCK, 2, 1)), "consumer": ((1, 7, 5), (NULL_BLOCK, 8, 6))}


@cache
def layouts_of(split: Split) -> dict[ShardId, KVLayout]:
    pp, tp, counts = split
    facts = make_facts(pp, tp, counts)
    _, planned = plan_cache(make_engine_config(num_gpu_blocks_override=NUM_BLOCKS), facts)
    found: dict[ShardId, KVLayout] = {}
    for each in facts:
        part = planned.part({**each.kv_cache_specs, **each.draft_kv_cache_specs})
        tensors = allocate_kv_cache(part, lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8))
        found[each.shard] = layout_of(tensors)
    return found


@cache
def values_of(name: str) -> np.ndarray:  # [tokens, planes, heads, head_size] int16
    """Returns the expected content of every token in all of the model's heads."""
    rng = np.random.default_rng(crc32(name.encode()))
    num_heads = NUM_HEADS // (2 if name in DRAFT else 1)
    return rng.integers(1, 1 << 15, (3 * BLOCK_SIZE, 2, num_heads, HEAD_SIZE), np.int16)


def memory_of(layout: KVLayout) -> np.ndarray:
    """Returns zeroed memory for all regions of a rank, one after another, as bytes."""
    return np.zeros(sum(region.num_bytes for region in layout.regions), np.uint8)


def layer_of(layout: KVLayout, layer: LayerLayout, memory: np.ndarray) -> np.ndarray:
    """Returns the layer as [block, kv, head, token, dim] int16, by the declared strides alone."""
    start = layer.offset
    for region in layout.regions:
        if region.name == layer.region:
            break
        start += region.num_bytes
    assert layer.axes == ("block", "kv", "head", "token", "dim")
    return np.ndarray(layer.shape, np.int16, memory.data, start, layer.strides)


def own_values(layer: LayerLayout, index: int) -> np.ndarray:
    """Returns [kv, head, token, dim] of block `index` of the request, for the heads of this rank."""
    tokens = values_of(layer.name)[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE, :, slice(*layer.heads)]
    return tokens.transpose(1, 2, 0, 3)


def filled(layout: KVLayout, tables: Sequence[Sequence[int]]) -> np.ndarray:
    memory = memory_of(layout)
    for layer in layout.layers:
        for index, block in enumerate(tables[layer.group]):
            if block != NULL_BLOCK:
                layer_of(layout, layer, memory)[block] = own_values(layer, index)
    return memory


def expected(layout: KVLayout, tables: Sequence[Sequence[int]], first: int, end: int) -> np.ndarray:
    memory = memory_of(layout)
    for layer in layout.layers:
        for index, block in enumerate(tables[layer.group]):
            if block != NULL_BLOCK:
                tokens = range(max(first, index * BLOCK_SIZE), min(end, (index + 1) * BLOCK_SIZE))
                at = [token % BLOCK_SIZE for token in tokens]
                layer_of(layout, layer, memory)[block][:, :, at] = own_values(layer, index)[:, :, at]
    return memory


@pytest.mark.parametrize("split", [*GRID, *UNEVEN])
def test_every_split_is_accepted(split: Split) -> None:
    """The checks of a peer's declaration accept it, for an engine of one rank."""
    for layout in layouts_of(split).values():
        check_layout(layout)
    topology = TransferTopology("own", BLOCK_SIZE, layouts_of((1, 1, None)))
    for info in engine_infos("peer", BLOCK_SIZE, layouts_of(split)):
        topology.register(info)
    names = [name for info in engine_infos("peer", BLOCK_SIZE, layouts_of(split)) for name in names_of(info.layouts[0])]
    assert sorted(names) == sorted([*map(layer_name, range(7)), *DRAFT])


def names_of(layout: KVLayout) -> list[str]:
    return [layer.name for layer in layout.layers]


@pytest.mark.spread(6)
@pytest.mark.parametrize("consumer", [*GRID, *UNEVEN])
def test_every_split_reads_from_every_other(consumer: Split) -> None:
    for producer in [*GRID, *UNEVEN]:
        check_transfer(producer, consumer, 5, NUM_TOKENS)


def check_transfer(producer: Split, consumer: Split, first: int, end: int) -> None:
    theirs, ours = layouts_of(producer), layouts_of(consumer)
    tables = tuple(zip(TABLES["consumer"], TABLES["producer"], strict=True))
    stored = {shard: filled(layout, TABLES["producer"]) for shard, layout in theirs.items()}
    edges = digest_edges(first, end, BLOCK_SIZE)
    for shard, layout in ours.items():
        memory, where = memory_of(layout), f"{producer} -> {consumer}, rank {shard}"
        for peer, slices in sources(layout, theirs, shard).items():
            for local, remote, count in plan_runs(layout, theirs[peer], slices, tables, first, end).tolist():
                assert not memory[local : local + count].any(), f"{where}: bytes are sent twice"
                memory[local : local + count] = stored[peer][remote : remote + count]
            for group in range(2):
                sides = ((layout, memory, "consumer"), (theirs[peer], stored[peer], "producer"))
                digests = [
                    digests_of(held, unit_runs(side, layout.layers[0].axes, slices, TABLES[name][group], group, edges))
                    for side, held, name in sides
                ]
                assert digests[0] == digests[1], where
        assert np.array_equal(memory, expected(layout, TABLES["consumer"], first, end)), where


def digests_of(memory: np.ndarray, units: tuple[np.ndarray, np.ndarray]) -> list[bytes]:
    runs, bounds = units
    return [
        digest(*(memory[start : start + count].data for start, count in runs[begin:end].tolist()))
        for begin, end in itertools.pairwise(bounds.tolist())
    ]
