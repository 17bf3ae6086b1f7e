"""Changes of the residual stream in place, where no norm is computed with them.

A sum is rounded to the dtype, and so is a product. A row's result depends on that row alone.
"""

from __future__ import annotations

import torch

from penstock.kernels.native import DTYPE_CODES, library, num_threads


def add(x: torch.Tensor, residual: torch.Tensor) -> None:
    """Adds `x` to `residual`, both [T, H]."""
    assert x.shape == residual.shape and x.dtype == residual.dtype, (x.shape, x.dtype, residual.shape, residual.dtype)
    if not _native(residual, x, 1.0):
        residual += x


def scale(x: torch.Tensor, factor: float) -> None:
    """Multiplies `x`, [T, H], by a number of its dtype."""
    if not _native(x, None, factor):
        x *= factor


def _native(x: torch.Tensor, added: torch.Tensor | None, factor: float) -> bool:
    """Returns False if there is no native library for it."""
    native = library() if x.is_cpu else None
    if native is None:
        return False
    assert x.dtype in DTYPE_CODES and x.is_contiguous(), (x.dtype, x.stride())
    assert added is None or added.is_contiguous(), "rows to add are strided"
    run, other = native.function("add_and_scale", "ppnnnfi"), None if added is None else added.data_ptr()
    run(x.data_ptr(), other, *x.shape, num_threads(), factor, DTYPE_CODES[x.dtype])
    return True
