"""Random numbers of (seed, position, purpose), bit for bit those of `penstock.runner.sampling.noise`."""

from __future__ import annotations

import triton
import triton.language as tl


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
