"""LoRA adapters as PEFT writes them, with random numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from penstock.config.lora import CONFIG, WEIGHTS


def write_adapter(
    folder: Path, sizes: Mapping[str, tuple[int, int]], *, seed: int = 0, rank: int = 4, **config: Any
) -> Path:
    """`sizes`: the inputs and outputs of each projection by name. Returns the folder."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, (num_inputs, num_outputs) in sizes.items():
        down = torch.randn(rank, num_inputs, generator=generator) / num_inputs**0.5
        tensors[f"base_model.model.{name}.lora_A.weight"] = down
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(num_outputs, rank, generator=generator) / 4
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": 8, **config}))
    return folder


def projections(config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Returns the sizes of all projections of a model like Llama."""
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    queries, kv = heads * head_dim, config["num_key_value_heads"] * head_dim
    of_layer = {
        "self_attn.q_proj": (hidden, queries),
        "self_attn.k_proj": (hidden, kv),
        "self_attn.v_proj": (hidden, kv),
        "self_attn.o_proj": (queries, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    layers = range(config["num_hidden_layers"])
    return {f"model.layers.{layer}.{name}": size for layer in layers for name, size in of_layer.items()}
