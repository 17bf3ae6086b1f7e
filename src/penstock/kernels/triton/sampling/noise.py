"""Random numbers of (seed, position, purpose), bit for bit those of `penstock.runner.sampling.noise`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 128
_WARPS = 1


def uniform(
    seed: torch.Tensor,  # [max_num_reqs] int64, by state row
    rows: torch.Tensor,  # [n] int64: state rows; padding, -1, gets 0
    positions: torch.Tensor,  # [n] int64
    purpose: int,
    out: torch.Tensor | None = None,  # [n] float64
) -> torch.Tensor:
    """[n] float64 in [0, 1)."""
    assert rows.shape == positions.shape, f"{tuple(rows.shape)} rows and {tuple(positions.shape)} positions"
    out = torch.empty(rows.shape, dtype=torch.float64, device=rows.device) if out is None else out
    assert out.shape == rows.shape and out.dtype == torch.float64, f"{tuple(out.shape)} {out.dtype}"
    count = len(rows)
    _uniform[(triton.cdiv(count, _BLOCK),)](seed, rows, positions, out, purpose, count, _BLOCK, num_warps=_WARPS)
    return out


@triton.jit
def uniform_of(seed, position, purpose):
    """Returns float64 in [0, 1) from int64 numbers: SplitMix64 (Steele, Lea and Flood 2014) applied to the three in
    turn.
    """
    state = _mix(seed.to(tl.uint64, bitcast=True))
    state = _mix(state ^ position.to(tl.uint64, bitcast=True))
    state = _mix(state ^ purpose)
    return (state >> 11).to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
def _mix(value):
    value += 0x9E3779B97F4A7C15
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["rows_ptr", "positions_ptr", "out_ptr"])
def _uniform(seed_ptr, rows_ptr, positions_ptr, out_ptr, purpose: tl.constexpr, count, block: tl.constexpr):
    place = tl.program_id(0) * block + tl.arange(0, block)
    row = tl.load(rows_ptr + place, mask=place < count, other=-1)
    seed = tl.load(seed_ptr + row, mask=row >= 0, other=0)
    position = tl.load(positions_ptr + place, mask=place < count, other=0)
    number = uniform_of(seed, position, purpose)
    tl.store(out_ptr + place, tl.where(row >= 0, number, 0.0), mask=place < count)
