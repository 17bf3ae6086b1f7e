"""The squared ReLU (So et al. 2021, arXiv:2109.08668): max(x, 0)^2, in float32, rounded to the dtype once."""

from __future__ import annotations

import torch

from penstock.kernels.native import DTYPE_CODES, library, num_threads


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """[T, I], overwritten, and returned."""
    assert x.dtype in DTYPE_CODES and x.dim() == 2 and x.is_contiguous(), f"x is {tuple(x.shape)} {x.dtype}"
    native = library() if x.is_cpu else None
    if native is None:
        return x.copy_(squared_relu_reference(x))
    native.function("squared_relu", "pnnni")(x.data_ptr(), *x.shape, num_threads(), DTYPE_CODES[x.dtype])
    return x


def squared_relu_reference(x: torch.Tensor) -> torch.Tensor:
    return x.float().relu().square().to(x.dtype)
