"""The tensors of a checkpoint in blocks of 8-bit floats."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from penstock.models.sources.source import ALL, Part, WeightSource

_FP8_SCALE = "_scale_inv"


class BlockFP8Source:
    """The tensors of another source, of which those in blocks of 8-bit floats become bfloat16 when they are read.

    `NAME.weight` of float8_e4m3fn has a scale for every block in `NAME.weight_scale_inv` (DeepSeek-V3,
    arXiv:2412.19437): a value is the stored number times its block's scale in float32, rounded to bfloat16.
    """

    def __init__(self, source: WeightSource, block: tuple[int, int]) -> None:
        """`block` is the number of rows and of columns that share a scale."""
        self._source = source
        self._block = block

    def read(self, name: str, shape: Sequence[int], part: Part = ALL) -> torch.Tensor:
        stored = self._source.read(name, shape, part)
        if stored.dtype != torch.float8_e4m3fn:
            return stored
        *others, rows, columns = shape
        counts = [-(-size // count) for size, count in zip((rows, columns), self._block, strict=True)]
        whole = (*part, *[slice(None)] * (len(shape) - len(part)))
        scales = self._source.read(name + _FP8_SCALE, (*others, *counts), whole[:-2] or ALL).float()
        for axis, size, count in ((-2, rows, self._block[0]), (-1, columns, self._block[1])):
            chosen = torch.arange(size)[whole[axis]] // count
            scales = scales.index_select(axis, chosen.to(scales.device))
        return (stored.float() * scales).bfloat16()

    def has(self, name: str) -> bool:
        return self._source.has(name)

    def close(self) -> None:
        self._source.close()
