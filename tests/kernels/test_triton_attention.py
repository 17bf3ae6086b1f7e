"""Compares attention in Triton with the torch reference, on a GPU if there is one, else in Triton's interpreter."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import pytest
import torch

from penstock.attention.triton import TritonAttention
from penstock.kernels.paged_attention import paged_attention_reference
from penstock.kernels.rope_and_store_kv import rope_and_store_kv_reference
from penstock.kernels.triton.attention.launcher import decode_attention_fused
from penstock.kernels.triton.attention.plan import (
    AttentionLimits,
    AttentionPlan,
    AttentionPlanner,
    AttentionShape,
    DecodeTile,
    PrefillTile,
)
from penstock.kernels.triton.capabilities import Capabilities
from penstock.utils.errors import ConfigError
from tests.grids import graded_grid, grid
from tests.kernels.triton_attention_cases import DEVICE, Batch, Part, Sequence
from tests.unit import attention_cases

TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3}
HEAD_DIMS = (64, 80, 96, 128, 256)
BLOCK_SIZES = (16, 32, 64, 128)
HEADS = ((2, 2), (3, 1), (8, 2), (16, 1))
# (query tokens, tokens before them): a decode row, a chunk, a prompt, nothing, a verification, a context of splits.
MIXED = ((1, 100), (37, 13), (33, 0), (0, 0), (5, 64), (1, 150), (1, 0))
FEW = ((1, 100), (3, 0), (0, 0), (5, 64), (2, 200), (1, 0))


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def batch(
    lengths: tuple[tuple[int, int], ...],
    dtype: torch.dtype = torch.float16,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 64,
    block_size: int = 16,
    window: int = 0,
    padding: tuple[int, int] = (0, 0),
    latent_value_dim: int = 0,
) -> Batch:
    parts = [
        Part(Sequence.random(before + count, heads, head_dim, dtype, latent_value_dim), before, before + count)
        for count, before in lengths
    ]
    return Batch.of(parts, block_size, window, padding)


def check(case: Batch, plan: AttentionPlan) -> torch.Tensor:
    out = case.run(plan)
    expected = case.expected()
    tolerance = TOLERANCE[case.q.dtype]
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    return out


def split_of(case: Batch, plan: AttentionPlan, split: int) -> AttentionPlan:
    """Returns the plan with splits so small that there may be several."""
    assert isinstance(plan.tile, DecodeTile)
    splits = -(-int(case.seq_lens.max()) // split)
    return replace(plan, tile=replace(plan.tile, split=split, max_splits=splits))


class TestPrefill:
    @pytest.mark.parametrize(("head_dim", "window"), grid(HEAD_DIMS, (0, 37), strength=1))
    def test_head_sizes(self, head_dim: int, window: int) -> None:
        case = batch(MIXED[:4], head_dim=head_dim, window=window, heads=(2, 1))
        check(case, case.plan(case.planner()))

    @pytest.mark.parametrize(("block_size", "window"), grid(BLOCK_SIZES, (0, 64), strength=1))
    def test_block_sizes(self, block_size: int, window: int) -> None:
        case = batch(((3, 150), (70, 75)), block_size=block_size, window=window, heads=(2, 1))
        plan = case.plan(case.planner(capabilities=Capabilities(tma=True)))
        assert isinstance(plan.tile, PrefillTile)
        assert plan.tile.use_tma == (block_size >= 64)
        check(case, plan)

    @pytest.mark.parametrize("heads", HEADS)
    def test_grouped_heads(self, heads: tuple[int, int]) -> None:
        case = batch(MIXED[1:5], heads=heads, window=50)
        check(case, case.plan(case.planner()))

    @pytest.mark.parametrize(("deterministic", "window"), grid((False, True), (0, 37), strength=1))
    def test_float32(self, deterministic: bool, window: int) -> None:
        case = batch(((1, 100), (20, 127), (33, 0)), torch.float32, window=window)
        check(case, case.plan(case.planner(deterministic=deterministic)))

    def test_padding_rows_are_zero(self) -> None:
        case = batch(((20, 3), (9, 0)), padding=(2, 150))
        out = check(case, case.plan(case.planner()))
        assert torch.equal(out[29:], torch.zeros_like(out[29:]))

    def test_a_step_without_requests(self) -> None:
        case = batch(((20, 3),))
        empty = replace(
            case, block_table=case.block_table[:0], query_start_loc=case.query_start_loc[:1], seq_lens=case.seq_lens[:0]
        )
        assert torch.equal(empty.run(case.plan(case.planner())), torch.zeros_like(case.q).flatten(1))


class TestDecode:
    @pytest.mark.parametrize(("head_dim", "window"), grid(HEAD_DIMS, (0, 37), strength=1))
    def test_head_sizes(self, head_dim: int, window: int) -> None:
        case = batch(FEW[:5], head_dim=head_dim, window=window, heads=(2, 1))
        check(case, split_of(case, case.plan(case.planner()), 64))

    @pytest.mark.parametrize(("block_size", "window", "use_tma"), graded_grid(BLOCK_SIZES, (0, 100), (False, True)))
    def test_block_sizes(self, block_size: int, window: int, use_tma: bool) -> None:
        case = batch(((3, 150), (8, 250)), block_size=block_size, window=window, heads=(2, 1))
        plan = split_of(case, case.plan(case.planner()), 128)
        assert isinstance(plan.tile, DecodeTile)
        check(case, replace(plan, tile=replace(plan.tile, use_tma=use_tma, keys=16 if use_tma else 64)))

    @pytest.mark.parametrize("heads", HEADS)
    def test_grouped_heads(self, heads: tuple[int, int]) -> None:
        case = batch(((8, 70), (1, 30)), heads=heads, window=50)
        check(case, case.plan(case.planner()))

    @pytest.mark.parametrize("deterministic", [False, True])
    def test_float32(self, deterministic: bool) -> None:
        case = batch(FEW, torch.float32)
        check(case, split_of(case, case.plan(case.planner(deterministic=deterministic)), 64))

    @pytest.mark.parametrize("window", [pytest.param(0, marks=pytest.mark.long), 100])
    def test_the_merging_program_changes_no_bit(self, window: int) -> None:
        case = batch(FEW, window=window, padding=(1, 0))
        outs = []
        for merges in (True, False):
            planner = case.planner(merges=merges)
            plan = split_of(case, case.plan(planner), 64)
            outs += [check(case, plan), case.run(plan)]
            assert not plan.workspace.counters.any()
        assert all(torch.equal(out, outs[0]) for out in outs)

    def test_padding_rows_are_zero(self) -> None:
        case = batch(((2, 100), (1, 3)), padding=(3, 11))
        out = check(case, case.plan(case.planner()))
        assert torch.equal(out[3:], torch.zeros_like(out[3:]))

    def test_more_splits_than_needed(self) -> None:
        case = batch(((2, 100), (1, 3)))
        plan = split_of(case, case.plan(case.planner()), 64)
        assert isinstance(plan.tile, DecodeTile)
        assert torch.equal(case.run(replace(plan, tile=replace(plan.tile, max_splits=7))), case.run(plan))


@pytest.mark.parametrize(("window", "softcap", "deterministic"), graded_grid((0, 37, 128), (0.0, 1.5), (False, True)))
class TestSoftCapsAndSinks:
    def test_prefill(self, window: int, softcap: float, deterministic: bool) -> None:
        case = batch(((1, 100), (20, 127), (33, 0)), torch.float32, window=window).with_sinks(softcap)
        check(case, case.plan(case.planner(deterministic=deterministic)))

    def test_decode(self, window: int, softcap: float, deterministic: bool) -> None:
        case = batch(FEW, torch.float32, window=window).with_sinks(softcap)
        outs = []
        for merges in (True, False):
            plan = case.plan(case.planner(deterministic=deterministic, merges=merges))
            outs.append(check(case, split_of(case, plan, 64)))
        assert torch.equal(*outs)


class TestLatents:
    """One KV head, whose last dimensions are the values. Up to 16 heads are in a tile: 20 heads are two tiles."""

    @pytest.mark.parametrize(
        ("heads", "count"), grid((1, 5, 16, 20, 17), (1, 3, 30), strength=1, others=pytest.mark.long)
    )
    def test_heads(self, heads: int, count: int) -> None:
        case = batch(((count, 70), (1, 0)), heads=(heads, 1), head_dim=40, latent_value_dim=32)
        check(case, case.plan(case.planner()))

    @pytest.mark.parametrize(
        ("sizes", "dtype", "deterministic"),
        graded_grid(((576, 512), (96, 80), (48, 16)), list(TOLERANCE), (False, True)),
    )
    def test_sizes(self, sizes: tuple[int, int], dtype: torch.dtype, deterministic: bool) -> None:
        head_dim, value_dim = sizes
        options = {"heads": (4, 1), "head_dim": head_dim, "latent_value_dim": value_dim}
        prefill = batch(((11, 60), (0, 0), (1, 40)), dtype, padding=(1, 3), **options)
        check(prefill, prefill.plan(prefill.planner(deterministic=deterministic)))
        decode = batch(((1, 150), (0, 0), (3, 40)), dtype, block_size=64, padding=(1, 3), **options)
        for merges in (True, False):
            planner = decode.planner(deterministic=deterministic, merges=merges, capabilities=Capabilities(tma=True))
            check(decode, split_of(decode, decode.plan(planner), 64))

    def test_soft_caps_and_sinks(self) -> None:
        case = batch(FEW, torch.float32, (5, 1), 40, latent_value_dim=32).with_sinks(1.5)
        check(case, split_of(case, case.plan(case.planner()), 64))

    @pytest.mark.parametrize(("head_dim", "value_dim"), [(600, 520), (64, 40), (800, 512)])
    def test_unsupported_sizes_are_refused(self, head_dim: int, value_dim: int) -> None:
        shape = AttentionShape(4, 1, head_dim, 16, torch.bfloat16, value_dim)
        with pytest.raises(ConfigError, match=f"kv_lora_rank is {value_dim} and qk_rope_head_dim is"):
            AttentionPlanner(shape, AttentionLimits(1, 16), "cpu")

    def test_the_workspace_holds_the_largest_step(self) -> None:
        planner = AttentionPlanner(AttentionShape(40, 1, 40, 16, torch.float32, 32), AttentionLimits(3, 3000, 2), "cpu")
        plan = planner.plan(3, 2, 3000)
        assert isinstance(plan.tile, DecodeTile)
        assert plan.workspace.parts.numel() == 3 * 2 * 40 * plan.tile.max_splits * 32
        assert plan.workspace.counters.numel() == 3 * plan.tile.row_tiles * 4


@pytest.mark.spread(4)
@pytest.mark.parametrize("seed", range(10))
def test_random_batches(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    longest = rng.choice((1, 4, 8, 30))
    lengths = tuple((rng.randint(0, longest), rng.choice((0, 15, 16, 63, 64, 130, 200))) for _ in range(3))
    lengths = (*((count, before if count else 0) for count, before in lengths), (1, 127))
    case = batch(
        lengths,
        heads=rng.choice(HEADS),
        head_dim=rng.choice(HEAD_DIMS),
        block_size=rng.choice(BLOCK_SIZES),
        window=rng.choice((0, 0, 1, 33, 128)),
        padding=(rng.randint(0, 2), rng.randint(0, 9)),
    )
    check(case, case.plan(case.planner(deterministic=rng.random() < 0.5)))


class TestFused:
    """Compares the fused kernel with the reference of rotation and store followed by that of attention."""

    def run(
        self,
        lengths: tuple[tuple[int, int], ...],
        dtype: torch.dtype = torch.float16,
        heads: tuple[int, int] = (4, 2),
        head_dim: int = 64,
        rotary_dim: int = 64,
        block_size: int = 16,
        window: int = 0,
        split: int = 64,
        norm: bool = True,
        padding: tuple[int, int] = (0, 0),
        softcap: float | None = None,
        **options: bool,
    ) -> None:
        """`softcap` comes with sinks."""
        case = batch(lengths, dtype, heads, head_dim, block_size, window, padding)
        case = case if softcap is None else case.with_sinks(softcap)
        angles = torch.arange(600)[:, None] / 10000 ** (torch.arange(rotary_dim // 2) / (rotary_dim // 2))
        cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1).to(DEVICE)
        qkv = torch.randn(case.q.shape[0], (heads[0] + 2 * heads[1]) * head_dim).to(DEVICE, dtype)
        norms = tuple((1 + torch.randn(head_dim) / 4).to(DEVICE, dtype) for _ in range(2)) if norm else None
        positions, slots = self.places(case, lengths, block_size)
        plan = split_of(case, case.plan(case.planner()), split)
        plan = replace(plan, tile=replace(plan.tile, **options))

        wanted = replace(case, kv_cache=case.kv_cache.clone())
        rotated = qkv.clone()
        rope_and_store_kv_reference(
            rotated, *heads, cos_sin, positions, wanted.kv_cache, slots, *(norms or (None, None))
        )
        wanted = replace(wanted, q=rotated.view(qkv.shape[0], -1, head_dim)[:, : heads[0]])
        expected = paged_attention_reference(*wanted.operands, case.softmax)
        out = decode_attention_fused(
            qkv, heads[0], cos_sin, norms, 1e-6, case.kv_cache, *case.operands[2:], case.scale, window, plan,
            softcap=case.softcap, sinks=case.sinks,
        )  # fmt: skip
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(out, expected, rtol=2 * tolerance, atol=2 * tolerance)
        torch.testing.assert_close(case.kv_cache, wanted.kv_cache, rtol=tolerance, atol=tolerance, equal_nan=True)
        assert not plan.workspace.counters.any()

    def places(self, case: Batch, lengths: tuple[tuple[int, int], ...], block_size: int) -> tuple[torch.Tensor, ...]:
        """Returns positions and slots of all rows; overwrites the new tokens in the cache with NaN."""
        positions = torch.zeros(case.q.shape[0], dtype=torch.int64)
        slots = torch.full_like(positions, -1)
        row = 0
        for request, (count, before) in enumerate(lengths):
            new = torch.arange(before, before + count)
            blocks = case.block_table[request].cpu()[new // block_size].long()
            positions[row : row + count], slots[row : row + count] = new, blocks * block_size + new % block_size
            case.kv_cache[blocks.to(DEVICE), :, :, (new % block_size).to(DEVICE)] = float("nan")
            row += count
        return positions.to(DEVICE), slots.to(DEVICE)

    @pytest.mark.parametrize(
        ("sizes", "norm"), grid(((80, 80), (128, 32), (128, 128), (256, 256)), (False, True), strength=1)
    )
    def test_head_sizes(self, sizes: tuple[int, int], norm: bool) -> None:
        head_dim, rotary_dim = sizes
        self.run(((1, 60), (4, 126)), heads=(2, 1), head_dim=head_dim, rotary_dim=rotary_dim, norm=norm)

    @pytest.mark.parametrize("heads", HEADS)
    def test_grouped_heads(self, heads: tuple[int, int]) -> None:
        self.run(((3, 61), (8, 0)), heads=heads)

    @pytest.mark.parametrize(("block_size", "window"), grid(BLOCK_SIZES, (0, 40), strength=1))
    def test_new_tokens_across_the_edges_of_blocks_and_splits(self, block_size: int, window: int) -> None:
        self.run(((5, 125), (4, 14), (1, 127), (1, 128), (1, 0)), block_size=block_size, window=window, keys=16)

    def test_one_token_each(self) -> None:
        self.run(((1, 130), (1, 63), (1, 0)), torch.float32)

    def test_padding(self) -> None:
        self.run(((2, 70), (0, 0), (1, 5)), padding=(2, 4), merges=False)

    @pytest.mark.parametrize("merges", [False, True])
    def test_soft_caps_and_sinks(self, merges: bool) -> None:
        self.run(((3, 61), (4, 126), (1, 0)), window=70, softcap=1.5, merges=merges)

    @pytest.mark.parametrize("before", [62, 64])
    def test_boxes_never_contain_keys_stored_in_the_same_launch(self, before: int) -> None:
        self.run(((3, before), (1, 200)), block_size=64, keys=32, use_tma=True)

    def test_is_refused_in_a_deterministic_engine(self) -> None:
        case = batch(((1, 10),))
        plan = case.plan(case.planner(deterministic=True))
        with pytest.raises(AssertionError, match="deterministic True"):
            decode_attention_fused(
                case.q, 4, case.q, None, 1e-6, case.kv_cache, *case.operands[2:], case.scale, 0, plan
            )


class TestDeterministic:
    """A row has one result under every plan. The interpreter covers tiles, splits and their order, but no layouts."""

    SHAPES = ((64, 0, 0), (80, 50, 0), (72, 0, 64))

    @pytest.fixture
    def sequence(self, request: pytest.FixtureRequest) -> tuple[Sequence, int]:
        head_dim, window, latent_value_dim = request.param
        heads = (2, 1) if latent_value_dim else (4, 2)
        return Sequence.random(290, heads, head_dim, torch.float16, latent_value_dim), window

    def run(
        self, parts: list[Part], window: int, block_size: int = 16, seed: int = 0, has_sinks: bool = False
    ) -> torch.Tensor:
        case = Batch.of(parts, block_size, window, seed=seed)
        case = case.with_sinks(1.5) if has_sinks else case
        return case.run(case.plan(case.planner(deterministic=True)))

    @pytest.mark.parametrize(
        ("sequence", "has_sinks"),
        grid(SHAPES, (False, True), strength=1, others=pytest.mark.long),
        indirect=["sequence"],
    )
    def test_in_prefill_chunks_decode_verification_or_a_batch(
        self, sequence: tuple[Sequence, int], has_sinks: bool
    ) -> None:
        own, window = sequence
        run = partial(self.run, window=window, has_sinks=has_sinks)
        whole = run([Part(own, 250, 290)])
        for first, last in ((250, 251), (254, 258), (255, 263), (289, 290), (257, 290)):
            assert torch.equal(run([Part(own, first, last)]), whole[first - 250 : last - 250])
        heads = (own.q.shape[1], own.k.shape[1])
        other = Sequence.random(140, heads, own.q.shape[2], torch.float16, own.latent_value_dim)
        batched = run([Part(other, 136, 140), Part(own, 255, 260), Part(other, 3, 4)])
        assert torch.equal(batched[4:9], whole[5:10])

    @pytest.mark.spread(1)
    @pytest.mark.parametrize("sequence", SHAPES, indirect=True)
    def test_block_ids_do_not_matter(self, sequence: tuple[Sequence, int]) -> None:
        own, window = sequence
        outs = [self.run([Part(own, 280, 290)], window, size, seed) for size, seed in ((16, 0), (16, 1), (64, 0))]
        assert all(torch.equal(out, outs[0]) for out in outs)


class TestPlanner:
    SHAPE = AttentionShape(16, 8, 128, 16, torch.bfloat16)

    def test_decode_plans_depend_on_batch_and_context(self) -> None:
        planner = AttentionPlanner(self.SHAPE, AttentionLimits(64, 16384, 4), "cpu")
        tiles = [planner.plan(*sizes).tile for sizes in ((1, 1, 256), (8, 4, 2000), (64, 1, 256), (9, 1, 16384))]
        assert [(tile.split, tile.max_splits, tile.warps) for tile in tiles] == [
            (64, 4, 4),
            (128, 16, 2),
            (512, 1, 1),
            (512, 32, 1),
        ]
        assert isinstance(planner.plan(1, 5, 256).tile, PrefillTile)

    def test_prefills_of_any_lengths_share_a_plan(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A backend keeps its plans: one for each length of a prompt would take more memory with every step."""
        planned: list[tuple[int, int, int]] = []
        plan = AttentionPlanner.plan

        def count(planner: AttentionPlanner, *sizes: int) -> AttentionPlan:
            planned.append((sizes[0], sizes[1], sizes[2]))
            return plan(planner, *sizes)

        monkeypatch.setattr(AttentionPlanner, "plan", count)
        backend = TritonAttention(AttentionLimits(8, attention_cases.MAX_MODEL_LEN, 4), torch.device(DEVICE))
        for lengths in ([5], [6], [31], [5, 2], [9, 7]):
            attention_cases.Case.random(lengths, lengths, (2, 1), 16, device=DEVICE).run(backend)
        assert planned == [(1, 5, 1024), (2, 5, 1024)]

    def test_a_deterministic_engine_has_one_tile(self) -> None:
        planner = AttentionPlanner(self.SHAPE, AttentionLimits(64, 16384, 4), "cpu", deterministic=True)
        tiles = [planner.plan(*sizes).tile for sizes in ((1, 1, 256), (64, 4, 16384), (3, 500, 600))]
        assert {(tile.rows, tile.keys, tile.split, tile.warps) for tile in tiles} == {(16, 16, 256, 1)}

    @pytest.mark.parametrize("deterministic", [False, True])
    def test_the_workspace_holds_the_largest_step(self, deterministic: bool) -> None:
        limits = AttentionLimits(20, 3000, 3)
        planner = AttentionPlanner(self.SHAPE, limits, "cpu", deterministic)
        for num_reqs in (1, 8, 9, 20):
            for max_seq_len in (1, 1024, 1025, 3000):
                plan = planner.plan(num_reqs, 3, max_seq_len)
                assert isinstance(plan.tile, DecodeTile)
                parts = num_reqs * 3 * 16 * plan.tile.max_splits
                assert parts * 128 <= plan.workspace.parts.numel()
                assert parts * 2 <= plan.workspace.stats.numel()
                assert num_reqs * plan.tile.row_tiles * 8 <= plan.workspace.counters.numel()
        assert planner.workspace_bytes == sum(
            tensor.nbytes for tensor in (plan.workspace.parts, plan.workspace.stats, plan.workspace.counters)
        )

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"block_size": 24}, "block_size is 24"),
            ({"block_size": 8}, "block_size is 8"),
            ({"head_dim": 72}, "head_dim is 72"),
            ({"head_dim": 512}, "head_dim is 512"),
            ({"num_heads": 136}, "num_attention_heads is 136 for 8"),
        ],
    )
    def test_errors_name_the_unsupported_shape(self, change: dict[str, int], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            AttentionPlanner(replace(self.SHAPE, **change), AttentionLimits(1, 16), "cpu")

    def test_too_many_drafts(self) -> None:
        with pytest.raises(ConfigError, match="num_speculative_tokens is 8"):
            AttentionPlanner(self.SHAPE, AttentionLimits(1, 16, 9), "cpu")


def test_wrong_shapes_raise_assertion_errors() -> None:
    case = batch(((3, 10),))
    plan = case.plan(case.planner())
    with pytest.raises(AssertionError, match="starts for 1 requests"):
        replace(case, query_start_loc=case.query_start_loc[:1]).run(plan)
    with pytest.raises(AssertionError, match="int64"):
        replace(case, seq_lens=case.seq_lens.long()).run(plan)
    with pytest.raises(AssertionError, match="float32"):
        replace(case, q=case.q.float()).run(plan)
