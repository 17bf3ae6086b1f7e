"""The gated short convolution: equal to transformers' layer, and the same bits for every division into steps."""

from __future__ import annotations

import pytest
import torch
from transformers import Lfm2Config
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

from penstock.config.recurrent import ConvSizes
from penstock.kernels import native
from penstock.kernels.short_conv import ShortConv
from tests.kernels.recurrent_cases import (
    Kernel,
    check_batch,
    check_divisions,
    check_drafts,
    check_instruction_sets,
    check_threads,
    isas,
)

# The last one's heads are no multiple of 16 channels, so that the reference computes it everywhere.
SIZES = [ConvSizes(3, 32, 3), ConvSizes(2, 64, 4), ConvSizes(5, 16, 2), ConvSizes(3, 20, 3)]


def random_kernel(sizes: ConvSizes) -> Kernel:
    conv = torch.randn(sizes.channels, sizes.taps, generator=torch.Generator().manual_seed(1))

    def layer(isa: str | None) -> ShortConv:
        library = None if isa is None else native.library_for(isa)
        return ShortConv(sizes, conv, lambda: library)

    return Kernel(layer, (3 * sizes.channels,), (sizes.heads, sizes.head_size), sizes.channels)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_equals_transformers(sizes: ConvSizes) -> None:
    generator = torch.Generator().manual_seed(6)
    config = Lfm2Config(hidden_size=sizes.channels, conv_L_cache=sizes.taps, num_hidden_layers=1, layer_types=["conv"])
    module, kernel = Lfm2ShortConv(config, 0), random_kernel(sizes)
    x = torch.randn(21, sizes.channels, generator=generator)
    with torch.inference_mode():
        expected = module(x[None])[0]
        inputs = (module.in_proj(x),)
    for isa in isas():
        library = None if isa is None else native.library_for(isa)
        layer = ShortConv(sizes, module.conv.weight.detach()[:, 0], lambda library=library: library)
        found, _ = kernel.run(layer, inputs, [21])
        torch.testing.assert_close(module.out_proj(found).detach(), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_division_into_steps_has_the_same_bits(sizes: ConvSizes, dtype: torch.dtype) -> None:
    check_divisions(random_kernel(sizes), dtype)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_instruction_sets_with_one_arithmetic_have_the_same_bits(sizes: ConvSizes) -> None:
    check_instruction_sets(random_kernel(sizes))


def test_results_do_not_depend_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    check_threads(random_kernel(ConvSizes(32, 64, 3)), monkeypatch, "short_conv")


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_rejected_drafts_leave_nothing(sizes: ConvSizes, seed: int) -> None:
    check_drafts(random_kernel(sizes), seed)


def test_requests_of_a_batch_are_independent_and_padding_is_ignored() -> None:
    check_batch(random_kernel(SIZES[0]))
