"""What llama.cpp's converter does with the tensors and fields of hybrids and of Gemma 4 (`gguf_files`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gguf
import torch

# Named tensors for one of a checkpoint, and how their values become its again.
Conversion = tuple[list[tuple[str, torch.Tensor]], Callable[[list[torch.Tensor]], torch.Tensor]]

# Small tensors with several dimensions that are never quantized.
NUMBERS = ("ffn_gate_inp", "ssm_conv1d", "shortconv.conv", "ssm_a", "ssm_d", "ssm_norm")
QWEN = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
MAMBA = ("granitemoehybrid", "nemotron_h")


def convert_hybrid(config: dict[str, Any], name: str, weight: torch.Tensor) -> Conversion | None:
    """Returns None for a tensor that is stored as it is."""
    model_type = config["model_type"]
    if model_type == "gemma4_text":
        return _convert_gemma4(name, weight)
    if "conv1d.weight" in name or "conv.conv.weight" in name:
        taps = _tiled(config, name, weight.squeeze(1))
        return [(name, taps)], lambda found: _grouped(config, name, found[0]).unsqueeze(1)
    if name.endswith("A_log"):
        rates = _tiled(config, name, -weight.exp())
        if model_type in MAMBA:
            rates = rates.view(-1, 1)
        return [(name, rates)], lambda found: _grouped(config, name, (-found[0].flatten()).log())
    if name.endswith("dt_bias"):
        values = _tiled(config, name, weight)
        new_name = name.replace("dt_bias", "dt_proj.bias")
        return [(new_name, values)], lambda found: _grouped(config, name, found[0])
    if model_type in QWEN:
        return _convert_qwen(config, name, weight)
    if model_type in MAMBA:
        return _convert_mamba(config, name, weight)
    if name.endswith("expert_bias"):
        return [(f"{name}.bias", weight)], lambda found: found[0]
    if ".experts." in name:
        return [(name.removeprefix("model."), weight)], lambda found: found[0]
    return None


def _convert_qwen(config: dict[str, Any], name: str, weight: torch.Tensor) -> Conversion | None:
    if name.endswith("norm.weight") and "linear_attn" not in name:
        return [(name, weight + 1)], lambda found: found[0] - 1
    if "in_proj_qkvz" in name:
        return _divide_qkvz(config, name, weight)
    if ".linear_attn." in name:
        return [(name, _tiled(config, name, weight))], lambda found: _grouped(config, name, found[0])
    return None


def _divide_qkvz(config: dict[str, Any], name: str, weight: torch.Tensor) -> Conversion:
    keys, heads = config["linear_key_head_dim"], config["linear_num_key_heads"]
    values = config["linear_num_value_heads"] // heads * config["linear_value_head_dim"]
    sizes = [keys, keys, values, values]
    parts = [part.flatten(0, 1) for part in weight.unflatten(0, (heads, -1)).split(sizes, 1)]

    def restore(found: list[torch.Tensor]) -> torch.Tensor:
        split = [*found[0].split([keys * heads, keys * heads, values * heads]), found[1]]
        return torch.cat([part.unflatten(0, (heads, -1)) for part in split], 1).flatten(0, 1)

    qkv = name.replace("in_proj_qkvz", "in_proj_qkv")
    return [(qkv, torch.cat(parts[:3])), (name.replace("in_proj_qkvz", "in_proj_z"), parts[3])], restore


def _convert_mamba(config: dict[str, Any], name: str, weight: torch.Tensor) -> Conversion | None:
    if name.endswith(("mixer.D", "mamba.D")):
        return [(name, weight.view(-1, 1))], lambda found: found[0].flatten()
    if name.endswith(("mixer.norm.weight", "mamba.norm.weight")):
        groups = config.get("mamba_n_groups") or config["n_groups"]
        return [(name, weight.view(groups, -1))], lambda found: found[0].flatten()
    for old, new in (
        ("e_score_correction_bias", "e_score_correction.bias"),
        ("backbone", "model") if ".experts." in name else ("", ""),
    ):
        if old and old in name:
            new_name = name.replace(old, new).replace("mixer.experts", "mlp.experts")
            return [(new_name, weight)], lambda found: found[0]
    if name.endswith("input_linear.weight"):
        layer = name.split(".")[2]
        stored = "exps" if "block_sparse_moe" in name else "shexp" if config["num_local_experts"] else None
        suffix = f"_{stored}" if stored else ""
        axis = weight.ndim - 2
        named = [
            (f"blk.{layer}.ffn_{part}{suffix}.weight", half)
            for part, half in zip(("gate", "up"), weight.chunk(2, axis), strict=True)
        ]
        return named, lambda found: torch.cat(found, axis)
    if name.endswith("output_linear.weight"):
        stored = "_exps" if "block_sparse_moe" in name else "_shexp" if config["num_local_experts"] else ""
        return [(f"blk.{name.split('.')[2]}.ffn_down{stored}.weight", weight)], lambda found: found[0]
    return None


def _convert_gemma4(name: str, weight: torch.Tensor) -> Conversion | None:
    layer = name.split(".")[2]
    if name.endswith("router.scale"):
        return [(f"blk.{layer}.ffn_gate_inp.scale", weight)], lambda found: found[0]
    if name.endswith("per_expert_scale"):
        return [(f"blk.{layer}.ffn_down_exps.scale", weight)], lambda found: found[0]
    if name.endswith("layer_scalar") or ".experts." in name:
        return [(f"{name}.weight", weight)], lambda found: found[0]
    return None


# ---- The order of value heads ----


def _tiled(config: dict[str, Any], name: str, weight: torch.Tensor) -> torch.Tensor:
    return _of_values(config, name, weight, lambda heads: heads.transpose(0, 1))


def _grouped(config: dict[str, Any], name: str, weight: torch.Tensor) -> torch.Tensor:
    return _of_values(config, name, weight, lambda heads: heads.transpose(0, 1), is_stored=True)


def _of_values(
    config: dict[str, Any],
    name: str,
    weight: torch.Tensor,
    swap: Callable[[torch.Tensor], torch.Tensor],
    is_stored: bool = False,
) -> torch.Tensor:
    """Reorders the rows, or the inputs of `out_proj`, from those of each key head to the first of each, or back."""
    if config["model_type"] not in ("qwen3_5_text", "qwen3_5_moe_text") or "linear_attn" not in name:
        return weight
    if "linear_attn.norm" in name:
        return weight
    if "out_proj" in name:
        return _of_values(config, name.replace("out_proj", "in_proj_z"), weight.T, swap, is_stored).T.contiguous()
    keys = config["linear_num_key_heads"]
    values_of_key = config["linear_num_value_heads"] // keys
    first = 2 * keys * config["linear_key_head_dim"] if "qkv" in name or "conv1d" in name else 0
    shape = (values_of_key, keys, -1) if is_stored else (keys, values_of_key, -1)
    moved = swap(weight[first:].unflatten(0, shape)).flatten(0, 2)
    return torch.cat((weight[:first], moved))


# ---- Fields ----


def describe_hybrid(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    model_type = config["model_type"]
    if model_type in QWEN:
        heads = config["linear_num_value_heads"]
        inner = heads * config["linear_value_head_dim"]
        _describe_states(writer, config["linear_conv_kernel_dim"], config["linear_key_head_dim"], heads, inner)
        writer.add_ssm_group_count(config["linear_num_key_heads"])
        writer.add_full_attention_interval(1 + config["layer_types"].index("full_attention"))
        rotated = config["rope_parameters"]["partial_rotary_factor"]
        writer.add_rope_dimension_count(int(config["head_dim"] * rotated))
        if config.get("num_experts"):
            writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if model_type.startswith("lfm2"):
        _describe_attention(writer, config, config["layer_types"])
        writer.add_shortconv_l_cache(config["conv_L_cache"])
        if config.get("block_auto_adjust_ff_dim"):
            step = config["block_multiple_of"]
            writer.add_feed_forward_length(-(-int(2 * config["intermediate_size"] / 3) // step) * step)
        if model_type == "lfm2_moe":
            writer.add_leading_dense_block_count(config["num_dense_layers"])
            writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if model_type == "granitemoehybrid":
        heads = config["mamba_n_heads"]
        inner = heads * config["mamba_d_head"]
        _describe_states(writer, config["mamba_d_conv"], config["mamba_d_state"], heads, inner)
        writer.add_ssm_group_count(config["mamba_n_groups"])
        writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
        writer.add_rope_scaling_finetuned(False)
        _describe_attention(writer, config, config["layer_types"])
    if model_type == "nemotron_h":
        _describe_nemotron(writer, config)
    if model_type == "gemma4_text":
        _describe_gemma4(writer, config)


def _describe_states(writer: gguf.GGUFWriter, taps: int, keys: int, heads: int, inner: int) -> None:
    writer.add_ssm_conv_kernel(taps)
    writer.add_ssm_state_size(keys)
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(inner)


def _describe_attention(writer: gguf.GGUFWriter, config: dict[str, Any], kinds: Sequence[str]) -> None:
    heads = config["num_key_value_heads"]
    writer.add_head_count_kv([heads if kind == "full_attention" else 0 for kind in kinds])


def _describe_nemotron(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    kinds, heads = config["layers_block_type"], config["mamba_num_heads"]
    _describe_states(writer, config["conv_kernel"], config["ssm_state_size"], heads, heads * config["mamba_head_dim"])
    writer.add_ssm_group_count(config["n_groups"])
    _describe_attention(writer, config, kinds)
    has_experts = "moe" in kinds
    size = config["moe_intermediate_size"] if has_experts else config["intermediate_size"]
    writer.add_feed_forward_length([size if kind in ("moe", "mlp") else 0 for kind in kinds])
    if has_experts:
        writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])


def _describe_gemma4(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    kinds, count = config["layer_types"], config["num_hidden_layers"]
    full = config["per_layer_config"][str(kinds.index("full_attention"))]
    shared, inner = config["num_kv_shared_layers"], config["intermediate_size"]
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in kinds])
    writer.add_key_length(full["head_dim"])
    writer.add_value_length(full["head_dim"])
    writer.add_key_length_swa(config["head_dim"])
    writer.add_value_length_swa(config["head_dim"])
    if config["use_double_wide_mlp"]:
        writer.add_feed_forward_length([inner if layer < count - shared else 2 * inner for layer in range(count)])
    if "num_key_value_heads" in full:
        heads = {"full_attention": full["num_key_value_heads"], "sliding_attention": config["num_key_value_heads"]}
        writer.add_head_count_kv([heads[kind] for kind in kinds])
    writer.add_rope_freq_base_swa(config["rope_parameters"]["sliding_attention"]["rope_theta"])
    writer.add_rope_dimension_count(full["head_dim"])
    if config["num_experts"]:
        writer.add_expert_used_count(config["top_k_experts"])


def rotary_divisors(config: dict[str, Any]) -> torch.Tensor | None:
    """Returns those of Gemma 4's layers without a window: a huge one for a frequency that is not rotated."""
    if config["model_type"] != "gemma4_text":
        return None
    full = config["per_layer_config"][str(config["layer_types"].index("full_attention"))]["head_dim"]
    rotated = int(full * config["rope_parameters"]["full_attention"]["partial_rotary_factor"] / 2)
    return torch.tensor([1.0] * rotated + [1e30] * (full // 2 - rotated))
