"""RMS normalisation of rows, alone or fused with the addition to the residual stream: one program per row.

    out = weight * round(x / sqrt(mean(x^2) + eps))

x, residual and out are [T, H], weight is [H], of their dtype or float32. Roundings as in `penstock.kernels.rms_norm`;
the sum of squares has its own order, so the last bit of the quotient may differ. A row's bits depend only on that row,
H and the dtype, and not on T or the other rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ELEMENTS_PER_THREAD = 8  # the elements of a 16-byte load in 16-bit dtypes
_MAX_WARPS = 16


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Returns [T, H]: the normalised rows of `x`."""
    return _launch(x, x, weight, eps, adds=False)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Returns [T, H]: the normalised rows of `residual + x`; the sum is rounded to the dtype and left in `residual`."""
    return _launch(x, residual, weight, eps, adds=True)


def _launch(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, adds: bool) -> torch.Tensor:
    """The wrapper in `penstock.kernels` has checked the arguments."""
    out = torch.empty_like(x)
    rows, hidden = x.shape
    block = triton.next_power_of_2(hidden)
    num_warps = min(max(block // (32 * _ELEMENTS_PER_THREAD), 1), _MAX_WARPS)
    _rms_norm[(rows,)](x, residual, weight, out, eps, hidden, block, adds, num_warps=num_warps)
    return out


@triton.jit
def _rms_norm(
    x_ptr, residual_ptr, weight_ptr, out_ptr, eps,
    hidden: tl.constexpr, block: tl.constexpr, adds: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * hidden
    place = tl.arange(0, block)
    is_inside = place < hidden
    weight = tl.load(weight_ptr + place, mask=is_inside, other=0.0)
    x = tl.load(x_ptr + start + place, mask=is_inside, other=0.0)
    if adds:
        residual = tl.load(residual_ptr + start + place, mask=is_inside, other=0.0)
        x = (residual.to(tl.float32) + x.to(tl.float32)).to(x.dtype)
        tl.store(residual_ptr + start + place, x, mask=is_inside)
    wide = x.to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(wide * wide) / hidden + eps)
    tl.store(out_ptr + start + place, weighted(wide * scale, weight, x.dtype), mask=is_inside)


@triton.jit
def weighted(quotient, weight, dtype: tl.constexpr):
    """Returns the float32 quotient times the weight, rounded; the quotient is rounded too if the weight is narrow."""
    if weight.dtype == dtype:
        quotient = quotient.to(dtype).to(tl.float32)
    return (weight.to(tl.float32) * quotient).to(dtype)
