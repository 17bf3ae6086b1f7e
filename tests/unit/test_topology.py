"""Plans of copies between engines, checked on memory in which every cell has a unique value."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.kv_transfer.topology.layouts import check_layout
from penstock.kv_transfer.topology.pieces import digest_edges, digest_unit, unit_runs
from penstock.kv_transfer.topology.planner import LayerSlice, plan_runs, sources
from penstock.messages.kv_cache_spec import NULL_BLOCK
from penstock.messages.kv_layout import KVLayout
from penstock.messages.kv_transfer import ShardId
from penstock.utils.errors import PeerError
from penstock.utils.math import cdiv
from tests.grids import grid
from tests.unit.kv_memory_fakes import (
    ITEM_BYTES,
    PLANES_APART,
    PRODUCTION,
    SIMULATION,
    TOKEN_MAJOR,
    UNTOUCHED,
    FakeEngine,
    FakeLayer,
    address,
    cells,
    make_layout,
    model,
    split_at,
    split_evenly,
    values_of,
)

NUM_TOKENS = 11
BLOCK_SIZES = [(2, 2), (2, 4), (4, 2), (4, 6)]
Tables = Sequence[Sequence[int]]


def make_tables(engine: FakeEngine, rng: random.Random, num_null: int, shuffled: bool = True) -> list[list[int]]:
    """Returns distinct blocks for two groups; the first `num_null` blocks of the second one have left its window."""
    ids = list(range(1, engine.num_blocks))
    if shuffled:
        rng.shuffle(ids)
    count = cdiv(NUM_TOKENS, engine.block_size)
    return [ids[:count], [NULL_BLOCK] * num_null + ids[count : 2 * count - num_null]]


@dataclass
class Transfer:
    """Both engines' memory before a transfer of tokens [first, end), and methods that check its result."""

    local: FakeEngine
    remote: FakeEngine
    layers: tuple[FakeLayer, ...]
    local_tables: Tables
    remote_tables: Tables
    first: int
    end: int

    @classmethod
    def shuffled(
        cls,
        local: FakeEngine,
        remote: FakeEngine,
        layers: tuple[FakeLayer, ...],
        tokens: tuple[int, int],
        seed: int = 0,
    ) -> Transfer:
        rng = random.Random(seed)
        return cls(local, remote, layers, make_tables(local, rng, 1), make_tables(remote, rng, 1), *tokens)

    @property
    def tables(self) -> list[tuple[Sequence[int], Sequence[int]]]:
        return list(zip(self.local_tables, self.remote_tables, strict=True))

    def check(self) -> None:
        """Copies as planned, and checks every byte of the local memory."""
        values = values_of(self.layers, NUM_TOKENS)
        self.remote.fill(values, self.remote_tables, range(NUM_TOKENS))
        for shard, layout in self.local.shards.items():
            wanted = bytearray([UNTOUCHED]) * len(self.local.memory[shard])
            for layer in layout.layers:
                for cell in cells(layer, range(self.first, self.end)):
                    is_sent = self.remote_tables[layer.group][cell[2] // self.remote.block_size] != NULL_BLOCK
                    at = address(layout, layer, cell, self.local_tables[layer.group])
                    if at is not None and is_sent:
                        wanted[at : at + ITEM_BYTES] = values[cell]
            for source, slices in sources(layout, self.remote.shards, shard).items():
                runs = plan_runs(layout, self.remote.shards[source], slices, self.tables, self.first, self.end).tolist()
                check_maximal(runs, layout, self.remote.shards[source])
                self._copy(runs, shard, source)
                self._check_pieces(shard, source, slices)
            assert self.local.memory[shard] == wanted, f"shard {shard}"

    def _copy(self, runs: Sequence[Sequence[int]], shard: ShardId, source: ShardId) -> None:
        into, out_of = self.local.memory[shard], self.remote.memory[source]
        for mine, theirs, num_bytes in runs:
            assert not into[mine : mine + num_bytes].strip(bytes([UNTOUCHED])), "bytes are written twice"
            into[mine : mine + num_bytes] = out_of[theirs : theirs + num_bytes]

    def _check_pieces(self, shard: ShardId, source: ShardId, slices: Sequence[LayerSlice]) -> None:
        """Checks that both sides read the same bytes in the order of the sender's axes."""
        order, unit = self.remote.axes, digest_unit(self.local.block_size, self.remote.block_size)
        values = values_of(self.layers, NUM_TOKENS)
        edges = digest_edges(self.first, self.end, unit)
        sides = [
            (self.local.shards[shard], self.local.memory[shard], self.local_tables),
            (self.remote.shards[source], self.remote.memory[source], self.remote_tables),
        ]
        for group in range(len(self.tables)):
            at_once = [unit_runs(layout, order, slices, tables[group], group, edges) for layout, _, tables in sides]
            for number, (start, end) in enumerate(itertools.pairwise(edges.tolist())):
                wanted = b"".join(values[cell] for cell in self._ordered_cells(slices, source, group, start, end))
                are_there = [tables[group][start // layout.block_size] != NULL_BLOCK for layout, _, tables in sides]
                for (layout, memory, tables), (runs, bounds) in zip(sides, at_once, strict=True):
                    block = tables[group][start // layout.block_size]
                    pieces = runs[bounds[number] : bounds[number + 1]]
                    if block == NULL_BLOCK:
                        assert not len(pieces)
                    elif all(are_there):
                        assert read(memory, pieces) == wanted

    def _ordered_cells(self, slices: Sequence[LayerSlice], source: ShardId, group: int, start: int, end: int):
        axes = [axis for axis in self.remote.axes if axis != "block"]
        layers = {layer.name: layer for layer in self.remote.shards[source].layers}
        for each in slices:
            layer = layers[each.name]
            if layer.group != group:
                continue
            sizes = dict(zip(layer.axes, layer.shape, strict=True))
            ranges = {"head": range(*each.heads), "token": range(start, end)}
            ranges |= {axis: range(sizes[axis]) for axis in ("kv", "dim") if axis in sizes}
            for indices in itertools.product(*(ranges[axis] for axis in axes)):
                at = dict(zip(axes, indices, strict=True))
                yield (layer.name, at["head"], at["token"], at.get("kv", 0), at.get("dim", 0))


def read(memory: bytearray, pieces: np.ndarray) -> bytes:
    return b"".join(memory[start : start + num_bytes] for start, num_bytes in pieces.tolist())


def region_starts(layout: KVLayout) -> list[int]:
    ends = itertools.accumulate(region.num_bytes for region in layout.regions)
    return [0, *ends]


def check_maximal(runs: Sequence[Sequence[int]], local: KVLayout, remote: KVLayout) -> None:
    """Checks that no run could be joined with another, and that none lies in two regions."""
    edges = [region_starts(local), region_starts(remote)]
    starts = {(mine, theirs) for mine, theirs, _ in runs}
    for mine, theirs, num_bytes in runs:
        for at, places in zip((mine, theirs), edges, strict=True):
            assert not [edge for edge in places if at < edge < at + num_bytes], "a run crosses the end of a region"
        end = mine + num_bytes, theirs + num_bytes
        assert end not in starts or end[0] in edges[0] or end[1] in edges[1], "two runs are contiguous"


def test_layers_in_pairs_move_like_rows_in_whole_units() -> None:
    """16 tokens have their bytes at the same places; fewer have not."""
    rows = [make_layout(model(2), size) for size in (16, 32)]
    local, remote = (
        replace(layout, layers=tuple(replace(layer, in_pairs=True) for layer in layout.layers)) for layout in rows
    )
    slices = [LayerSlice(layer.name, layer.heads) for layer in local.layers]
    tables = [([1, 2, 3], [4, 5])] * 2
    wanted = plan_runs(rows[0], rows[1], slices, tables, 16, 48)
    assert np.array_equal(plan_runs(local, remote, slices, tables, 16, 48), wanted)
    for first, end in ((16, 40), (8, 48)):
        with pytest.raises(PeerError, match="8 tokens are not a whole number of 16, which are stored together"):
            plan_runs(local, remote, slices, tables, first, end)
    with pytest.raises(PeerError, match=r"stored in pairs here and by rows in the other engine; .* multiples of 16"):
        plan_runs(local, rows[1], slices, tables, 16, 48)


# ---- Every topology ----


@pytest.mark.parametrize(
    ("remote_pp", "remote_tp", "local_pp", "local_tp", "num_heads"),
    grid(range(1, 5), range(1, 5), range(1, 5), range(1, 5), (1, 2, 4)),
)
def test_every_cell_arrives(remote_pp: int, remote_tp: int, local_pp: int, local_tp: int, num_heads: int) -> None:
    layers = model(num_heads)
    for local_size, remote_size in BLOCK_SIZES:
        remote = FakeEngine(split_evenly(layers, remote_pp), remote_tp, remote_size)
        local = FakeEngine(split_evenly(layers, local_pp), local_tp, local_size)
        Transfer.shuffled(local, remote, layers, (0, NUM_TOKENS), seed=num_heads).check()


@pytest.mark.parametrize("remote_cuts", [(1,), (4,), (1, 2, 4), ()])
@pytest.mark.parametrize("local_cuts", [(2,), (5,), (3, 4), (1, 2, 5)])
def test_stages_may_have_any_layers(remote_cuts: tuple[int, ...], local_cuts: tuple[int, ...]) -> None:
    layers = model(2)
    remote = FakeEngine(split_at(layers, remote_cuts), 2, 4)
    local = FakeEngine(split_at(layers, local_cuts), 1, 2)
    Transfer.shuffled(local, remote, layers, (3, 10)).check()


@pytest.mark.parametrize(("remote_tp", "local_tp"), grid((1, 2, 4), (1, 2, 3, 4)))
def test_one_latent_head_is_on_every_rank(remote_tp: int, local_tp: int) -> None:
    layers = model(num_heads=1, num_planes=1, dim=5)
    remote = FakeEngine(split_evenly(layers, 2), remote_tp, 4)
    local = FakeEngine(split_evenly(layers, 1), local_tp, 6)
    Transfer.shuffled(local, remote, layers, (2, 11)).check()
    for rank in range(local_tp):
        chosen = sources(local.shards[0, rank], remote.shards, (0, rank))
        assert len(chosen) == 2, "one rank of each stage sends all of it"
    readers = [min(sources(local.shards[0, rank], remote.shards, (0, rank))) for rank in range(local_tp)]
    assert len(set(readers)) == min(remote_tp, local_tp), "different ranks read from different replicas"


# ---- Every order of axes, block size, range and table ----


@st.composite
def transfers(draw: st.DrawFn) -> Transfer:
    orders = [PRODUCTION, TOKEN_MAJOR, PLANES_APART]
    dim = draw(st.sampled_from([1, 2]))
    if dim == 1:
        orders.append(SIMULATION)
    layers = model(draw(st.sampled_from([1, 2, 4])), dim=dim)

    def engine() -> FakeEngine:
        stages = split_evenly(layers, draw(st.integers(1, 3)))
        axes = draw(st.sampled_from(orders))
        return FakeEngine(stages, draw(st.integers(1, 4)), draw(st.integers(1, 7)), axes)

    def tables(of: FakeEngine) -> list[list[int]]:
        rng = random.Random(draw(st.integers(0, 1 << 16)))
        return make_tables(of, rng, draw(st.integers(0, 2)), shuffled=draw(st.booleans()))

    local, remote = engine(), engine()
    first = draw(st.integers(0, NUM_TOKENS))
    end = draw(st.integers(first, NUM_TOKENS))
    return Transfer(local, remote, layers, tables(local), tables(remote), first, end)


@given(transfers())
@settings(max_examples=40)
def test_any_range_in_any_layout(transfer: Transfer) -> None:
    transfer.check()


@pytest.mark.exhaustive
@given(transfers())
@settings(max_examples=1000)
def test_any_range_in_any_layout_often(transfer: Transfer) -> None:
    transfer.check()


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 9))
def test_digest_units_lie_in_blocks(first: int, count: int, unit: int) -> None:
    edges = digest_edges(first, first + count, unit).tolist()
    assert (edges[0], edges[-1]) == (first, first + count)
    assert all(edge % unit == 0 for edge in edges[1:-1])
    assert all(0 < end - start <= unit for start, end in itertools.pairwise(edges))
    assert [digest_unit(16, 16), digest_unit(16, 32), digest_unit(4, 6), digest_unit(3, 5)] == [16, 16, 2, 1]


# ---- Number of runs ----


def serving_layout(num_blocks: int, block_size: int = 16, rank: int = 0, tp: int = 1) -> KVLayout:
    """Returns 28 layers of keys and values, 8 heads by 128, each in its own region, with production's order of axes."""
    layers = [FakeLayer(f"layer.{number}", 0, 8, 2 * number, 2, 128) for number in range(28)]
    return make_layout(layers, block_size, PRODUCTION, num_blocks, rank, tp)


def count_runs(local: KVLayout, remote: KVLayout, local_ids: Sequence[int], remote_ids: Sequence[int], end: int) -> int:
    slices = [LayerSlice(layer.name, layer.heads) for layer in local.layers]
    runs = plan_runs(local, remote, slices, [(local_ids, remote_ids)], 0, end)
    assert (runs.dtype, runs.shape[1]) == (np.int64, 3)
    assert runs[:, 2].sum() == end * sum(2 * (each.heads[1] - each.heads[0]) * 128 * 2 for each in slices)
    return len(runs)


@pytest.mark.parametrize("num_tokens", [8192, 131072])
def test_whole_blocks_are_one_run_each(num_tokens: int) -> None:
    count = num_tokens // 16
    layout = serving_layout(2 * count + 1)
    neighbours, apart = range(1, count + 1), range(1, 2 * count, 2)
    assert count_runs(layout, layout, neighbours, neighbours, num_tokens) == 28
    assert count_runs(layout, layout, apart, neighbours, num_tokens) == 28 * count
    assert count_runs(layout, layout, neighbours, apart, num_tokens) == 28 * count
    # Pairs of neighbouring blocks.
    pairs = [block for start in range(1, 2 * count, 4) for block in (start, start + 1)]
    assert count_runs(layout, layout, pairs, neighbours, num_tokens) == 28 * count // 2
    # Blocks in reverse order on both sides form one run; on one side only, every block is a run.
    assert count_runs(layout, layout, neighbours[::-1], neighbours[::-1], num_tokens) == 28
    assert count_runs(layout, layout, neighbours[::-1], neighbours, num_tokens) == 28 * count


def test_half_of_the_heads_need_a_run_per_plane() -> None:
    whole, half = serving_layout(513), serving_layout(513, rank=1, tp=2)
    assert count_runs(half, whole, range(1, 513), range(1, 513), 8192) == 28 * 512 * 2


def test_different_block_sizes_need_a_run_per_head_and_plane() -> None:
    small, large = serving_layout(513), serving_layout(513, block_size=32)
    assert count_runs(small, large, range(1, 513), range(1, 512, 2), 8192) == 28 * 512 * 2 * 8


# ---- Invalid plans and layouts ----


def with_first_layer(layout: KVLayout, **changes: object) -> KVLayout:
    first, *others = layout.layers
    return replace(layout, layers=(replace(first, **changes), *others))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "float16"}, "data type is bfloat16 here and float16"),
        ({"shape": (24, 2, 2, 4, 3)}, "head size is 2 here and 3"),
        ({"shape": (24, 1, 2, 4, 2)}, "number of kv planes is 2 here and 1"),
        ({"group": 1}, "KV group is 0 here and 1"),
        ({"name": "layer.9"}, "layer 'layer.0'"),
        ({"heads": (1, 3)}, r"heads .0, [12]"),
    ],
)
def test_differences_are_named(changes: dict[str, object], message: str) -> None:
    local = make_layout(model(2), 4)
    remote = with_first_layer(local, **changes)
    with pytest.raises(PeerError, match=message):
        sources(local, {(0, 0): remote}, (0, 0))
    slices = [LayerSlice(layer.name, layer.heads) for layer in local.layers]
    with pytest.raises(PeerError, match=message):
        plan_runs(local, remote, slices, [([1], [1])] * 2, 0, 4)


