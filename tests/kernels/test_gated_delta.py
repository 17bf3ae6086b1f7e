"""The gated delta rule: equal to transformers' formula, and the same bits for every division into steps."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from penstock.config.recurrent import DeltaSizes
from penstock.kernels import native
from penstock.kernels.gated_delta import GatedDelta
from tests.kernels.recurrent_cases import (
    Kernel,
    check_batch,
    check_divisions,
    check_drafts,
    check_instruction_sets,
    check_threads,
    isas,
)

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

    def kernel(self, sizes: DeltaSizes) -> Kernel:
        def layer(isa: str | None) -> GatedDelta:
            library = None if isa is None else native.library_for(isa)
            return GatedDelta(sizes, self.conv, self.a_log, self.dt_bias, self.norm, EPS, lambda: library)

        widths = (sizes.channels, sizes.value_heads * (sizes.value_size + 2))
        return Kernel(layer, widths, (sizes.key_heads, sizes.head_size), sizes.key_heads * sizes.draft_inputs)


def random_kernel(sizes: DeltaSizes) -> Kernel:
    return Weights.random(sizes, torch.Generator().manual_seed(1)).kernel(sizes)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_equals_transformers(sizes: DeltaSizes) -> None:
    generator = torch.Generator().manual_seed(1)
    weights, count = Weights.random(sizes, generator), 21
    kernel = weights.kernel(sizes)
    qkv, gates = kernel.inputs(count, torch.float32, generator)
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
    for isa in isas():
        found, _ = kernel.run(kernel.layers(isa), (qkv, gates), [count])
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_division_into_steps_has_the_same_bits(sizes: DeltaSizes, dtype: torch.dtype) -> None:
    check_divisions(random_kernel(sizes), dtype)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_instruction_sets_with_one_arithmetic_have_the_same_bits(sizes: DeltaSizes) -> None:
    check_instruction_sets(random_kernel(sizes))


def test_results_do_not_depend_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    check_threads(random_kernel(SIZES[2]), monkeypatch, "gated_delta")


@pytest.mark.parametrize("sizes", SIZES[:2], ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_rejected_drafts_leave_nothing(sizes: DeltaSizes, seed: int) -> None:
    check_drafts(random_kernel(sizes), seed)


def test_requests_of_a_batch_are_independent_and_padding_is_ignored() -> None:
    check_batch(random_kernel(SIZES[0]))
