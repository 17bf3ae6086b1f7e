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


def loaded_bytes(model: ModelConfig, dtype: torch.dtype, keeps_quantized: bool, bits: int = 0) -> int:
    """Returns the memory that a checkpoint's weights take: in their formats if layers compute with these, else in
    `dtype`. Those that are in none are rounded to `bits` on loading, unless that is 0.
    """
    file = unpacked_file(model.path)
    if file is not None:
        return bytes_in_memory(open_gguf(file), dtype, keeps_quantized)
    num_bytes, quantization = checkpoint_bytes(model.path, dtype), model.quantization
    if quantization is not None:
        is_expanded = not keeps_quantized or quantization.is_reordered
        return num_bytes * quantization.expansion * dtype.itemsize // 2 if is_expanded else num_bytes
    if not bits or not keeps_quantized:
        return num_bytes
    vectors = min(num_bytes, model.vocab_size * model.hidden_size * (2 if model.tie_word_embeddings else 4))
    # Of 16 bits; a scale for 32 weights adds half a bit to each.
    return vectors + (num_bytes - vectors) * (2 * bits + 1) // 32
