"""Integer arithmetic used everywhere."""

from __future__ import annotations


def cdiv(numerator: int, denominator: int) -> int:
    """Division rounded up."""
    return -(-numerator // denominator)


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `value`."""
    return cdiv(value, multiple) * multiple


def interval(size: int, index: int, count: int) -> tuple[int, int]:
    """Returns [start, end) of part `index` when range(size) is divided into `count` contiguous, nearly equal parts."""
    return size * index // count, size * (index + 1) // count
