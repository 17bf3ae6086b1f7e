"""Opens the source of a model's tensors."""

from __future__ import annotations

from pathlib import Path

import torch

from penstock.config.gguf.folder import LINK
from penstock.config.quantization import QuantizationConfig
from penstock.models.sources.checkpoint import CheckpointSource
from penstock.models.sources.dummy import DummySource
from penstock.models.sources.gguf import GGUFSource
from penstock.models.sources.quantized import QuantizedSource
from penstock.models.sources.source import WeightSource

_HOST = torch.device("cpu")


def open_weights(
    folder: Path, load_format: str, device: torch.device = _HOST, quantization: QuantizationConfig | None = None
) -> WeightSource:
    """Opens the source for `load_format` "auto" or "dummy", which generates its tensors on `device`.

    `quantization` is as in `ModelConfig`.
    """
    if load_format == "dummy":
        return DummySource(device)
    if (folder / LINK).exists():
        return GGUFSource(folder / LINK)
    source = CheckpointSource(folder)
    return source if quantization is None else QuantizedSource(source, quantization)
