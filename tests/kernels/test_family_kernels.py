"""Kernels of some families of decoders: GELU and squared ReLU, soft caps, norms that are rounded once, and those of
Gemma 4.
"""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.nn.functional as F

from penstock.kernels import native
from penstock.kernels.gelu import gelu_and_mul, gelu_times
from penstock.kernels.relu import squared_relu
from penstock.kernels.residual import add, scale
from penstock.kernels.rms_norm import add_rms_norm, rms_norm
from penstock.kernels.rope_and_store_kv import rope_and_store_kv
from penstock.kernels.soft_cap import soft_cap

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MODULES = ("gelu", "relu", "residual", "rms_norm", "rope_and_store_kv", "soft_cap")
EPS = 1e-6


@pytest.fixture(autouse=True, params=(*native.instruction_sets(), "torch"))
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    torch.manual_seed(0)
    library = None if request.param == "torch" else native.library_for(request.param)
    for name in MODULES:
        monkeypatch.setattr(importlib.import_module(f"penstock.kernels.{name}"), "library", lambda: library)
    return request.param


def assert_rounded_once(found: torch.Tensor, exact: torch.Tensor, error: float) -> None:
    """`error` is that of float32 arithmetic, for each unit of the result and absolute."""
    unit = torch.finfo(found.dtype).eps / 2 * 1.01
    tiny = torch.finfo(found.dtype).smallest_normal
    assert ((found.double() - exact).abs() <= exact.abs() * (unit + error) + error + tiny).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 8, 100, 1024])
@pytest.mark.parametrize("is_tanh", [False, True])
def test_gated_gelu(dtype: torch.dtype, width: int, is_tanh: bool, isa: str) -> None:
    gate_up = (3 * torch.randn(5, 2 * width)).to(dtype)
    gate, up = gate_up.double().chunk(2, -1)
    exact = F.gelu(gate, approximate="tanh" if is_tanh else "none") * up
    whole = gelu_and_mul(gate_up, is_tanh)
    assert_rounded_once(whole, exact, 1e-5)
    if is_tanh or isa != "torch":
        assert torch.equal(gelu_and_mul(gate_up[3:4].clone(), is_tanh), whole[3:4])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 24, 100])
def test_a_factor_may_be_a_part_of_wider_rows(dtype: torch.dtype, width: int) -> None:
    gate, wide = (3 * torch.randn(5, width)).to(dtype), torch.randn(5, 3 * width + 1).to(dtype)
    factor = wide[:, width : 2 * width]
    expected = gelu_and_mul(torch.cat((gate, factor), 1), is_tanh=True)
    assert torch.equal(gelu_times(gate, factor, is_tanh=True), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 8, 100, 1024])
def test_the_stream_is_added_to_and_scaled_in_place(dtype: torch.dtype, width: int) -> None:
    x, residual = (3 * torch.randn(7, width)).to(dtype), torch.randn(7, width).to(dtype)
    expected = residual + x
    add(x, residual)
    assert torch.equal(residual, expected)
    factor = float(torch.tensor(0.8125, dtype=dtype))
    scale(residual, factor)
    assert torch.equal(residual, expected * factor)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 8, 100, 1024])
def test_squared_relu(dtype: torch.dtype, width: int) -> None:
    x = (3 * torch.randn(5, width)).to(dtype)
    x[2, 0], x[3, 0], x[4, 0] = -torch.inf, -0.0, torch.nan
    expected = x.float().relu().square().to(dtype)
    assert torch.equal(squared_relu(x)[:4], expected[:4])
    assert x[4, 0].isnan()
    assert torch.equal(x[4, 1:], expected[4, 1:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 8, 301, 5000])
@pytest.mark.parametrize("cap", [30.0, 0.7])
def test_soft_cap(dtype: torch.dtype, width: int, cap: float) -> None:
    x = 20 * torch.randn(6, width)
    x[0, 0], x[1, 0], x[2, 0] = 6e4, -6e4, 0.0
    x = x.to(dtype)
    exact = cap * torch.tanh(x.double() / cap)
    whole = soft_cap(x.clone(), cap)
    assert_rounded_once(whole, exact, 1e-6 * cap)
    for row in range(6):
        assert torch.equal(soft_cap(x[row : row + 1].clone(), cap), whole[row : row + 1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 100, 1024])
def test_a_norm_with_a_float_weight_is_rounded_once(dtype: torch.dtype, width: int) -> None:
    """Among so many numbers, a quotient that is rounded before would leave some further off."""
    x, residual, weight = (3 * torch.randn(40, width)).to(dtype), torch.randn(40, width).to(dtype), torch.randn(width)
    wide = x.double()
    exact = wide / (wide.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    assert_rounded_once(rms_norm(x, weight, EPS), exact, 1e-6)
    total = residual + x
    assert torch.equal(add_rms_norm(x, residual, weight, EPS), rms_norm(total, weight, EPS))
    assert torch.equal(residual, total)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_value_norm", [False, True])
def test_norms_of_heads_with_float_weights_are_rounded_once(dtype: torch.dtype, has_value_norm: bool) -> None:
    heads, kv_heads, size, tokens, block = 3, 1, 40, 21, 16
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * size).to(dtype)
    cache = torch.zeros((4, 2, kv_heads, block, size), dtype=dtype)
    q_norm, k_norm, v_norm = torch.randn(3, size)
    before = qkv.clone()
    unrotated, positions = torch.empty((64, 0)), torch.arange(tokens)
    norms = (q_norm, k_norm, EPS, v_norm if has_value_norm else None)
    rope_and_store_kv(qkv, heads, kv_heads, unrotated, positions, cache, positions, *norms)
    parts = before.unflatten(1, (-1, size))
    keys, values = (cache[:, plane, 0].reshape(-1, size)[:tokens] for plane in range(2))
    found = qkv.unflatten(1, (-1, size))[:, :heads]
    for one, raw, norm in (
        (found, parts[:, :heads], q_norm),
        (keys, parts[:, heads], k_norm),
        (values, parts[:, heads + 1], v_norm),
    ):
        if norm is v_norm and not has_value_norm:
            assert torch.equal(one, raw)
            continue
        wide = raw.double()
        exact = wide / (wide.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * norm.double()
        assert_rounded_once(one, exact, 1e-6)
    assert torch.equal(qkv[:, heads * size :], before[:, heads * size :])


@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_alone_store_nothing(dtype: torch.dtype) -> None:
    """They are rotated as queries with keys and values are."""
    heads, size, tokens = 3, 40, 21
    whole = torch.randn(tokens, (heads + 2) * size).to(dtype)
    queries = whole[:, : heads * size].contiguous()
    cache = torch.full((4, 2, 1, 16, size), float("nan"), dtype=dtype)
    angles = torch.randn(64, 16)
    tables, positions, norm = torch.cat((angles.cos(), angles.sin()), 1), torch.arange(tokens), torch.randn(size)
    rope_and_store_kv(queries, heads, 0, tables, positions, cache[:, :, :0], positions, norm, None, EPS)
    assert cache.isnan().all()
    rope_and_store_kv(whole, heads, 1, tables, positions, cache, positions, norm, norm, EPS)
    assert torch.equal(queries, whole[:, : heads * size])
