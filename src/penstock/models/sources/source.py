"""What gives a model its tensors, by the names of a Hugging Face checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from tqdm import tqdm

from penstock.kernels.quantized import QuantizedWeight

Part = tuple[slice, ...]
"""Part of a tensor: an interval of each dimension, starting with the first; omitted dimensions are whole."""
ALL: Part = (slice(None),)


def progress_of(num_tensors: int) -> tqdm[Any]:
    """Shows how many tensors have been read, if that takes more than two seconds."""
    return tqdm(total=num_tensors, desc="loading weights", unit="tensor", delay=2.0)


class WeightSource(Protocol):
    """The source of tensors; they stay valid after it is closed."""

    def read(self, name: str, shape: Sequence[int], part: Part = ALL) -> torch.Tensor | QuantizedWeight:
        """Reads that part of the tensor, as it is stored, and nothing else. `shape` is the whole tensor's.

        Raises ConfigError if it is missing or has another shape.
        """
        ...

    def has(self, name: str) -> bool: ...

    def close(self) -> None: ...
