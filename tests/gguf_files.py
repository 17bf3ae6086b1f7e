"""Writes GGUF files with llama.cpp's own library: names, quantization and layout are its."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

# Penstock's model type -> llama.cpp's architecture.
ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
}
Tensors = dict[str, torch.Tensor]


def write_gguf(
    path: Path,
    file: Path,
    kind: gguf.GGMLQuantizationType,
    others: dict[str, gguf.GGMLQuantizationType] | None = None,
    divisors: torch.Tensor | None = None,
) -> Tensors:
    """Writes a checkpoint folder's model as GGUF and returns the values of its tensors, under the checkpoint's names.

    Matrices are of one kind, but for those of `others`, by the end of their name in the checkpoint. `divisors` are
    those of the rotary frequencies, [head_dim / 2].
    """
    config = json.loads((path / "config.json").read_text())
    tensors = load_file(path / "model.safetensors")
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[architecture])
    _describe(writer, config)
    if divisors is not None:
        writer.add_tensor("rope_freqs.weight", divisors.float().numpy())
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    values: Tensors = {}
    for name, stored in _joined_experts(tensors).items():
        weight = stored.float()
        if config["model_type"] == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            weight = _in_pairs(weight, config["head_dim"])
        if config["model_type"] == "gemma3_text" and name.endswith("norm.weight"):
            weight = weight + 1
        of_file = names.get_name(name, (".weight", ".bias"))
        assert of_file is not None, name
        is_matrix = weight.ndim > 1 and "ffn_gate_inp" not in of_file
        chosen = kind if is_matrix else gguf.GGMLQuantizationType.F32
        chosen = next((each for end, each in (others or {}).items() if name.endswith(end)), chosen)
        data = gguf.quantize(weight.numpy(), chosen)
        writer.add_tensor(of_file, data, raw_dtype=chosen)
        found = torch.from_numpy(gguf.dequantize(data, chosen).astype(np.float32)).reshape(weight.shape)
        if config["model_type"] == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            found = _from_pairs(found, config["head_dim"])
        if config["model_type"] == "gemma3_text" and name.endswith("norm.weight"):
            found = found - 1
        values[name] = found.bfloat16()
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return _single_experts(values)


def _describe(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters") or {}
    writer.add_rope_freq_base(
        (rope.get("full_attention") or rope).get("rope_theta") or config.get("rope_theta", 10000.0)
    )
    num_experts = config.get("num_experts") or config.get("num_local_experts")
    if num_experts:
        writer.add_expert_count(num_experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])


def _in_pairs(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    return weight.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2).contiguous()


def _from_pairs(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    return weight.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2).contiguous()


def _joined_experts(tensors: Tensors) -> Tensors:
    """Experts that are stored one by one become one tensor, and gate and up in one tensor become two."""
    joined: Tensors = {}
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        before, found, after = name.partition(".experts.")
        number, _, rest = after.partition(".")
        if found and number.isdigit():
            experts.setdefault(f"{before}.experts.{rest}", {})[int(number)] = tensor
        elif name.endswith("experts.gate_up_proj"):
            for part, half in zip(("gate_proj", "up_proj"), tensor.chunk(2, 1), strict=True):
                joined[f"{before}.experts.{part}.weight"] = half
        elif name.endswith("experts.down_proj"):
            joined[f"{name}.weight"] = tensor
        else:
            joined[name] = tensor
    return joined | {name: torch.stack([parts[i] for i in sorted(parts)]) for name, parts in experts.items()}


def _single_experts(values: Tensors) -> Tensors:
    single: Tensors = {}
    for name, tensor in values.items():
        before, found, rest = name.partition(".experts.")
        if found:
            single.update({f"{before}.experts.{number}.{rest}": each for number, each in enumerate(tensor)})
        else:
            single[name] = tensor
    return single
