"""The codes of quantized blocks as bytes.

A block is some bytes of a file, with a fixed number of codes. A byte has bits of codes that are a run apart (`Planes`):
so a vector of bytes, shifted and masked, is a vector of codes.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from penstock.kernels.native import library, num_threads


class Planes(ctypes.Structure):
    """Where `bits` bits of each of a block's codes are, from byte `at` on: byte i of `run` bytes has those of the codes
    i, run + i, 2 * run + i and so on, the first in its lowest bits; the next run has those of the codes that follow.

    `Planes` in native/block_codes.cpp.
    """

    _fields_ = (("at", ctypes.c_int64), ("run", ctypes.c_int64), ("bits", ctypes.c_int64))


def unpack_codes(blocks: np.ndarray, low: Planes, high: Planes, out: torch.Tensor) -> None:
    """Writes the codes of blocks [blocks, bytes] uint8 to `out` [blocks, codes] uint8: the `low` bits of each, and the
    `high` ones, if there are any, from the fifth bit on.
    """
    assert blocks.dtype == np.uint8 and blocks.flags.c_contiguous, f"blocks of {blocks.dtype}, {blocks.strides}"
    assert out.dtype == torch.uint8 and out.is_contiguous() and len(out) == len(blocks), f"{out.shape} {out.dtype}"
    if (native := library()) is None:
        unpack_codes_reference(blocks, low, high, out)
    else:
        planes, run = (ctypes.addressof(low), ctypes.addressof(high)), native.function("unpack_codes", "ppppnnnn")
        run(*planes, blocks.ctypes.data, out.data_ptr(), *blocks.shape, out.shape[1], num_threads())


def unpack_codes_reference(blocks: np.ndarray, low: Planes, high: Planes, out: torch.Tensor) -> None:
    def bits_of(planes: Planes) -> torch.Tensor:
        packed = torch.from_numpy(blocks[:, planes.at : planes.at + out.shape[1] * planes.bits // 8].copy())
        shifts = torch.arange(0, 8, planes.bits, dtype=torch.uint8)[:, None]
        return (packed.view(-1, 1, planes.run) >> shifts & (2**planes.bits - 1)).view(out.shape)

    out.copy_(bits_of(low) | bits_of(high) << 4 if high.bits else bits_of(low))
