from __future__ import annotations

import importlib
from dataclasses import dataclass

import pytest
import torch

from penstock.kernels import native
from penstock.kernels.kv_rows import is_in_pairs, pairs_to_rows
from penstock.kernels.rope_and_store_kv import rope_and_store_kv

module = importlib.import_module("penstock.kernels.rope_and_store_kv")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EPS = 1e-6


@pytest.fixture(autouse=True, params=(*native.instruction_sets(), "torch"))
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    torch.manual_seed(0)
    library = None if request.param == "torch" else native.library_for(request.param)
    monkeypatch.setattr(module, "library", lambda: library)
    return request.param


@dataclass
class Case:
    qkv: torch.Tensor  # [T, (Hq + planes * Hkv) * D]
    cos_sin: torch.Tensor  # [max_pos, rotary_dim]
    positions: torch.Tensor  # [T]
    slots: torch.Tensor  # [T]
    norms: tuple[torch.Tensor, torch.Tensor] | tuple[None, None]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    planes: int

    def run(self, rows: slice = slice(None)) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs the kernel on some of the tokens; returns qkv and the cache, which is NaN where nothing was stored."""
        qkv = self.qkv[rows].clone()
        shape = (9, self.planes, self.num_kv_heads, self.block_size, self.head_dim)
        cache = torch.full(shape, float("nan"), dtype=qkv.dtype)
        heads = (self.num_heads, self.num_kv_heads)
        tokens = (self.positions[rows].clone(), cache, self.slots[rows].clone())
        rope_and_store_kv(qkv, *heads, self.cos_sin, *tokens, *self.norms, EPS)
        return qkv, pairs_to_rows(cache) if is_in_pairs(cache, module.library()) else cache


def make(
    dtype: torch.dtype = torch.float32,
    tokens: int = 11,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 128,
    rotary_dim: int | None = None,
    block_size: int = 16,
    norm: bool = True,
    planes: int = 2,
) -> Case:
    rotary_dim = rotary_dim or head_dim
    qkv = torch.randn(tokens, (heads[0] + planes * heads[1]) * head_dim).to(dtype)
    angles = torch.arange(500)[:, None] / 10000 ** (torch.arange(rotary_dim // 2) / (rotary_dim // 2))
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    slots = torch.randperm(9 * block_size)[:tokens]
    norms = (torch.randn(head_dim).to(dtype), torch.randn(head_dim).to(dtype)) if norm else (None, None)
    return Case(qkv, cos_sin, torch.randint(0, 500, (tokens,)), slots, norms, *heads, head_dim, block_size, planes)


def exact(x: torch.Tensor, cos_sin: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
    """Returns x [T, heads, D] normalised and rotated, in float64."""
    x = x.double()
    if norm is not None:
        x = x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * norm.double()
    cos, sin = cos_sin.double()[:, None].chunk(2, dim=-1)
    half = cos.shape[-1]
    out = x.clone()
    out[..., :half] = x[..., :half] * cos - x[..., half : 2 * half] * sin
    out[..., half : 2 * half] = x[..., half : 2 * half] * cos + x[..., :half] * sin
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, None), (80, None), (128, 32), (128, None), (256, None)])
def test_equals_float64(dtype: torch.dtype, norm: bool, head_dim: int, rotary_dim: int | None) -> None:
    case = make(dtype, head_dim=head_dim, rotary_dim=rotary_dim, norm=norm)
    qkv, cache = case.run()
    heads = case.qkv.view(11, 8, head_dim)
    cos_sin = case.cos_sin[case.positions]
    blocks, offsets = case.slots // 16, case.slots % 16
    tolerance = 6 * torch.finfo(dtype).eps
    q = qkv.view(11, 8, head_dim)[:, :4].double()
    torch.testing.assert_close(q, exact(heads[:, :4], cos_sin, case.norms[0]), rtol=tolerance, atol=3 * tolerance)
    k = cache[blocks, 0, :, offsets].double()
    torch.testing.assert_close(k, exact(heads[:, 4:6], cos_sin, case.norms[1]), rtol=tolerance, atol=3 * tolerance)
    assert torch.equal(cache[blocks, 1, :, offsets], heads[:, 6:])
    assert torch.equal(qkv.view(11, 8, head_dim)[:, 4:], heads[:, 4:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [8, 16, 24, 32])
def test_writes_its_slots_and_no_others(block_size: int, dtype: torch.dtype) -> None:
    case = make(dtype, block_size=block_size)
    case.slots[[2, 5]] = -1
    _, cache = case.run()
    written = torch.zeros(9 * block_size, dtype=torch.bool)
    written[case.slots[case.slots >= 0]] = True
    finite = cache.isfinite().permute(0, 3, 1, 2, 4).reshape(9 * block_size, -1)
    assert torch.equal(finite.all(-1), written)
    assert torch.equal(finite.any(-1), written)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_does_not_depend_on_the_other_tokens(dtype: torch.dtype) -> None:
    case = make(dtype, tokens=60)
    whole, whole_cache = case.run()
    for rows in (slice(0, 1), slice(7, 8), slice(3, 50), slice(59, 60)):
        part, part_cache = case.run(rows)
        assert torch.equal(part, whole[rows])
        blocks, offsets = case.slots[rows] // 16, case.slots[rows] % 16
        assert torch.equal(part_cache[blocks, :, :, offsets], whole_cache[blocks, :, :, offsets])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_latent_is_stored_once_and_its_first_dimensions_are_rotated(dtype: torch.dtype) -> None:
    case = make(dtype, heads=(5, 1), head_dim=576, rotary_dim=64, norm=False, planes=1)
    qkv, cache = case.run()
    given, found, cos_sin = case.qkv.view(11, 6, 576), qkv.view(11, 6, 576), case.cos_sin[case.positions]
    tolerance = 6 * torch.finfo(dtype).eps
    stored = cache[case.slots // 16, 0, :, case.slots % 16]
    for rotated, before in ((found[:, :5], given[:, :5]), (stored, given[:, 5:])):
        torch.testing.assert_close(rotated.double(), exact(before, cos_sin, None), rtol=tolerance, atol=3 * tolerance)
        assert torch.equal(rotated[..., 64:], before[..., 64:])
    assert torch.equal(found[:, 5:], given[:, 5:])


def test_wrong_shapes_raise_assertion_errors() -> None:
    case = make()
    case.positions = case.positions[:5]
    with pytest.raises(AssertionError, match="11 tokens"):
        case.run()
