"""Writes checkpoints in formats of quantized safetensors: random ones of a Qwen3 shape, or a model's weights rounded.

The integers are the nearest to the weights, without calibration.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.quantized_formats import Format, Tensors, awq, float8, gptq, int8, packed

GROUP, SMALL_GROUP = 128, 32
BLOCK = 128  # rows, and as many inputs, that share a scale

_INPUTS = {"num_bits": 8, "strategy": "token", "symmetric": True, "dynamic": True}


def _blocks(layer: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """As the official FP8 checkpoints of DeepSeek-V3 and Qwen3; rows and inputs must be multiples of a block."""
    blocks = weight.float().unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scales = blocks.abs().amax((1, 3)) / 448
    whole = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    tensors, values = float8(layer, weight, whole)
    return {f"{layer}.weight": tensors[f"{layer}.weight"], f"{layer}.weight_scale_inv": scales}, values


def _by_rows(layer: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    return float8(layer, weight, weight.float().abs().amax(1, keepdim=True) / 448)


def _compressed(layout: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    """The `quantization_config` of compressed-tensors, with the fields that its own reader needs."""
    group = {"targets": ["Linear"], "weights": {"dynamic": False, **weights}, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def _grouped(group: int, is_symmetric: bool) -> dict[str, Any]:
    return {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group, "symmetric": is_symmetric}


def _rows(kind: str) -> dict[str, Any]:
    return {"num_bits": 8, "type": kind, "strategy": "channel", "symmetric": True}


_INTEGERS: dict[str, Any] = {"bits": 4, "group_size": GROUP}
KINDS: dict[str, Format] = {
    "int4": (
        _compressed("pack-quantized", _grouped(GROUP, True)),
        lambda layer, weight: packed(layer, weight, 4, GROUP, True),
    ),
    "int4_zeros": (
        _compressed("pack-quantized", _grouped(SMALL_GROUP, False)),
        lambda layer, weight: packed(layer, weight, 4, SMALL_GROUP, False),
    ),
    "gptq": (
        {"quant_method": "gptq", **_INTEGERS, "desc_act": False, "sym": True},
        lambda layer, weight: gptq(layer, weight, 4, GROUP, True),
    ),
    "awq": (
        {"quant_method": "awq", **_INTEGERS, "version": "gemm", "zero_point": True},
        lambda layer, weight: awq(layer, weight, GROUP),
    ),
    "fp8_blocks": (
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]},
        _blocks,
    ),
    "fp8_rows": (_compressed("float-quantized", _rows("float")), _by_rows),
    "fp8_dynamic": (_compressed("float-quantized", _rows("float"), {**_INPUTS, "type": "float"}), _by_rows),
    "w8a8": (_compressed("int-quantized", _rows("int"), {**_INPUTS, "type": "int"}), int8),
}
"""Kind -> its `quantization_config`, and what writes a layer's weight."""


def checkpoint(folder: Path, kind: str) -> Path:
    """Returns the folder of a random checkpoint in the shape of `folder`'s config.json, which is written there once."""
    made = folder / kind
    if made.exists():
        return made
    torch.manual_seed(0)
    config = json.loads((folder / "config.json").read_text())
    hidden, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    assert hidden % GROUP == inner % GROUP == 0, f"layers of {hidden} and {inner} inputs have no groups of {GROUP}"

    def random(rows: int, inputs: int) -> torch.Tensor:
        return torch.randn(rows, inputs).mul_(0.02).bfloat16()

    tensors = {"model.embed_tokens.weight": random(config["vocab_size"], hidden)}
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
        tensors |= {f"{prefix}.{name}.weight": random(*shape) for name, shape in layers.items()}
    return _write(tensors, config, made, kind)


def rounded(model: Path, made: Path, kind: str) -> Path:
    """Writes a model of one file with the projections of its layers in a format, without a module that drafts."""
    tensors = {name: tensor for name, tensor in load_file(model / "model.safetensors").items() if "mtp." not in name}
    config = json.loads((model / "config.json").read_text())
    config.pop("num_nextn_predict_layers", None)
    return _write(tensors, config, made, kind)


def _write(tensors: Tensors, config: dict[str, Any], made: Path, kind: str) -> Path:
    quantization, write = KINDS[kind]
    stored: Tensors = {}
    for name, tensor in tensors.items():
        layer = name.removesuffix(".weight")
        stored |= write(layer, tensor)[0] if re.search(r"\.layers\..*_proj$", layer) else {name: tensor}
    made.mkdir(parents=True)
    save_file(stored, made / "model.safetensors", metadata={"format": "pt"})
    (made / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return made
