"""Checks of a rotary table, at every start: a fault in it would change every token of the process and raise no error.

The table is compared with two others. Rows that are recomputed in the same way must agree in every bit: all rows of a
short table, and blocks of rows from the beginning to the end of a long one. The whole table must agree, within the
accuracy of float32 angles, with one computed by numpy and Python's own functions: each row is the first row of its
stretch rotated by the angles of a distance. The two share neither functions nor memory nor threads.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from penstock.utils.errors import ConfigError

# The number of angles that are recomputed, and of those that are rotated together.
_MAX_ANGLES_AGAIN, _STRETCH_ANGLES = 1 << 16, 1 << 15
# Rounding errors of a sum of products of float32 numbers; and, for each unit of an angle, of the angles themselves.
_TOLERANCE, _ANGLE_TOLERANCE = 2.0**-21, 2.0**-22
_FREQUENCY_TOLERANCE = 2.0**-16


def check_frequencies(inv_freq: torch.Tensor, expected: torch.Tensor) -> None:
    """[head_dim / 2] float32 each. Raises ConfigError if they differ by more than rounding allows."""
    is_wrong = (inv_freq - expected).abs() > expected.abs() * _FREQUENCY_TOLERANCE
    # A comparison with NaN is false.
    is_wrong |= ~inv_freq.isfinite()
    if is_wrong.any():
        raise _wrong(f"{int(is_wrong.sum())} of its {len(inv_freq)} frequencies are wrong")


def check_table(
    table: torch.Tensor,
    inv_freq: torch.Tensor,
    amplitude: float,
    num_rows: int,
    make_block: Callable[[int], torch.Tensor],
) -> None:
    """`make_block` recomputes a block of `num_rows` rows of the table. Raises ConfigError naming a wrong row."""
    _check_again(table, num_rows, make_block)
    _check_by_turning(table.numpy(), inv_freq.numpy(), amplitude)


def _check_again(table: torch.Tensor, num_rows: int, make_block: Callable[[int], torch.Tensor]) -> None:
    blocks = table.split(num_rows)
    num_again = min(len(blocks), max(2, _MAX_ANGLES_AGAIN // (num_rows * table.shape[1] // 2)))
    for number in np.linspace(0, len(blocks) - 1, num_again).astype(int).tolist():
        differs = blocks[number].view(torch.int32) != make_block(number).view(torch.int32)
        if differs.any():
            row = number * num_rows + int(differs.any(-1).nonzero()[0])
            raise _wrong(f"row {row} came out otherwise when it was computed again")


def _check_by_turning(table: np.ndarray, inv_freq: np.ndarray, amplitude: float) -> None:
    half = len(inv_freq)
    length = max(1, _STRETCH_ANGLES // half)
    turn_cos, turn_sin = _cos_sin(np.arange(min(length, len(table))), inv_freq)
    first_cos, first_sin = (
        part * np.float32(amplitude) for part in _cos_sin(np.arange(0, len(table), length), inv_freq)
    )
    buffers = np.empty_like(turn_cos), np.empty_like(turn_cos)
    for number, start in enumerate(range(0, len(table), length)):
        rows = table[start : start + length]
        count = len(rows)
        out, term = buffers[0][:count], buffers[1][:count]
        cos, sin = first_cos[number], first_sin[number]
        allowed = amplitude * (_TOLERANCE + _ANGLE_TOLERANCE * (start + count) * inv_freq)
        for add, by_cos, by_sin, found in (
            (np.subtract, turn_cos, turn_sin, rows[:, :half]),
            (np.add, turn_sin, turn_cos, rows[:, half:]),
        ):
            add(np.multiply(by_cos[:count], cos, out), np.multiply(by_sin[:count], sin, term), out)
            np.abs(np.subtract(out, found, out), out)
            # Written so that NaN counts as wrong.
            if not (out.max(axis=0) <= allowed).all():
                raise _wrong(f"a row from {start} to {start + count - 1} does not follow from row {start}")


def _cos_sin(positions: np.ndarray, inv_freq: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns [len(positions), len(inv_freq)] float32 each, of float32 angles by functions of float64."""
    angles = np.multiply.outer(positions.astype(np.float32), inv_freq).astype(np.float64)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _wrong(what: str) -> ConfigError:
    return ConfigError(
        f"the rotary table is wrong: {what}. This process would give wrong tokens; start it again, and where that does "
        "not help, check the machine's memory and the installation of torch"
    )
