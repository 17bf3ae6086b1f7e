"""The activation GELU (Hendrycks and Gimpel 2016, arXiv:1606.08415): x times the normal distribution at x.

Exactly, by the error function, or by its approximation with a hyperbolic tangent, as a model was trained. All of it is
float32, rounded to the dtype once. A number's result depends on that number alone.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from penstock.kernels.native import DTYPE_CODES, NativeLibrary, library, num_threads
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
    gate, up = gate_up.chunk(2, dim=1)
    return _native(native, gate, up, is_tanh)


def gelu_times(gate: torch.Tensor, factor: torch.Tensor, is_tanh: bool = False) -> torch.Tensor:
    """[T, I] each, of which rows of `factor` may be strided, -> [T, I]: gelu(gate) * factor, rounded once."""
    assert gate.dtype == factor.dtype and gate.dtype in DTYPE_CODES and gate.shape == factor.shape, (
        f"gate {tuple(gate.shape)} {gate.dtype}, factor {tuple(factor.shape)} {factor.dtype}"
    )
    assert gate.is_contiguous() and factor.stride(1) == 1, f"strides {gate.stride()} and {factor.stride()}"
    native = library() if gate.is_cpu else None
    if native is None:
        return gelu_and_mul_reference(torch.cat((gate, factor), 1), is_tanh)
    return _native(native, gate, factor, is_tanh)


def _native(native: NativeLibrary, gate: torch.Tensor, up: torch.Tensor, is_tanh: bool) -> torch.Tensor:
    out = gate.new_empty(gate.shape)
    run, codes = native.function("gelu_and_mul", "pnpnpnnnii"), (is_tanh, DTYPE_CODES[gate.dtype])
    run(
        gate.data_ptr(), gate.stride(0), up.data_ptr(), up.stride(0), out.data_ptr(), *gate.shape, num_threads(), *codes
    )
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
