"""The gated delta rule: equal to transformers' formula, and the same bits for every division into steps."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from penstock.config.recurrent import DeltaSizes
from penstock.kernels import native
from penstock.kernels.gated_delta import GatedDelta
from penstock.kernels.recurrent import StateRequests, StateRows

Pair = tuple[torch.Tensor, torch.Tensor]
BLOCK_SIZE = 8
EPS = 1e-5
SIZES = [DeltaSizes(2, 4, 16, 16, 4), DeltaSizes(2, 2, 32, 48, 3), DeltaSizes(1, 3, 128, 128, 4)]


@dataclass
class Weights:
    conv: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor

    @classmethod
    def random(cls, sizes: DeltaSizes, generator: torch.Generator) -> Weights:
        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        heads = sizes.value_heads
        return cls(normal(sizes.channels, sizes.taps), normal(heads), normal(heads), 1 + 0.1 * normal(sizes.value_size))

    def layer(self, sizes: DeltaSizes, isa: str | None) -> GatedDelta:
        library = None if isa is None else native.library_for(isa)
        return GatedDelta(sizes, self.conv, self.a_log, self.dt_bias, self.norm, EPS, lambda: library)


def random_inputs(sizes: DeltaSizes, count: int, dtype: torch.dtype, generator: torch.Generator) -> Pair:
    gates = sizes.value_heads * (sizes.value_size + 2)
    qkv, rates = (torch.randn(count, width, generator=generator).to(dtype) for width in (sizes.channels, gates))
    return qkv, rates


class Engine:
    """Runs one sequence in steps; every whole block's state is kept."""

    def __init__(self, layer: GatedDelta, num_tokens: int, most_drafts: int, dtype: torch.dtype) -> None:
        sizes = layer.sizes
        self.layer = layer
        num_blocks = -(-num_tokens // BLOCK_SIZE)
        self.states = torch.full((num_blocks + 1, sizes.key_heads, sizes.head_size), torch.nan)
        self.table = torch.arange(1, num_blocks + 1, dtype=torch.int32)[None]
        self.drafts = None
        if most_drafts:
            shape = (3, most_drafts, sizes.key_heads * sizes.draft_inputs)
            self.drafts = torch.full(shape, torch.nan, dtype=dtype)
        self.num_in_states = 0

    def step(self, qkv: torch.Tensor, gates: torch.Tensor, start: int, num_drafts: int = 0) -> torch.Tensor:
        count = len(qkv)
        rows = StateRows(BLOCK_SIZE)
        if self.drafts is not None:
            pending, drafts = ([start - self.num_in_states], [num_drafts])
            rows = StateRows(
                BLOCK_SIZE,
                torch.tensor([2]),
                torch.tensor(pending, dtype=torch.int32),
                torch.tensor(drafts, dtype=torch.int32),
            )
        starts, lengths = (torch.tensor(each, dtype=torch.int32) for each in ([0, count], [start + count]))
        requests = StateRequests(self.table, starts, lengths, rows, self.drafts)
        self.num_in_states = start + count - num_drafts
        return self.layer(qkv, gates, self.states, requests)


def run(layer: GatedDelta, inputs: Pair, chunks: Sequence[int]) -> Pair:
    """Returns the outputs, and the states after whole blocks."""
    qkv, gates = inputs
    engine, start, found = Engine(layer, len(qkv), 0, qkv.dtype), 0, list[torch.Tensor]()
    for chunk in chunks:
        found.append(engine.step(qkv[start : start + chunk], gates[start : start + chunk], start))
        start += chunk
    assert start == len(qkv)
    return torch.cat(found), engine.states[: len(qkv) // BLOCK_SIZE].clone()


def isas(sizes: DeltaSizes) -> list[str | None]:
    """Returns the instruction sets, and None for the reference, which is slow: for the smallest sizes alone."""
    return [*([None] if sizes is SIZES[0] else []), *native.instruction_sets()]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_equals_transformers(sizes: DeltaSizes) -> None:
    generator = torch.Generator().manual_seed(1)
    weights, count = Weights.random(sizes, generator), 21
    qkv, gates = random_inputs(sizes, count, torch.float32, generator)
    mixed = qwen.causal_conv1d_fn(qkv.T[None], weights.conv, None, activation="silu")[0].T
    widths = [sizes.key_heads * sizes.key_size] * 2 + [sizes.value_heads * sizes.value_size]
    query, key, value = (
        part.view(1, count, heads, -1)
        for part, heads in zip(
            mixed.split(widths, 1), (sizes.key_heads, sizes.key_heads, sizes.value_heads), strict=True
        )
    )
    z, b, dt = gates.split([widths[2], sizes.value_heads, sizes.value_heads], 1)
    query, key = (each.repeat_interleave(sizes.group, 2) for each in (query, key))
    g = -weights.a_log.exp() * torch.nn.functional.softplus(dt + weights.dt_bias)
    read, _ = qwen.torch_recurrent_gated_delta_rule(
        query, key, value, g[None], b.sigmoid()[None], None, False, use_qk_l2norm_in_kernel=True
    )
    norm = qwen.Qwen3NextRMSNormGated(sizes.value_size, EPS)
    norm.weight.data = weights.norm
    expected = norm(read.reshape(-1, sizes.value_size), z.reshape(-1, sizes.value_size)).view(count, -1)
    for isa in isas(sizes):
        found, _ = run(weights.layer(sizes, isa), (qkv, gates), [count])
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_division_into_steps_has_the_same_bits(sizes: DeltaSizes, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    weights, count = Weights.random(sizes, generator), 45
    inputs = random_inputs(sizes, count, dtype, generator)
    for isa in isas(sizes):
        layer = weights.layer(sizes, isa)
        expected, states = run(layer, inputs, [count])
        for chunks in ([1] * count, [8, 16, 21], [3, 13, 29], [44, 1]):
            found, others = run(layer, inputs, chunks)
            assert torch.equal(found, expected), (isa, chunks)
            assert torch.equal(others, states), (isa, chunks)


def test_instruction_sets_with_one_arithmetic_have_the_same_bits() -> None:
    generator = torch.Generator().manual_seed(3)
    for sizes in SIZES:
        weights = Weights.random(sizes, generator)
        inputs = random_inputs(sizes, 13, torch.bfloat16, generator)
        found: dict[str, tuple[str, torch.Tensor, torch.Tensor]] = {}
        for isa in native.instruction_sets():
            one = found.setdefault(native.ARITHMETIC[isa], (isa, *run(weights.layer(sizes, isa), inputs, [13])))
            other = run(weights.layer(sizes, isa), inputs, [13])
            assert torch.equal(other[0], one[1]), f"{isa} and {one[0]}"
            assert torch.equal(other[1], one[2]), f"{isa} and {one[0]}"


def test_results_do_not_depend_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(4)
    sizes = SIZES[2]
    layer = Weights.random(sizes, generator).layer(sizes, native.instruction_sets()[0])
    inputs = random_inputs(sizes, 64, torch.bfloat16, generator)
    expected = run(layer, inputs, [64])
    for count in (1, 2, 5):
        monkeypatch.setattr("penstock.kernels.gated_delta.num_threads", lambda count=count: count)
        found = run(layer, inputs, [64])
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True)), count


@pytest.mark.parametrize("sizes", SIZES[:2], ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_rejected_drafts_leave_nothing(sizes: DeltaSizes, seed: int) -> None:
    """Each step verifies drafts, of which any number is accepted; wrong drafts have other inputs."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    weights, count, most = Weights.random(sizes, generator), 40, 3
    qkv, gates = random_inputs(sizes, count, torch.bfloat16, generator)
    for isa in isas(sizes):
        layer = weights.layer(sizes, isa)
        expected, states = run(layer, (qkv, gates), [count])
        engine = Engine(layer, count + most, most, qkv.dtype)
        start = rng.choice([1, 5, 16])
        found = [engine.step(qkv[:start], gates[:start], 0)]
        while start < count:
            num_drafts = rng.randint(0, min(most, count - start - 1))
            accepted = rng.randint(0, num_drafts)
            tokens = slice(start, start + 1 + num_drafts)
            rows = qkv[tokens].clone(), gates[tokens].clone()
            for each, wrong in zip(rows, random_inputs(sizes, 8, qkv.dtype, generator), strict=True):
                each[1 + accepted :] = wrong[: num_drafts - accepted]
            found.append(engine.step(*rows, start, num_drafts)[: 1 + accepted])
            start += 1 + accepted
        # The last accepted drafts are in no state yet.
        complete = engine.num_in_states // BLOCK_SIZE
        assert torch.equal(torch.cat(found), expected), isa
        assert torch.equal(engine.states[:complete], states[:complete]), isa


def test_requests_of_a_batch_are_independent_and_padding_is_ignored() -> None:
    generator = torch.Generator().manual_seed(5)
    sizes = SIZES[0]
    weights = Weights.random(sizes, generator)
    lengths = [9, 1, 17]
    given = [random_inputs(sizes, length, torch.bfloat16, generator) for length in lengths]
    starts = torch.tensor([0, 9, 10, 27, 27], dtype=torch.int32)
    table = torch.tensor([[1, 2, 0], [3, 0, 0], [0, 4, 5], [0, 0, 0]], dtype=torch.int32)
    for isa in isas(sizes):
        layer = weights.layer(sizes, isa)
        states = torch.full((5, sizes.key_heads, sizes.head_size), torch.nan)
        requests = StateRequests(table, starts, torch.tensor([*lengths, 0], dtype=torch.int32), StateRows(BLOCK_SIZE))
        qkv, gates = (torch.cat([each[i] for each in given]) for i in range(2))
        found = layer(qkv, gates, states, requests).split(lengths)
        alone = [run(layer, each, [len(each[0])]) for each in given]
        assert all(torch.equal(one, other[0]) for one, other in zip(found, alone, strict=True)), isa
        assert torch.equal(states[0], alone[0][1][0]), isa
        # The third request's table has no block for its first state.
        assert torch.equal(states[3], alone[2][1][1]), isa
