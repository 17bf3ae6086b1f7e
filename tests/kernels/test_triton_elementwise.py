"""Compares the Triton kernels around the matrix products with the torch references."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from penstock.kernels.rms_norm import add_rms_norm_reference, rms_norm_reference
from penstock.kernels.rope_and_store_kv import rope_and_store_kv_reference
from penstock.kernels.silu_and_mul import silu_and_mul_reference
from penstock.kernels.triton.rms_norm import add_rms_norm, rms_norm
from penstock.kernels.triton.rope_and_store_kv import rope_and_store_kv
from penstock.kernels.triton.silu_and_mul import silu_and_mul
from tests.grids import grid
from tests.kernels.gpu_compiler import compile_for_gpu

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EPS = 1e-6


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    """Puts tensors, and thereby the kernels, on the GPU if there is one."""
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        yield


def close(actual: torch.Tensor, expected: torch.Tensor, roundings: int) -> None:
    """Asserts equality up to `roundings` of the dtype."""
    assert actual.dtype == expected.dtype
    unit = torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual.double(), expected.double(), rtol=roundings * unit, atol=roundings * unit)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 100, 1024, 3000])
def test_rms_norm(dtype: torch.dtype, width: int) -> None:
    x, weight = (3 * torch.randn(5, width)).to(dtype), torch.randn(width).to(dtype)
    out = rms_norm(x, weight, EPS)
    close(out, rms_norm_reference(x, weight, EPS), roundings=2)
    assert torch.equal(rms_norm(x[3:4].clone(), weight, EPS), out[3:4])
    assert rms_norm(x[:0], weight, EPS).shape == (0, width)


def test_float_weights_are_applied_before_the_quotient_is_rounded() -> None:
    x, weight = torch.randn(5, 100).half(), torch.randn(100)
    close(rms_norm(x, weight, EPS), rms_norm_reference(x, weight, EPS), roundings=1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_rounds_the_sum_then_normalises_it(dtype: torch.dtype) -> None:
    x, residual, weight = (torch.randn(shape).to(dtype) for shape in ((5, 520), (5, 520), (520,)))
    expected_residual = residual.clone()
    expected = add_rms_norm_reference(x, expected_residual, weight, EPS)
    out = add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(out, rms_norm(residual, weight, EPS))
    if dtype == torch.bfloat16:
        # The interpreter truncates what a GPU rounds.
        close(residual, expected_residual, roundings=2)
        close(out, expected, roundings=4)
    else:
        assert torch.equal(residual, expected_residual)
        close(out, expected, roundings=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 100, 3072])
def test_silu_and_mul(dtype: torch.dtype, width: int) -> None:
    gate_up = (4 * torch.randn(3, 2 * width)).to(dtype)
    out = silu_and_mul(gate_up)
    close(out, silu_and_mul_reference(gate_up), roundings=4 if dtype == torch.float32 else 1)
    assert torch.equal(silu_and_mul(gate_up[1:2].clone()), out[1:2])


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_silu_of_extreme_gates() -> None:
    gates = torch.tensor([[-1e4, -200.0, 0.0, 90.0, 1e4]])
    out = silu_and_mul(torch.cat((gates, torch.ones_like(gates)), dim=-1))
    assert torch.equal(out, torch.tensor([[0.0, 0.0, 0.0, 90.0, 1e4]]))


@pytest.mark.parametrize(
    ("dtype", "norms", "sizes"),
    grid(DTYPES, ("", "q", "qk"), ((64, 64), (64, 0), (80, 80), (128, 32), (128, 128), (96, 40), (256, 256))),
)
def test_rope_and_store_kv(dtype: torch.dtype, norms: str, sizes: tuple[int, int]) -> None:
    head_dim, rotary_dim = sizes
    tokens, num_heads, num_kv_heads, block_size = 5, 14, 2, 24
    qkv = torch.randn(tokens, (num_heads + 2 * num_kv_heads) * head_dim).to(dtype)
    half = rotary_dim // 2
    angles = torch.arange(50)[:, None] / 10000 ** (torch.arange(half) / max(1, half))
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    positions, slots = torch.randint(0, 50, (tokens,)), torch.randperm(4 * block_size)[:tokens]
    slots[2] = -1
    norm_dtype = torch.float32 if norms == "qk" else dtype
    q_norm = torch.randn(head_dim).to(norm_dtype) if "q" in norms else None
    k_norm = torch.randn(head_dim).to(norm_dtype) if "k" in norms else None
    caches = [torch.full((4, 2, num_kv_heads, block_size, head_dim), 7.0, dtype=dtype) for _ in range(2)]
    actual, expected = qkv.clone(), qkv.clone()
    for run, out, cache in zip(
        (rope_and_store_kv, rope_and_store_kv_reference), (actual, expected), caches, strict=True
    ):
        run(out, num_heads, num_kv_heads, cos_sin, positions, cache, slots, q_norm, k_norm, EPS)
    close(actual, expected, roundings=4)
    close(caches[0], caches[1], roundings=4)
    # Values that are only moved are unchanged.
    assert torch.equal(actual.view(tokens, -1, head_dim)[:, num_heads:], qkv.view(tokens, -1, head_dim)[:, num_heads:])
    assert torch.equal(caches[0][:, 1], caches[1][:, 1])
    alone, cache = qkv[4:].clone(), torch.zeros_like(caches[0])
    rope_and_store_kv(
        alone, num_heads, num_kv_heads, cos_sin, positions[4:].clone(), cache, slots[4:].clone(), q_norm, k_norm, EPS
    )
    assert torch.equal(alone, actual[4:])
    block, offset = int(slots[4]) // block_size, int(slots[4]) % block_size
    assert torch.equal(cache[block, :, :, offset], caches[0][block, :, :, offset])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_and_store_latents(dtype: torch.dtype) -> None:
    """One plane, whose keys are rotated in their first dimensions."""
    qk, angles = torch.randn(5, (3 + 1) * 72).to(dtype), torch.randn(50, 16)
    positions, slots = torch.randint(0, 50, (5,)), torch.randperm(64)[:5]
    slots[2] = -1
    caches = [torch.full((4, 1, 1, 16, 72), 7.0, dtype=dtype) for _ in range(2)]
    actual, expected = qk.clone(), qk.clone()
    for run, out, cache in zip(
        (rope_and_store_kv, rope_and_store_kv_reference), (actual, expected), caches, strict=True
    ):
        run(out, 3, 1, angles, positions, cache, slots)
    close(actual, expected, roundings=4)
    close(caches[0], caches[1], roundings=4)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kernel", "constexprs", "num_warps"),
    [
        ("rms_norm", {"hidden": 12288, "block": 16384, "adds": True}, 16),
        ("silu_and_mul", {"width": 3072, "block": 1024}, 4),
        ("rope_and_store_kv", {"head_dim": 128, "half": 64, "half_tile": 64, "rest_tile": 0}, 4),
        ("rope_and_store_kv", {"head_dim": 256, "half": 32, "half_tile": 32, "rest_tile": 256}, 4),
    ],
)
def test_nothing_spills(kernel: str, constexprs: dict[str, int], num_warps: int) -> None:
    signatures = {
        "rms_norm": dict.fromkeys(("x_ptr", "residual_ptr", "weight_ptr", "out_ptr"), "*bf16:16") | {"eps": "fp32"},
        "silu_and_mul": dict.fromkeys(("gate_up_ptr", "out_ptr"), "*bf16:16"),
        "rope_and_store_kv": {
            **dict.fromkeys(("qkv_ptr", "cache_ptr", "q_norm_ptr", "k_norm_ptr"), "*bf16:16"),
            "cos_sin_ptr": "*fp32:16",
            "positions_ptr": "*i64",
            "slots_ptr": "*i64",
            "eps": "fp32",
        },
    }
    if kernel == "rope_and_store_kv":
        heads = {
            "num_heads": 32,
            "num_kv_heads": 8,
            "planes": 2,
            "block_size": 16,
            "heads_tile": 2048 // constexprs["head_dim"],
        }
        constexprs = constexprs | heads | {"has_q_norm": True, "has_k_norm": True}
    module = f"penstock.kernels.triton.{kernel}"
    cost = compile_for_gpu(module, f"_{kernel}", signatures[kernel], constexprs, num_warps=num_warps)
    assert cost.spilled_bytes == 0
    assert cost.registers <= 168
    assert cost.shared_bytes <= 48 * 1024
    assert "ld.global.v4" in cost.ptx, "16 bytes at a time"
