"""The logistic function of float32 numbers, each independent of its place in memory."""

from __future__ import annotations

import torch

from penstock.kernels.native import DTYPE_CODES, library, num_threads


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Returns 1 / (1 + exp(-x)), [...] float32."""
    native = library() if x.is_cpu else None
    if native is None:
        return sigmoid_reference(x)
    assert x.dtype == torch.float32, f"x is {x.dtype}"
    out = x.clone(memory_format=torch.contiguous_format)
    native.function("sigmoid", "pn")(out.data_ptr(), out.numel())
    return out


def multiply_by_sigmoid(x: torch.Tensor, gate: torch.Tensor) -> None:
    """Multiplies `x` with 1 / (1 + exp(-gate)) in place, both [T, width]; the factor is rounded to their dtype."""
    native = library() if x.is_cpu else None
    assert x.shape == gate.shape and x.dtype == gate.dtype, (x.shape, gate.shape, x.dtype, gate.dtype)
    if native is None:
        x.copy_(x.float() * sigmoid_reference(gate.float()).to(x.dtype).float())
        return
    assert x.is_contiguous() and gate.is_contiguous(), (x.stride(), gate.stride())
    call = native.function("multiply_by_sigmoid", "ppnnni")
    call(x.data_ptr(), gate.data_ptr(), *x.shape, num_threads(), DTYPE_CODES[x.dtype])


def sigmoid_reference(x: torch.Tensor) -> torch.Tensor:
    """Computes it as the softmax of x and zero.

    `torch.sigmoid` computes the last few elements of a tensor with another exponential than the others, so that a
    token's last bits depend on its batch; a softmax treats every row alike.
    """
    return torch.stack((x, torch.zeros_like(x)), -1).softmax(-1)[..., 0]
