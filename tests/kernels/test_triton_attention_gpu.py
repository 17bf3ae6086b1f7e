"""Tests of attention in Triton that need a GPU: bfloat16, one result for a row from every kernel, CUDA graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from penstock.kernels.paged_attention import Softmax, paged_attention_reference
from penstock.kernels.triton.attention.launcher import decode_attention_fused, paged_attention
from penstock.kernels.triton.attention.plan import DecodeTile, PrefillTile
from penstock.kernels.triton.capabilities import Capabilities
from tests.kernels.triton_attention_cases import Batch, Part, Sequence

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

HEADS = ((16, 8), (32, 8), (8, 8), (16, 1))
LENGTH = 700  # several splits of a deterministic plan, and a part of one


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def sequence(head_dim: int = 128, heads: tuple[int, int] = (16, 8), length: int = LENGTH) -> Sequence:
    return Sequence.random(length, heads, head_dim, torch.bfloat16)


def run(parts: list[Part], window: int = 0, block_size: int = 16, seed: int = 0, **options: bool) -> torch.Tensor:
    case = Batch.of(parts, block_size, window, seed=seed)
    return case.run(case.plan(case.planner(**{"deterministic": True, **options})))


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("longest", [1, 4, 300])
def test_bfloat16(heads: tuple[int, int], head_dim: int, block_size: int, deterministic: bool, longest: int) -> None:
    own = sequence(head_dim, heads)
    parts = [Part(own, first, min(first + longest, LENGTH)) for first in (0, 15, 127, 511, 650)]
    case = Batch.of(parts, block_size, padding=(2, 9))
    out = case.run(case.plan(case.planner(deterministic=deterministic)))
    wide = tuple(x.float() if x.is_floating_point() else x for x in case.operands)
    torch.testing.assert_close(out.float(), paged_attention_reference(*wide, Softmax(case.scale)), rtol=2e-2, atol=2e-2)
    assert not out[-9:].any()


class TestSameBits:
    @pytest.fixture(
        params=[(64, (16, 8), 0), (128, (16, 8), 0), (128, (32, 8), 300), (80, (6, 2), 0), (256, (8, 1), 0)]
    )
    def case(self, request: pytest.FixtureRequest) -> tuple[Sequence, int]:
        head_dim, heads, window = request.param
        return sequence(head_dim, heads), window

    @pytest.mark.parametrize("chunk", [1, 2, 5, 8, 16, 64, 333])
    def test_whole_in_chunks_or_token_by_token(self, case: tuple[Sequence, int], chunk: int) -> None:
        own, window = case
        whole = run([Part(own, 0, LENGTH)], window)
        for first in range(0, LENGTH, chunk):
            last = min(first + chunk, LENGTH)
            assert torch.equal(run([Part(own, first, last)], window), whole[first:last])

    @pytest.mark.parametrize("batch", [2, 33, 64])
    def test_alone_or_in_a_batch(self, case: tuple[Sequence, int], batch: int) -> None:
        own, window = case
        alone = run([Part(own, 600, 601)], window)
        parts = [Part(own, 10 * i, 10 * i + 1) for i in range(batch - 1)]
        assert torch.equal(run([*parts, Part(own, 600, 601)], window)[-1:], alone)

    def test_bits_do_not_depend_on_block_ids_or_the_merging_program(self, case: tuple[Sequence, int]) -> None:
        own, window = case
        parts = [Part(own, 650, 654)]
        outs = [run(parts, window, size, seed) for size in (16, 32, 64, 128) for seed in (0, 1)]
        outs += [run(parts, window, merges=False) for _ in range(3)]
        assert all(torch.equal(out, outs[0]) for out in outs)

    @pytest.mark.xfail(strict=False, reason="wider tiles use another instruction; where this passes, they may be used")
    def test_tiles_of_a_warpgroup(self, case: tuple[Sequence, int]) -> None:
        own, window = case
        batch = Batch.of([Part(own, 0, LENGTH)], 16, window)
        plan = batch.plan(batch.planner(deterministic=True))
        assert isinstance(plan.tile, PrefillTile)
        wide = replace(plan, tile=replace(plan.tile, rows=64, warps=4))
        assert torch.equal(batch.run(wide), batch.run(plan))


def test_graphs_replay_with_other_lengths() -> None:
    own = sequence()
    cases = [
        Batch.of([Part(own, n - 1, n) for n in lengths]) for lengths in ((700, 40, 350), (90, 600, 1), (129, 128, 513))
    ]
    static = cases[0]
    blocks = max(case.kv_cache.shape[0] for case in cases)
    static.kv_cache = torch.nn.functional.pad(static.kv_cache, (0,) * 9 + (blocks - static.kv_cache.shape[0],))
    plan = static.planner(1).plan(3, 1, LENGTH)
    plan = replace(plan, tile=replace(plan.tile, split=64, max_splits=11))
    out = torch.empty_like(static.q.flatten(1))
    paged_attention(*static.operands, static.scale, 0, plan, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        paged_attention(*static.operands, static.scale, 0, plan, out)
    for case in cases[1:]:
        static.q.copy_(case.q)
        static.kv_cache[: case.kv_cache.shape[0]].copy_(case.kv_cache)
        static.block_table[:, : case.block_table.shape[1]].copy_(case.block_table[:, : static.block_table.shape[1]])
        static.seq_lens.copy_(case.seq_lens)
        expected = case.run(plan)
        for _ in range(20):
            out.fill_(float("nan"))
            graph.replay()
            assert torch.equal(out, expected)
        assert not plan.workspace.counters.any()


@pytest.mark.parametrize("query_len", [1, 4])
@pytest.mark.parametrize("num_reqs", [1, 40])
def test_overlapped_launches_of_the_fused_kernel(query_len: int, num_reqs: int) -> None:
    own = sequence()
    parts = [Part(own, LENGTH - 17 * r - query_len, LENGTH - 17 * r) for r in range(num_reqs)]
    angles = torch.arange(LENGTH)[:, None] / 10000 ** (torch.arange(64) / 64)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1).cuda()
    norms = (torch.randn(128, dtype=torch.bfloat16).cuda(), torch.randn(128, dtype=torch.bfloat16).cuda())
    qkv = torch.randn(num_reqs * query_len, 32 * 128, dtype=torch.bfloat16).cuda()
    outs = []
    for pdl in (False, True):
        case = Batch.of(parts)
        plan = case.plan(case.planner(capabilities=Capabilities(pdl=pdl)))
        assert isinstance(plan.tile, DecodeTile)
        for _ in range(10):
            out = decode_attention_fused(
                qkv, 16, cos_sin, norms, 1e-6, case.kv_cache, *case.operands[2:], case.scale, 0, plan
            )
        outs += [(out, case.kv_cache)]
    assert outs[0][0].isfinite().all()
    assert torch.equal(outs[0][0], outs[1][0])
    assert torch.equal(outs[0][1].nan_to_num(), outs[1][1].nan_to_num())
