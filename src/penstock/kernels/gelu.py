"""The activation GELU (Hendrycks and Gimpel 2016, arXiv:1606.08415): x times the normal distribution at x.

Exactly, by the error function, or by its approximation with a hyperbolic tangent, as a model was trained. All of it is
float32, rounded to the dtype once. A number's result depends on that number alone.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from penstock.kernels.native import DTYPE_CODES, library, num_threads
from penstock.kernels.sigmoid import sigmoid_reference

_SQRT_2_OVER_PI = math.sqrt(2 / math.pi)


def gelu(x: torch.Tensor, is_tanh: bool = False) -> torch.Tensor:
    """[T, I], overwritten, and returned."""
    assert x.dtype in DTYPE_CODES and x.dim() == 2 and x.is_contiguous(), f"x is {tuple(x.shape)} {x.dtype}"
    native = library() if x.is_cpu else None
    if native is None:
        return x.copy_(gelu_reference(x, is_tanh))
    native.function("gelu", "pnnnii")(x.data_ptr(), *x.shape, num_threads(), is_tanh, DTYPE_CODES[x.dtype])
    return x


def gelu_and_mul(gate_up: torch.Tensor, is_tanh: bool = False) -> torch.Tensor:
    """[T, 2I], gate then up, -> [T, I]: gelu(gate) * up, in float32 and rounded once."""
    assert (
        gate_up.dtype in DTYPE_CODES and gate_up.dim() == 2 and gate_up.is_contiguous() and gate_up.shape[1] % 2 == 0
    ), f"gate_up is {tuple(gate_up.shape)} {gate_up.dtype}"
    native = library() if gate_up.is_cpu else None
    if native is None:
        return gelu_and_mul_reference(gate_up, is_tanh)
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((rows, width))
    run, codes = native.function("gelu_and_mul", "ppnnnii"), (is_tanh, DTYPE_CODES[gate_up.dtype])
    run(gate_up.data_ptr(), out.data_ptr(), rows, width, num_threads(), *codes)
    return out


def gelu_reference(x: torch.Tensor, is_tanh: bool = False) -> torch.Tensor:
    return F.gelu(x.float(), approximate="tanh" if is_tanh else "none").to(x.dtype)


def gelu_and_mul_reference(gate_up: torch.Tensor, is_tanh: bool = False) -> torch.Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    if not is_tanh:
        # Contiguous: torch computes the elements of strided rows in another way.
        return (F.gelu(gate.contiguous()) * up).to(gate_up.dtype)
    # x / 2 (1 + tanh(u)) = x sigmoid(2 u); torch's own treats the last few elements of a tensor in another way.
    u = _SQRT_2_OVER_PI * (gate + 0.044715 * gate * gate * gate)
    return (gate * sigmoid_reference(2 * u) * up).to(gate_up.dtype)
