"""RMS normalisation of rows, alone or fused with the addition to the residual stream.

    out = weight * round(x / sqrt(mean(x^2) + eps))

The mean and the division are float32; the quotient is rounded to the dtype before the weight is applied, and the
product is rounded again, as most of Hugging Face's models do. A float32 weight of rows of 16 bits is applied to the
quotient itself, and the product is rounded once (OLMo 2, gpt-oss, Gemma). A row's result depends on that row alone.
"""

from __future__ import annotations

import torch

from penstock.kernels.dispatch import triton_module, uses_triton
from penstock.kernels.native import DTYPE_CODES, library, num_threads


def rms_norm(
    x: torch.Tensor,  # [T, H]
    weight: torch.Tensor,  # [H], of the dtype of `x` or float32
    eps: float,
) -> torch.Tensor:
    """[T, H]: the normalised rows of `x`."""
    _check(x, weight)
    if uses_triton(x):
        return triton_module("rms_norm").rms_norm(x, weight, eps)
    return rms_norm_reference(x, weight, eps) if library() is None else _native(x, None, weight, eps)


def add_rms_norm(
    x: torch.Tensor,  # [T, H]
    residual: torch.Tensor,  # [T, H], becomes residual + x
    weight: torch.Tensor,  # [H], of the dtype of `x` or float32
    eps: float,
) -> torch.Tensor:
    """[T, H]: the normalised rows of `residual + x`, a sum that is rounded to the dtype and left in `residual`."""
    _check(x, weight)
    assert residual.shape == x.shape and residual.dtype == x.dtype, f"{residual.shape} {residual.dtype} for {x.shape}"
    assert residual.is_contiguous(), f"residual has strides {residual.stride()}"
    if uses_triton(x):
        return triton_module("rms_norm").add_rms_norm(x, residual, weight, eps)
    return add_rms_norm_reference(x, residual, weight, eps) if library() is None else _native(x, residual, weight, eps)


def _native(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    native, out = library(), torch.empty_like(x)
    assert native is not None
    added = None if residual is None else residual.data_ptr()
    run = native.function("rms_norm", "ppppnnnfii")
    codes = (DTYPE_CODES[x.dtype], weight.dtype == torch.float32)
    run(x.data_ptr(), added, weight.data_ptr(), out.data_ptr(), *x.shape, num_threads(), eps, *codes)
    return out


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype) if weight.dtype == x.dtype else (weight * wide).to(x.dtype)


def add_rms_norm_reference(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    residual += x
    return rms_norm_reference(residual, weight, eps)


def _check(x: torch.Tensor, weight: torch.Tensor) -> None:
    assert x.dtype in DTYPE_CODES, f"x is {x.dtype}"
    assert weight.dtype in (x.dtype, torch.float32), f"x is {x.dtype}, weight is {weight.dtype}"
    assert x.dim() == 2 and weight.shape == x.shape[1:], f"x is {tuple(x.shape)}, weight is {tuple(weight.shape)}"
    assert x.is_contiguous() and weight.is_contiguous(), f"x has strides {x.stride()}, weight {weight.stride()}"
