"""The header of a channel's message, which describes its tensors as numbers in front of their bytes.

The first number counts those that follow; then each tensor has its dtype's code, its number of dimensions, and these.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

# A dtype's code is its index.
_DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.bool, torch.uint8, torch.int8, torch.int16,
    torch.int32, torch.int64, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
# This many are sent at once, padded with zeros; only messages of many tensors have more.
FIRST_NUMBERS = 32


def encode_header(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """-> [FIRST_NUMBERS or more] int64"""
    numbers = [number for tensor in tensors for number in (_CODES[tensor.dtype], tensor.dim(), *tensor.shape)]
    padding = [0] * (FIRST_NUMBERS - 1 - len(numbers))
    return torch.tensor([len(numbers), *numbers, *padding], dtype=torch.int64)


def numbers_missing(first: torch.Tensor) -> int:
    """Returns how many numbers follow the first FIRST_NUMBERS."""
    return max(0, int(first[0]) + 1 - FIRST_NUMBERS)


def decode_header(header: torch.Tensor) -> list[tuple[torch.dtype, list[int]]]:
    """Returns dtype and shape of every tensor."""
    count, *numbers = header.tolist()
    tensors: list[tuple[torch.dtype, list[int]]] = []
    position = 0
    while position < count:
        code, dimensions = numbers[position : position + 2]
        tensors.append((_DTYPES[code], numbers[position + 2 : position + 2 + dimensions]))
        position += 2 + dimensions
    return tensors