@pytest.mark.parametrize("remote_ids", [[1, 24], [1, -1], [1], [1, 1 << 64], [1, 1 << 40]])
def test_remote_block_tables_are_checked(remote_ids: list[int]) -> None:
    layout = make_layout(model(1)[:1], 4)
    with pytest.raises(PeerError, match="block table"):
        plan_runs(layout, layout, [LayerSlice("layer.0", (0, 1))], [([1, 2], remote_ids)], 0, 8)


def test_pieces_need_an_order_of_all_axes() -> None:
    layout = make_layout(model(1), 4)
    with pytest.raises(PeerError, match="dim"):
        unit_runs(layout, SIMULATION, [LayerSlice("layer.0", (0, 1))], [1], 0, np.array([0, 4]))
    with pytest.raises(PeerError, match=r"layer\.9"):
        unit_runs(layout, PRODUCTION, [LayerSlice("layer.9", (0, 1))], [1], 0, np.array([0, 4]))


def test_a_missing_head_is_named() -> None:
    engine = FakeEngine([model(4)], 4, 4)
    remote = {shard: layout for shard, layout in engine.shards.items() if shard != (0, 2)}
    with pytest.raises(PeerError, match=r"layer 'layer.0': no shard .* KV heads \[2, 3\)"):
        sources(make_layout(model(4), 4), remote, (0, 0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "int7"}, "int7"),
        ({"region": "elsewhere"}, "no region 'elsewhere'"),
        ({"axes": ("block", "kv", "head", "token", "token")}, "axes"),
        ({"axes": ("block", "kv", "head", "token", "depth")}, "axes"),
        ({"axes": ("block", "kv", "head", "dim")}, "axes"),
        ({"shape": (24, 2, 2, 4)}, "impossible"),
        ({"shape": (24, 2, 2, 0, 2)}, "impossible"),
        ({"offset": -2}, "impossible"),
        ({"shape": (24, 2, 2, 3, 2)}, "3 tokens and not 4"),
        ({"heads": (0, 3)}, r"heads \(0, 3\)"),
        ({"heads": (-1, 1)}, r"heads \(-1, 1\)"),
        ({"strides": (64, 32, 8, 4, 2)}, "overlap"),
        ({"strides": (0, 32, 16, 4, 2)}, "overlap"),
        ({"strides": (-64, 32, 16, 4, 2)}, r"strides .* are impossible"),
        ({"strides": (1 << 63, 32, 16, 4, 2)}, r"strides .* are impossible"),
        ({"shape": (25, 2, 2, 4, 2)}, "ends after its region"),
        ({"offset": 2}, "ends after its region"),
    ],
)
def test_declared_layouts_are_checked(changes: dict[str, object], message: str) -> None:
    layout = make_layout(model(2), 4)
    check_layout(layout)
    with pytest.raises(PeerError, match=message):
        check_layout(with_first_layer(layout, **changes))


def test_names_in_a_layout_are_unique() -> None:
    layout = make_layout(model(2), 4)
    with pytest.raises(PeerError, match="same name"):
        check_layout(replace(layout, layers=layout.layers + layout.layers[:1]))
    with pytest.raises(PeerError, match="regions"):
        check_layout(replace(layout, regions=layout.regions + layout.regions[:1]))


def test_no_offset_overflows() -> None:
    layout = make_layout(model(2), 4)
    huge = tuple(replace(region, num_bytes=1 << 60) for region in layout.regions[:2])
    with pytest.raises(PeerError, match="larger than any memory"):
        check_layout(replace(layout, regions=(*huge, *layout.regions[2:])))
