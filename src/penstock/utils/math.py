"""Integer arithmetic used everywhere."""

from __future__ import annotations


def cdiv(numerator: int, denominator: int) -> int:
    """Division rounded up."""
    return -(-numerator // denominator)


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `value`."""
    return cdiv(value, multiple) * multiple
