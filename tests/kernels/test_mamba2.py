"""Mamba2: equal to transformers' formula, and the same bits for every division into steps."""

from __future__ import annotations

import pytest
import torch
from transformers.models.granitemoehybrid import modeling_granitemoehybrid as granite

from penstock.config.recurrent import MambaSizes
from penstock.kernels import native
from penstock.kernels.mamba2 import Mamba2, MambaWeights
from tests.kernels.recurrent_cases import (
    Kernel,
    check_batch,
    check_divisions,
    check_drafts,
    check_instruction_sets,
    check_threads,
    isas,
)

# Heads of two groups that begin within a group, heads of all columns at once and one by one, and none for the kernel.
SIZES = [
    MambaSizes(4, 3, 32, 16, 4, offset=1),
    MambaSizes(2, 2, 80, 48, 3),
    MambaSizes(4, 1, 64, 128, 4),
    MambaSizes(2, 1, 24, 20, 2),
]


def random_weights(sizes: MambaSizes) -> MambaWeights:
    generator = torch.Generator().manual_seed(1)
    shapes = ((sizes.channels, sizes.taps), (sizes.channels,), *[(sizes.heads,)] * 3)
    return MambaWeights(*(torch.randn(shape, generator=generator) for shape in shapes))


def random_kernel(sizes: MambaSizes) -> Kernel:
    weights = random_weights(sizes)

    def layer(isa: str | None) -> Mamba2:
        library = None if isa is None else native.library_for(isa)
        return Mamba2(sizes, weights, lambda: library)

    width = sizes.inner + sizes.channels + sizes.heads
    return Kernel(layer, (width,), (sizes.heads, sizes.head_size), sizes.heads * sizes.draft_inputs)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_equals_transformers(sizes: MambaSizes) -> None:
    weights, kernel, count = random_weights(sizes), random_kernel(sizes), 21
    (given,) = inputs = kernel.inputs(count, torch.float32, torch.Generator().manual_seed(6))
    z, raw, dt = given.split([sizes.inner, sizes.channels, sizes.heads], 1)
    mixed = granite.causal_conv1d_fn(raw.T[None], weights.conv, weights.bias, activation="silu")[0].T
    keys = sizes.groups * sizes.keys
    x, stored, asked = mixed.split([sizes.inner, keys, keys], 1)
    # One group for each head: the heads may begin within a group.
    groups = (torch.arange(sizes.heads) + sizes.offset) // sizes.group
    stored, asked = (each.view(1, count, sizes.groups, sizes.keys)[:, :, groups] for each in (stored, asked))
    scanned = granite.mamba2_chunk_scan(
        x.view(1, count, sizes.heads, sizes.size),
        dt[None],
        -weights.a_log.exp(),
        stored,
        asked,
        chunk_size=8,
        D=weights.skip,
        dt_bias=weights.dt_bias,
        dt_softplus=True,
    )
    expected = scanned.reshape(count, -1) * torch.nn.functional.silu(z)
    for isa in isas():
        found, _ = kernel.run(kernel.layers(isa), inputs, [count])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_division_into_steps_has_the_same_bits(sizes: MambaSizes, dtype: torch.dtype) -> None:
    check_divisions(random_kernel(sizes), dtype)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_instruction_sets_with_one_arithmetic_have_the_same_bits(sizes: MambaSizes) -> None:
    check_instruction_sets(random_kernel(sizes))


def test_results_do_not_depend_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    check_threads(random_kernel(SIZES[2]), monkeypatch, "mamba2")


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_rejected_drafts_leave_nothing(sizes: MambaSizes, seed: int) -> None:
    check_drafts(random_kernel(sizes), seed)


def test_requests_of_a_batch_are_independent_and_padding_is_ignored() -> None:
    check_batch(random_kernel(SIZES[0]))
