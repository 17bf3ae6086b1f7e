"""The activation GELU (Hendrycks and Gimpel 2016, arXiv:1606.08415): x times the normal distribution at x.

Exactly, by the error function, or by its approximation with a hyperbolic tangent, as a model was trained. All of it is
float32, rounded to the dtype once. A number's result depends on that number alone.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from penstock.kernels.native import DTYPE_CODES, library, num_threads


def gelu(x: torch.Tensor, is_tanh: bool = False) -> torch.Tensor:
    """[T, I], overwritten, and returned."""
    assert x.dtype in DTYPE_CODES and x.dim() == 2 and x.is_contiguous(), f"x is {tuple(x.shape)} {x.dtype}"
    native = library() if x.is_cpu else None
    if native is None:
        return x.copy_(gelu_reference(x, is_tanh))
    native.function("gelu", "pnnnii")(x.data_ptr(), *x.shape, num_threads(), is_tanh, DTYPE_CODES[x.dtype])
    return x


def gelu_reference(x: torch.Tensor, is_tanh: bool = False) -> torch.Tensor:
    return F.gelu(x.float(), approximate="tanh" if is_tanh else "none").to(x.dtype)
