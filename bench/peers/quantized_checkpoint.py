"""Writes random checkpoints of a Qwen3 shape in formats that Penstock and vLLM read: GPTQ and W8A8.

vLLM 0.32.0 on a CPU and Penstock load both, and gave the same greedy tokens with two layers and 4,096 tokens of the
0.6B shape.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

GROUP = 128

CONFIGS: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True},
    "w8a8": {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False},
                "input_activations": {
                    "num_bits": 8,
                    "type": "int",
                    "strategy": "token",
                    "symmetric": True,
                    "dynamic": True,
                },
            }
        },
    },
}


def checkpoint(folder: Path, kind: str) -> Path:
    """Returns the folder of a checkpoint in the shape of `folder`'s config.json, which is written there once."""
    made = folder / kind
    if made.exists():
        return made
    torch.manual_seed(0)
    config = json.loads((folder / "config.json").read_text())
    hidden, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    tensors = {"model.embed_tokens.weight": torch.randn(config["vocab_size"], hidden).mul_(0.02).bfloat16()}
    tensors["model.norm.weight"] = torch.ones(hidden).bfloat16()
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    layers = {
        "self_attn.q_proj": (heads * size, hidden),
        "self_attn.k_proj": (kv_heads * size, hidden),
        "self_attn.v_proj": (kv_heads * size, hidden),
        "self_attn.o_proj": (hidden, heads * size),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    norms |= {"self_attn.q_norm": size, "self_attn.k_norm": size}
    for number in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{number}"
        tensors |= {f"{prefix}.{name}.weight": torch.ones(width).bfloat16() for name, width in norms.items()}
        for name, (rows, inputs) in layers.items():
            tensors |= {f"{prefix}.{name}.{each}": tensor for each, tensor in _MAKERS[kind](rows, inputs).items()}
    made.mkdir()
    save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
    (made / "config.json").write_text(json.dumps(config | {"quantization_config": CONFIGS[kind]}))
    return made


def _gptq(rows: int, inputs: int) -> dict[str, torch.Tensor]:
    def words(*shape: int) -> torch.Tensor:
        return torch.randint(-(2**31), 2**31, shape).int()

    assert inputs % GROUP == 0, f"a layer of {inputs} inputs has no groups of {GROUP}: use another shape"
    groups = inputs // GROUP
    return {
        "qweight": words(inputs // 8, rows),
        # The integer 8 stands for zero, and zeros are stored less one.
        "qzeros": torch.full((groups, rows // 8), 0x77777777, dtype=torch.int32),
        "scales": torch.rand(groups, rows).mul_(0.02 / 8).half(),
        "g_idx": torch.arange(inputs, dtype=torch.int32) // GROUP,
    }


def _w8a8(rows: int, inputs: int) -> dict[str, torch.Tensor]:
    return {
        "weight": torch.randint(-127, 128, (rows, inputs), dtype=torch.int8),
        "weight_scale": torch.rand(rows, 1).mul_(0.02 / 64).bfloat16(),
    }


_MAKERS = {"gptq": _gptq, "w8a8": _w8a8}
