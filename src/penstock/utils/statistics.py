"""Statistics of measured values."""

from __future__ import annotations

from collections.abc import Sequence


def percentile(values: Sequence[float], percentage: float) -> float:
    """Linear interpolation between the closest ranks; `values` need not be sorted and must not be empty."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percentage / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
