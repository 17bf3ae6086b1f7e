"""Random numbers that are a function of only (seed, position, purpose).

A request's draws therefore depend neither on its neighbours nor on how often it was preempted. The generator is
SplitMix64 (Steele, Lea and Flood 2014) applied to the three numbers in turn.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import numpy as np

_INCREMENT = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIERS = ((np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB)))


class Purpose(enum.IntEnum):
    """The use of a number; two purposes never share one."""

    SAMPLE = 0  # a token, from the model's distribution
    DRAFT = 1  # a draft, from the drafter's
    ACCEPT = 2  # whether a draft is accepted
    RESAMPLE = 3  # the token in place of a rejected draft


def uniform(seeds: Sequence[int], positions: np.ndarray, purpose: Purpose) -> np.ndarray:
    """[n] float64 in [0, 1), 53 random bits each. `seeds` are any 64-bit integers, `positions` [n] int64."""
    state = np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], dtype=np.uint64)
    state = _mix(state)
    state = _mix(state ^ positions.astype(np.uint64))
    state = _mix(state ^ np.uint64(purpose))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(value: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        value = value + _INCREMENT
        for shift, multiplier in _MULTIPLIERS:
            value = (value ^ (value >> shift)) * multiplier
    return value ^ (value >> np.uint64(31))
