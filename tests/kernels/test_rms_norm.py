from __future__ import annotations

import importlib

import pytest
import torch

from penstock.kernels import native
from penstock.kernels.rms_norm import add_rms_norm, rms_norm

module = importlib.import_module("penstock.kernels.rms_norm")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDTHS = (8, 100, 128, 1024, 3000)
EPS = 1e-6


@pytest.fixture(autouse=True, params=(*native.instruction_sets(), "torch"))
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    torch.manual_seed(0)
    library = None if request.param == "torch" else native.library_for(request.param)
    monkeypatch.setattr(module, "library", lambda: library)
    return request.param


def exact(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def close(actual: torch.Tensor, expected: torch.Tensor, roundings: float) -> None:
    """Asserts equality up to `roundings` of the dtype and the error of float32 arithmetic."""
    unit = torch.finfo(actual.dtype).eps / 2
    tolerance = expected.abs() * (unit * roundings * 1.01 + 1e-6) + torch.finfo(actual.dtype).smallest_normal
    assert ((actual.double() - expected).abs() <= tolerance).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_equals_float64(dtype: torch.dtype, width: int) -> None:
    x, weight = (3 * torch.randn(5, width)).to(dtype), torch.randn(width).to(dtype)
    before = x.clone()
    close(rms_norm(x, weight, EPS), exact(x, weight), roundings=2)
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_addition_rounds_the_sum_then_normalises_it(dtype: torch.dtype, width: int) -> None:
    x, residual, weight = (torch.randn(shape).to(dtype) for shape in ((5, width), (5, width), (width,)))
    total = residual + x
    out = add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(residual, total)
    assert torch.equal(out, rms_norm(total, weight, EPS))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_other_rows(dtype: torch.dtype) -> None:
    x, weight = torch.randn(300, 520).to(dtype), torch.randn(520).to(dtype)
    whole = rms_norm(x, weight, EPS)
    for rows in (slice(0, 1), slice(7, 8), slice(3, 140), slice(299, 300)):
        assert torch.equal(rms_norm(x[rows].clone(), weight, EPS), whole[rows])


def test_zero_rows_stay_finite() -> None:
    out = rms_norm(torch.zeros(2, 64), torch.ones(64), EPS)
    assert torch.equal(out, torch.zeros(2, 64))
    assert rms_norm(torch.zeros(0, 64), torch.ones(64), EPS).shape == (0, 64)


def test_wrong_shapes_raise_assertion_errors() -> None:
    with pytest.raises(AssertionError, match=r"\(2, 64\)"):
        rms_norm(torch.zeros(2, 64), torch.ones(63), EPS)
