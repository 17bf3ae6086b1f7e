"""The gated activation of a feed-forward layer: out = silu(gate) * up, with silu(g) = g / (1 + exp(-g)).

gate_up [T, 2I] holds gate, then up; out is [T, I]. float32 throughout, rounded to the dtype once, after the product.
Elements are independent: nothing else in the batch can change their bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024  # elements of out per program
_WARPS = 4


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[T, 2I], gate then up, -> [T, I]. The wrapper in `penstock.kernels` has checked it."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((rows, width))
    _silu_and_mul[(rows, triton.cdiv(width, _BLOCK))](gate_up, out, width, _BLOCK, num_warps=_WARPS)
    return out


@triton.jit
def _silu_and_mul(gate_up_ptr, out_ptr, width: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * block + tl.arange(0, block)
    is_inside = place < width
    start = gate_up_ptr + row * (2 * width)
    gate = tl.load(start + place, mask=is_inside, other=0.0).to(tl.float32)
    up = tl.load(start + width + place, mask=is_inside, other=0.0).to(tl.float32)
    silu = gate / (1.0 + tl.exp(-gate))
    tl.store(out_ptr + row * width + place, (silu * up).to(out_ptr.dtype.element_ty), mask=is_inside)
