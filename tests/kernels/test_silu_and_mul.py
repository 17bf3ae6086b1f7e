from __future__ import annotations

import importlib

import pytest
import torch

from penstock.kernels import native
from penstock.kernels.silu_and_mul import silu_and_mul

module = importlib.import_module("penstock.kernels.silu_and_mul")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True, params=(*native.instruction_sets(), "torch"))
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    torch.manual_seed(0)
    library = None if request.param == "torch" else native.library_for(request.param)
    monkeypatch.setattr(module, "library", lambda: library)
    return request.param


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 8, 100, 3072])
def test_equals_float64(dtype: torch.dtype, width: int) -> None:
    gate_up = (4 * torch.randn(5, 2 * width)).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    expected = gate / (1 + torch.exp(-gate)) * up
    out = silu_and_mul(gate_up)
    tolerance = expected.abs() * (torch.finfo(dtype).eps / 2 + 2e-6) + torch.finfo(dtype).smallest_normal
    assert ((out.double() - expected).abs() <= tolerance).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_gates(dtype: torch.dtype) -> None:
    gates = torch.tensor([[-1e4, -200.0, -90.0, 0.0, 90.0, 1e4]]).to(dtype)
    out = silu_and_mul(torch.cat((gates, torch.ones_like(gates)), dim=-1))
    assert out[0, :3].abs().max() <= 1e-30
    assert torch.equal(out[0, 3:], gates[0, 3:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_other_rows(dtype: torch.dtype) -> None:
    gate_up = torch.randn(90, 2 * 500).to(dtype)
    whole = silu_and_mul(gate_up)
    for rows in (slice(0, 1), slice(7, 8), slice(3, 60), slice(89, 90)):
        assert torch.equal(silu_and_mul(gate_up[rows].clone()), whole[rows])


def test_wrong_shapes_raise_assertion_errors() -> None:
    with pytest.raises(AssertionError, match=r"\(2, 7\)"):
        silu_and_mul(torch.zeros(2, 7))
