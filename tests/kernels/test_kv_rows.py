"""A KV cache of int8: every vector has its own scale, and the same bytes from every kernel and beside any other."""

from __future__ import annotations

import importlib
import itertools
import math

import pytest
import torch

from penstock.kernels import native
from penstock.kernels.kv_rows import (
    dequantize_rows,
    head_size_of,
    is_in_pairs,
    pairs_to_rows,
    quantize_rows,
    rows_to_pairs,
)
from penstock.kernels.rope_and_store_kv import rope_and_store_kv

module = importlib.import_module("penstock.kernels.rope_and_store_kv")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOKENS, HEADS, KV_HEADS, BLOCK = 40, 4, 2, 16


@pytest.fixture(params=(*native.instruction_sets(), "torch"))
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    torch.manual_seed(0)
    library = None if request.param == "torch" else native.library_for(request.param)
    monkeypatch.setattr(module, "library", lambda: library)
    return request.param


def stored(qkv: torch.Tensor, head_dim: int, is_int8: bool, has_norm: bool = True) -> torch.Tensor:
    """Returns the cache, [blocks, 2, KV_HEADS, BLOCK, row], after the store of [tokens, width] vectors."""
    tokens = len(qkv)
    cache = torch.zeros(-(-tokens // BLOCK), 2, KV_HEADS, BLOCK, head_dim, dtype=qkv.dtype)
    cache = quantize_rows(cache) if is_int8 else cache
    norm = torch.linspace(0.5, 2, head_dim).to(qkv.dtype) if has_norm else None
    angles = torch.arange(tokens)[:, None] / 100 ** (torch.arange(head_dim // 2) / head_dim)
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
    positions, slots = torch.arange(tokens), torch.arange(tokens)
    rope_and_store_kv(qkv.clone(), HEADS, KV_HEADS, cos_sin, positions, cache, slots, norm, norm)
    return pairs_to_rows(cache) if is_in_pairs(cache, module.library()) else cache


def test_pairs_are_the_operands_of_products_of_pairs() -> None:
    rows = torch.arange(3 * 2 * 2 * 32 * 64).view(3, 2, 2, 32, 64)
    pairs = rows_to_pairs(rows)
    assert torch.equal(pairs_to_rows(pairs), rows)
    keys, values = pairs[1, 0, 1].view(2, 32, 16, 2), pairs[1, 1, 1].view(2, 8, 64, 2)
    for token, dim in itertools.product((0, 1, 15, 16, 31), (0, 1, 62, 63)):
        assert keys[token // 16, dim // 2, token % 16, dim % 2] == rows[1, 0, 1, token, dim]
        assert values[token // 16, token % 16 // 2, dim, token % 2] == rows[1, 1, 1, token, dim]


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((3, 2, 2, 16, 64), torch.bfloat16, True),
        ((3, 2, 2, 48, 96), torch.bfloat16, True),
        ((3, 2, 2, 24, 64), torch.bfloat16, False),
        ((3, 2, 2, 16, 80), torch.bfloat16, False),
        ((3, 1, 1, 16, 576), torch.bfloat16, False),
        ((3, 2, 2, 16, 64), torch.float16, False),
        ((3, 2, 2, 16, 68), torch.int8, False),
    ],
)
def test_which_caches_are_in_pairs(shape: tuple[int, ...], dtype: torch.dtype, expected: bool) -> None:
    cache = torch.empty(shape, dtype=dtype)
    for isa in native.instruction_sets():
        assert is_in_pairs(cache, native.library_for(isa)) == (expected and isa in ("amx", "avx512_bf16"))
    assert not is_in_pairs(cache, None)


def vectors(head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(TOKENS, (HEADS + 2 * KV_HEADS) * head_dim).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "has_norm"), [(64, True), (128, False), (72, True), (256, False)])
def test_kernels_store_what_the_reference_makes_of_rounded_vectors(
    isa: str, dtype: torch.dtype, head_dim: int, has_norm: bool
) -> None:
    qkv = vectors(head_dim, dtype) * 10.0 ** torch.linspace(-3, 3, TOKENS)[:, None].to(dtype)
    plain, found = (stored(qkv, head_dim, is_int8, has_norm) for is_int8 in (False, True))
    assert found.shape[-1] == head_dim + 4
    assert head_size_of(found) == head_size_of(plain) == head_dim
    assert torch.equal(found, quantize_rows(plain))


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_number_is_further_away_than_half_a_step(isa: str, dtype: torch.dtype) -> None:
    qkv = vectors(128, dtype)
    plain, found = (stored(qkv, 128, is_int8) for is_int8 in (False, True))
    plain, values = plain.float(), dequantize_rows(found)
    step = plain.abs().amax(-1, keepdim=True) / 127
    assert ((values - plain).abs() <= step * 0.50001).all()
    is_largest = plain.abs() == plain.abs().amax(-1, keepdim=True)
    torch.testing.assert_close(values[is_largest], plain[is_largest], rtol=1e-6, atol=0)


def test_a_vector_does_not_depend_on_those_beside_it(isa: str) -> None:
    qkv = vectors(64, torch.bfloat16)
    whole = stored(qkv, 64, True)
    louder = qkv * torch.where(torch.arange(TOKENS) == 17, 1, 100)[:, None]
    alone = stored(louder, 64, True)
    assert torch.equal(alone[1, :, :, 1], whole[1, :, :, 1])
    assert not torch.equal(alone[1, :, :, 2], whole[1, :, :, 2])


WORST = {
    "zeros": ([0.0, -0.0], [0.0, 0.0]),
    "an infinity is the largest finite magnitude": ([math.inf, 1.0, -2.0, -math.inf], [2.0, 1.0, -2.0, -2.0]),
    "nothing but infinities": ([math.inf, -math.inf], [0.0, 0.0]),
    "subnormal numbers": ([1e-39, -1e-40, 1e-45], [0.0, 0.0, 0.0]),
    "subnormal beside normal": ([1.0, 1e-39], [1.0, 0.0]),
    "the largest number": ([3.3895e38, -1.0], [3.3895e38, 0.0]),
    "below the least magnitude": ([2.0**-101, 0.0], [0.0, 0.0]),
    "the least magnitude": ([2.0**-100, -(2.0**-101)], [2.0**-100, -(2.0**-101)]),
    "halves are rounded to even": ([127.0, 0.5, 1.5, -0.5, -2.5], [127.0, 0.0, 2.0, 0.0, -2.0]),
}


@pytest.mark.parametrize("name", WORST)
def test_the_worst_vectors(isa: str, name: str) -> None:
    numbers, expected = (torch.tensor([*each, *[0.0] * (64 - len(each))]) for each in WORST[name])
    qkv = vectors(64, torch.float32)
    clean = stored(qkv, 64, True)
    qkv[3, -64:] = numbers
    found = stored(qkv, 64, True)
    worst, others = (0, 1, 1, 3), torch.ones(found.shape[:-1], dtype=torch.bool)
    others[worst] = False
    torch.testing.assert_close(dequantize_rows(found[worst]), expected, rtol=1e-2, atol=0)
    assert torch.equal(found[worst], quantize_rows(numbers))
    assert torch.equal(found[others], clean[others])


def test_a_vector_with_a_nan_is_one(isa: str) -> None:
    qkv = vectors(64, torch.bfloat16)
    qkv[3, -1] = -torch.nan
    found = stored(qkv, 64, True)
    is_nan = dequantize_rows(found).isnan()
    assert is_nan[0, 1, 1, 3].all()
    assert is_nan.sum() == 64
    assert torch.equal(found[0, 1, 1, 3], quantize_rows(qkv[3, -64:]))


def test_unwritten_memory_of_a_debugging_engine_is_nan() -> None:
    assert dequantize_rows(torch.full((3, 68), 0xFF, dtype=torch.uint8).view(torch.int8)).isnan().all()
