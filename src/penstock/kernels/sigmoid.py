"""The logistic function of float32 numbers, each independent of its place in memory."""

from __future__ import annotations

import torch

from penstock.kernels.native import library


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Returns 1 / (1 + exp(-x)), [...] float32."""
    native = library() if x.is_cpu else None
    if native is None:
        return sigmoid_reference(x)
    assert x.dtype == torch.float32, f"x is {x.dtype}"
    out = x.clone(memory_format=torch.contiguous_format)
    native.function("sigmoid", "pn")(out.data_ptr(), out.numel())
    return out


def sigmoid_reference(x: torch.Tensor) -> torch.Tensor:
    """Computes it as the softmax of x and zero.

    `torch.sigmoid` computes the last few elements of a tensor with another exponential than the others, so that a
    token's last bits depend on its batch; a softmax treats every row alike.
    """
    return torch.stack((x, torch.zeros_like(x)), -1).softmax(-1)[..., 0]
