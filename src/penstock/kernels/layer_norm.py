"""Layer normalisation of rows (Ba et al. 2016, arXiv:1607.06450), alone or of a sum with the residual stream.

    out = (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias

All computation is in float32, including the sum with the residual, and rounded to the dtype once. A row's result
depends only on that row.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from penstock.kernels.native import DTYPE_CODES, library, num_threads


def layer_norm(
    x: torch.Tensor,  # [T, H]
    residual: torch.Tensor | None,  # [T, H], added to `x`
    weight: torch.Tensor,  # [H]
    bias: torch.Tensor,  # [H]
    eps: float,
) -> torch.Tensor:
    """Returns [T, H]: the normalised rows of `x`, or of `residual + x`."""
    _check(x, residual, weight, bias)
    native = library() if x.is_cpu else None
    if native is None:
        return layer_norm_reference(x, residual, weight, bias, eps)
    out = torch.empty_like(x)
    rows, hidden = x.shape
    added = None if residual is None else residual.data_ptr()
    pointers = (x.data_ptr(), added, weight.data_ptr(), bias.data_ptr(), out.data_ptr())
    native.function("layer_norm", "pppppnnnfi")(*pointers, rows, hidden, num_threads(), eps, DTYPE_CODES[x.dtype])
    return out


def layer_norm_reference(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    wide = x.float() if residual is None else x.float() + residual.float()
    return F.layer_norm(wide, weight.shape, weight.float(), bias.float(), eps).to(x.dtype)


def _check(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor) -> None:
    assert x.dtype in DTYPE_CODES and x.dim() == 2 and x.is_contiguous(), f"x is {tuple(x.shape)} {x.dtype}"
    assert residual is None or (residual.shape == x.shape and residual.dtype == x.dtype and residual.is_contiguous()), (
        f"residual is not as x, {tuple(x.shape)} {x.dtype}"
    )
    for name, tensor in (("weight", weight), ("bias", bias)):
        assert tensor.shape == x.shape[1:] and tensor.dtype == x.dtype and tensor.is_contiguous(), (
            f"{name} is {tuple(tensor.shape)} {tensor.dtype} for {tuple(x.shape)} {x.dtype}"
        )
