"""The soft cap of logits (Gemma 2, arXiv:2408.00118, section 2): cap * tanh(x / cap).

float32 throughout, rounded to the dtype once. A number's result depends on that number alone.
"""

from __future__ import annotations

import torch

from penstock.kernels.native import DTYPE_CODES, library, num_threads
from penstock.kernels.sigmoid import sigmoid_reference


def soft_cap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """[T, N], overwritten, and returned."""
    assert x.dtype in DTYPE_CODES and x.dim() == 2 and x.is_contiguous(), f"x is {tuple(x.shape)} {x.dtype}"
    assert cap > 0, f"a cap of {cap}"
    native = library() if x.is_cpu else None
    if native is None:
        return x.copy_(soft_cap_reference(x, cap))
    native.function("soft_cap", "pnnnfi")(x.data_ptr(), *x.shape, num_threads(), cap, DTYPE_CODES[x.dtype])
    return x


def soft_cap_reference(x: torch.Tensor, cap: float) -> torch.Tensor:
    # tanh(u) = 2 sigmoid(2 u) - 1; torch.tanh treats the last few elements of a tensor in another way.
    return ((2 * sigmoid_reference(x.float() * (2 / cap)) - 1) * cap).to(x.dtype)
