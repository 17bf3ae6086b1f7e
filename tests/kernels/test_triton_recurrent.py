"""The Triton kernels of recurrent layers: near their references, and the same bits for every division into steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from penstock.config.recurrent import ConvSizes, DeltaSizes, MambaSizes
from penstock.kernels.recurrent import StateRequests, StateRows
from penstock.kernels.triton.gated_delta import gated_delta
from penstock.kernels.triton.mamba2 import mamba2
from penstock.kernels.triton.short_conv import short_conv
from tests.kernels import test_gated_delta, test_mamba2, test_short_conv
from tests.kernels.gpu_compiler import compile_for_gpu
from tests.kernels.launch_recorder import variants_of
from tests.kernels.recurrent_cases import BLOCK_SIZE, Kernel, check_batch, check_divisions, check_drafts

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a CPU stands in for the GPU")

KERNELS = {
    "gated-delta": (test_gated_delta.random_kernel(DeltaSizes(2, 4, 16, 8, 4)), gated_delta),
    "mamba2": (test_mamba2.random_kernel(MambaSizes(3, 2, 8, 16, 4, offset=1)), mamba2),
    "short-conv": (test_short_conv.random_kernel(ConvSizes(2, 64, 4)), short_conv),
}
# Parts of tiles, and more than one tile of values.
ODD = {
    "gated-delta": (test_gated_delta.random_kernel(DeltaSizes(1, 1, 20, 12, 3)), gated_delta),
    "mamba2": (test_mamba2.random_kernel(MambaSizes(1, 1, 12, 20, 2)), mamba2),
    "short-conv": (test_short_conv.random_kernel(ConvSizes(3, 20, 3)), short_conv),
}


def in_triton(kernel: Kernel, run: Any) -> Kernel:
    reference = kernel.layers(None)
    return replace(kernel, layers=lambda isa: lambda *given: run(reference, *given), is_only_reference=True)


@pytest.mark.parametrize(("kernels", "dtype"), [(KERNELS, torch.bfloat16), (ODD, torch.float32)], ids=["even", "odd"])
@pytest.mark.parametrize("name", KERNELS)
def test_equals_the_reference(name: str, kernels: dict[str, tuple[Kernel, Any]], dtype: torch.dtype) -> None:
    kernel, run = kernels[name]
    inputs, triton = kernel.inputs(13, dtype, torch.Generator().manual_seed(6)), in_triton(kernel, run)
    expected = kernel.run(kernel.layers(None), inputs, [13])
    # The interpreter truncates to bfloat16 what a GPU rounds.
    tolerance = 1e-5 if dtype == torch.float32 else 0.1
    for one, other in zip(triton.run(triton.layers(None), inputs, [13]), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", KERNELS)
def test_every_division_into_steps_has_the_same_bits(name: str) -> None:
    check_divisions(in_triton(*ODD[name]), torch.bfloat16, ([1] * 17, [2, 15], [7, 1, 9]))


@pytest.mark.spread(1)
@pytest.mark.parametrize("name", KERNELS)
def test_rejected_drafts_leave_nothing(name: str) -> None:
    check_drafts(in_triton(*ODD[name]), 3)


@pytest.mark.spread(1)
@pytest.mark.parametrize("name", KERNELS)
def test_requests_of_a_batch_are_independent_and_padding_is_ignored(name: str) -> None:
    check_batch(in_triton(*ODD[name]))


@pytest.mark.long
@pytest.mark.parametrize("name", KERNELS)
def test_heads_have_the_same_bits_with_any_drafts_and_steps(name: str) -> None:
    check_divisions(in_triton(*KERNELS[name]), torch.float32, ([1] * 18, [9, 9]))
    check_drafts(in_triton(*KERNELS[name]), 5)


@pytest.mark.long
def test_one_variant_serves_every_step() -> None:
    first, *later = variants_of("tests.kernels.test_triton_recurrent", "steps")
    assert set(first) == {"_convolve", "_gated_delta", "_gate", "_mamba2", "_keep_drafts"}
    assert later == [[]] * len(later)


def steps() -> Iterator[None]:
    """Yields after each of several steps of different sizes at different places in their buffers."""
    buffers = [torch.zeros(100, dtype=dtype) for dtype in (torch.int64, *[torch.int32] * 4)]
    tables = torch.zeros((100, 33), dtype=torch.int32)
    for num_tokens, num_reqs, offset in ((16, 2, 0), (1, 1, 1), (17, 9, 2), (32, 16, 0), (13, 13, 3)):
        of_rows, pending, drafts, lengths = (each[offset : offset + num_reqs] for each in buffers[:4])
        starts = buffers[4][offset : offset + num_reqs + 1]
        for kernel, run in ODD.values():
            requests = StateRequests(
                tables[offset : offset + num_reqs],
                starts,
                lengths,
                StateRows(BLOCK_SIZE, of_rows, pending, drafts),
                torch.zeros((20, 3, kernel.draft_width), dtype=torch.bfloat16),
            )
            inputs = kernel.inputs(num_tokens, torch.bfloat16, torch.Generator())
            run(kernel.layers(None), *inputs, torch.zeros((9, *kernel.state)), requests)
        yield


_REQUESTS = {
    "table_ptr": "*i32", "starts_ptr": "*i32", "lengths_ptr": "*i32", "rows_ptr": "*i64", "pending_ptr": "*i32",
    "drafts_ptr": "*i32", "kept_ptr": "*bf16:16", "out_ptr": "*bf16:16", "states_ptr": "*fp32:16",
    "table_stride": "i32",
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("most_drafts", [0, 3])
def test_nothing_spills(most_drafts: int) -> None:
    """With the sizes of Qwen3.5-0.8B."""
    step = {"block_size": 16, "most_drafts": most_drafts, "kept_width": 6176, "channels": 6144, "head_size": 17536}
    floats, halves = "*fp32:16", "*bf16:16"
    convolution = {"inputs_ptr": halves, "channels_ptr": "*i32:16", "weight_ptr": floats, "bias_ptr": floats}
    sizes = {"input_stride": 6144, "heads": 16, "unit": 384, "taps": 4, "has_bias": False, "is_gated": False}
    rule = {"mixed_ptr": halves, "gates_ptr": halves, "decay_ptr": floats, "bias_ptr": floats}
    heads = {"gate_stride": 2080, "key_heads": 16, "group": 1, "keys": 128, "values": 128}
    tiles = {"scale": 0.1, "eps": 1e-6, "keys_tile": 128, "values_tile": 8}
    jobs = (
        ("recurrent", "_convolve", convolution, {**sizes, "tile": 128, "tokens": 8}, 4),
        ("gated_delta", "_gated_delta", rule, {**heads, **tiles}, 1),
    )
    for module, kernel, own, constexprs, num_warps in jobs:
        signature = {**own, **_REQUESTS}
        name = f"penstock.kernels.triton.{module}"
        cost = compile_for_gpu(name, kernel, signature, {**step, **constexprs}, num_warps=num_warps)
        assert cost.spilled_bytes == 0, kernel
        assert cost.registers <= 168, (kernel, cost.registers)
