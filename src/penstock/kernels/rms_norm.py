"""RMS normalisation of rows, alone or fused with the addition to the residual stream.

    out = weight * round(x / sqrt(mean(x^2) + eps))

The mean and the division are float32; the quotient is rounded to the dtype before the weight is applied, and the
product is rounded again, as Hugging Face's models do. A row's result depends on that row alone.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from types import ModuleType

import torch

from penstock.kernels.dispatch import uses_triton
from penstock.kernels.native import DTYPE_CODES, NativeLibrary, library, num_threads


def rms_norm(
    x: torch.Tensor,  # [T, H]
    weight: torch.Tensor,  # [H]
    eps: float,
) -> torch.Tensor:
    """[T, H]: the normalised rows of `x`."""
    _check(x, weight)
    if uses_triton(x):
        return _triton().rms_norm(x, weight, eps)
    native = library()
    if native is None:
        return rms_norm_reference(x, weight, eps)
    out = torch.empty_like(x)
    rows, hidden = x.shape
    run = _native_rms_norm(native)
    pointers = (x.data_ptr(), None, weight.data_ptr(), out.data_ptr())
    run(*pointers, rows, hidden, num_threads(), eps, DTYPE_CODES[x.dtype])
    return out


def add_rms_norm(
    x: torch.Tensor,  # [T, H]
    residual: torch.Tensor,  # [T, H], becomes residual + x
    weight: torch.Tensor,  # [H]
    eps: float,
) -> torch.Tensor:
    """[T, H]: the normalised rows of `residual + x`, a sum that is rounded to the dtype and left in `residual`."""
    _check(x, weight)
    assert residual.shape == x.shape and residual.dtype == x.dtype, f"{residual.shape} {residual.dtype} for {x.shape}"
    assert residual.is_contiguous(), f"residual has strides {residual.stride()}"
    if uses_triton(x):
        return _triton().add_rms_norm(x, residual, weight, eps)
    native = library()
    if native is None:
        return add_rms_norm_reference(x, residual, weight, eps)
    out = torch.empty_like(x)
    rows, hidden = x.shape
    run = _native_rms_norm(native)
    pointers = (x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr())
    run(*pointers, rows, hidden, num_threads(), eps, DTYPE_CODES[x.dtype])
    return out


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def add_rms_norm_reference(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    residual += x
    return rms_norm_reference(residual, weight, eps)


def _check(x: torch.Tensor, weight: torch.Tensor) -> None:
    assert x.dtype in DTYPE_CODES and weight.dtype == x.dtype, f"x is {x.dtype}, weight is {weight.dtype}"
    assert x.dim() == 2 and weight.shape == x.shape[1:], f"x is {tuple(x.shape)}, weight is {tuple(weight.shape)}"
    assert x.is_contiguous() and weight.is_contiguous(), f"x has strides {x.stride()}, weight {weight.stride()}"


@functools.cache
def _triton() -> ModuleType:
    from penstock.kernels.triton import rms_norm as module

    return module


@functools.cache
def _native_rms_norm(native: NativeLibrary) -> Callable[..., int | None]:
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    signature = [pointer, pointer, pointer, pointer, size, size, size, ctypes.c_float, ctypes.c_int32]
    return native.function("rms_norm", signature)
