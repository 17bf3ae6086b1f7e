"""What gives a model its tensors, by the names of a Hugging Face checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from penstock.kernels.quantized import QuantizedWeight

Part = tuple[slice, ...]
"""Part of a tensor: an interval of each dimension, starting with the first; omitted dimensions are whole."""
ALL: Part = (slice(None),)

PROGRESS_DELAY_SECONDS = 2.0
"""How long reading must take before its progress is shown."""


class WeightSource(Protocol):
    """The source of tensors; they stay valid after it is closed."""

    def read(self, name: str, shape: Sequence[int], part: Part = ALL) -> torch.Tensor | QuantizedWeight:
        """Reads that part of the tensor, as it is stored, and nothing else. `shape` is the whole tensor's.

        Raises ConfigError if it is missing or has another shape.
        """
        ...

    def has(self, name: str) -> bool: ...

    def close(self) -> None: ...
