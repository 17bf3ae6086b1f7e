"""Random tensors in place of a checkpoint's."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from penstock.models.sources.source import ALL, Part

_STD = 0.02
_POOL = 1 << 22


class DummySource:
    """Random weights that depend only on the tensor's name: norms are one, biases and d2t zero, the rest normal.

    They are generated on the requested device, and are the same everywhere.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        pool = torch.randn(_POOL, generator=torch.Generator().manual_seed(0)).mul_(_STD).bfloat16()
        self._pool = pool.to(device)

    def read(self, name: str, shape: Sequence[int], part: Part = ALL) -> torch.Tensor:
        rows, columns = range(shape[0])[part[0]], (slice(None), *part[1:])
        shape = (len(rows), *shape[1:])
        if len(shape) == 1:
            make = torch.zeros if name.endswith(("bias", "d2t")) else torch.ones
            return make(shape, device=self._device)
        count = torch.Size(shape).numel()
        first = rows.start * torch.Size(shape[1:]).numel()
        pool = self._pool.roll((zlib.crc32(name.encode()) - first) % _POOL)
        values = torch.empty(count, dtype=pool.dtype, device=self._device)
        num_whole = count // _POOL
        values[: num_whole * _POOL].view(num_whole, _POOL).copy_(pool.expand(num_whole, -1))
        values[num_whole * _POOL :].copy_(pool[: count % _POOL])
        return values.view(shape)[columns].contiguous()

    def has(self, name: str) -> bool:
        return True

    def close(self) -> None:
        self._pool = torch.empty(0)
