"""Opens the source of a model's tensors."""

from __future__ import annotations

from pathlib import Path

import torch

from penstock.config.gguf.file import open_gguf
from penstock.config.gguf.folder import unpacked_file
from penstock.config.model import ModelConfig
from penstock.config.quantization import QuantizationConfig
from penstock.models.sources.checkpoint import PLAIN_TYPES, TYPES, CheckpointSource, checkpoint_bytes
from penstock.models.sources.dummy import DummySource
from penstock.models.sources.gguf import GGUFSource, bytes_in_memory
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
    file = unpacked_file(folder)
    if file is not None:
        return GGUFSource(file)
    source = CheckpointSource(folder, PLAIN_TYPES if quantization is None else TYPES)
    return source if quantization is None else QuantizedSource(source, quantization)


def loaded_bytes(model: ModelConfig, dtype: torch.dtype, keeps_quantized: bool) -> int:
    """Returns the memory that a checkpoint's weights take: in their formats if layers compute with these, else in
    `dtype`.
    """
    file = unpacked_file(model.path)
    if file is not None:
        return bytes_in_memory(open_gguf(file), dtype, keeps_quantized)
    num_bytes = checkpoint_bytes(model.path)
    return num_bytes if model.quantization is None or keeps_quantized else num_bytes * model.quantization.expansion
