"""The gated activation of a feed-forward layer: out = silu(gate) * up, with silu(g) = g / (1 + exp(-g)).

float32 throughout, rounded to the dtype once, after the product. A row's result depends on that row alone.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from penstock.kernels.dispatch import triton_module, uses_triton
from penstock.kernels.native import DTYPE_CODES, library, num_threads


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[T, 2I], gate then up, -> [T, I]."""
    assert gate_up.dtype in DTYPE_CODES, f"gate_up is {gate_up.dtype}"
    assert gate_up.dim() == 2 and gate_up.shape[1] % 2 == 0, f"gate_up is {tuple(gate_up.shape)}, not [T, 2I]"
    assert gate_up.is_contiguous(), f"gate_up has strides {gate_up.stride()}"
    if uses_triton(gate_up):
        return triton_module("silu_and_mul").silu_and_mul(gate_up)
    native = library()
    if native is None:
        return silu_and_mul_reference(gate_up)
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((rows, width))
    run, threads = native.function("silu_and_mul", "ppnnni"), num_threads()
    run(gate_up.data_ptr(), out.data_ptr(), rows, width, threads, DTYPE_CODES[gate_up.dtype])
    return out


def silu_and_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)
