"""Writes GGUF files with llama.cpp's own library: names, quantization and layout are its. What its converter does with
a family's tensors and fields is repeated here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

from tests.gguf_hybrids import MAMBA, NUMBERS, QWEN, Conversion, convert_hybrid, describe_hybrid, rotary_divisors

# Penstock's model type -> llama.cpp's architecture.
ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "granite": gguf.MODEL_ARCH.GRANITE,
    "smollm3": gguf.MODEL_ARCH.SMOLLM3,
    "olmo2": gguf.MODEL_ARCH.OLMO2,
    "olmo3": gguf.MODEL_ARCH.OLMO2,
    "exaone4": gguf.MODEL_ARCH.EXAONE4,
    "cohere2": gguf.MODEL_ARCH.COHERE2,
    "ministral3": gguf.MODEL_ARCH.MISTRAL3,
    "glm4": gguf.MODEL_ARCH.GLM4,
    "gpt_oss": gguf.MODEL_ARCH.GPT_OSS,
    "deepseek_v2": gguf.MODEL_ARCH.DEEPSEEK2,
    "deepseek_v3": gguf.MODEL_ARCH.DEEPSEEK2,
    "glm4_moe_lite": gguf.MODEL_ARCH.DEEPSEEK2,
    "youtu": gguf.MODEL_ARCH.DEEPSEEK2,
    "gemma4_text": gguf.MODEL_ARCH.GEMMA4,
    "granitemoehybrid": gguf.MODEL_ARCH.GRANITE_HYBRID,
    "lfm2": gguf.MODEL_ARCH.LFM2,
    "lfm2_moe": gguf.MODEL_ARCH.LFM2MOE,
    "nemotron_h": gguf.MODEL_ARCH.NEMOTRON_H,
    "qwen3_5_text": gguf.MODEL_ARCH.QWEN35,
    "qwen3_5_moe_text": gguf.MODEL_ARCH.QWEN35MOE,
    "qwen3_next": gguf.MODEL_ARCH.QWEN3NEXT,
}
_IN_PAIRS = ("llama", "mixtral", "granite", "smollm3", "ministral3", "granitemoehybrid", "nemotron_h")
_PROJECTIONS = ("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias")
# Without a size of a head in the file, which is then that of the hidden state by the number of heads.
_WITHOUT_HEAD_SIZE = ("phi3", "granite")
Tensors = dict[str, torch.Tensor]
Kind = gguf.GGMLQuantizationType
_OTHER_HYBRIDS = ("lfm2", "lfm2_moe", "gemma4_text")


def write_gguf(
    path: Path,
    file: Path,
    kind: Kind,
    others: dict[str, Kind] | None = None,
    divisors: torch.Tensor | None = None,
    num_parts: int = 1,
) -> Tensors:
    """Writes a checkpoint folder's model as GGUF and returns the values of its tensors, under the checkpoint's names.

    Matrices are of one kind, but for those of `others`, by the end of their name in the checkpoint. `divisors` are
    those of the rotary frequencies, [head_dim / 2]. With several parts `file` is the first one's name.
    """
    config = json.loads((path / "config.json").read_text())
    tensors = load_file(path / "model.safetensors")
    architecture = ARCHITECTURES[config["model_type"]]
    kinds_of_layers = config.get("layers_block_type", ())
    config.setdefault("num_hidden_layers", len(kinds_of_layers))
    if "moe" in kinds_of_layers:
        architecture = gguf.MODEL_ARCH.NEMOTRON_H_MOE
    divisors = rotary_divisors(config) if divisors is None else divisors
    kinds = others or {}
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    values: Tensors = {}
    stored: list[tuple[str, np.ndarray, Kind]] = []
    if divisors is not None:
        stored.append(("rope_freqs.weight", divisors.float().numpy(), Kind.F32))
    rope = _rope(config)
    for length in ("long", "short") if "long_factor" in rope else ():
        factors = np.array(rope[f"{length}_factor"], np.float32)
        stored.append((f"rope_factors_{length}.weight", factors, Kind.F32))
    for name, weight in _joined_experts(tensors).items():
        converted, restore = _convert(config, name, weight.float())
        found: list[torch.Tensor] = []
        for new_name, part in converted:
            is_named = new_name.startswith("blk.")
            of_file = new_name if is_named else names.get_name(new_name, (".weight", ".bias"))
            assert of_file is not None, new_name
            is_matrix = part.ndim > 1 and not any(each in of_file for each in NUMBERS) and not of_file.endswith("bias")
            chosen = kind if is_matrix else Kind.F32
            chosen = next((each for end, each in kinds.items() if new_name.endswith(end)), chosen)
            data = _quantize(part.contiguous().numpy(), chosen)
            stored.append((of_file, data, chosen))
            found.append(torch.from_numpy(gguf.dequantize(data, chosen).astype(np.float32)).reshape(part.shape))
        # The logarithm of an exponential is not the number itself.
        values[name] = restore(found) if name.endswith("A_log") else restore(found).bfloat16()
    for number in range(num_parts):
        writer = gguf.GGUFWriter(_part(file, number, num_parts), gguf.MODEL_ARCH_NAMES[architecture])
        if number == 0:
            _describe(writer, config)
        if num_parts > 1:
            writer.add_uint16("split.no", number)
            writer.add_uint16("split.count", num_parts)
            writer.add_int32("split.tensors.count", len(stored))
        for name, data, chosen in stored[number::num_parts]:
            writer.add_tensor(name, data, raw_dtype=chosen)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return _single_experts(values)


# Types that the library only reads -> where the float16 factors of a block are.
_FACTORS = {Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,)}


def _quantize(values: np.ndarray, kind: Kind) -> np.ndarray:
    """Of types that the library only reads it returns random blocks, with values of the size of the given ones."""
    if kind not in _FACTORS:
        return gguf.quantize(values, kind)
    in_block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(values.size)
    blocks = rng.integers(0, 256, (values.size // in_block, num_bytes), np.uint8)
    for at in _FACTORS[kind]:
        factors = rng.uniform(0.5, 1, len(blocks)) * values.std() / 1000
        blocks[:, at : at + 2] = factors.astype(np.float16).view(np.uint8).reshape(-1, 2)
    return blocks.reshape(*values.shape[:-1], -1)


def _part(file: Path, number: int, num_parts: int) -> Path:
    first = f"-00001-of-{num_parts:05}.gguf"
    return (
        file if num_parts == 1 else file.with_name(file.name.replace(first, f"-{number + 1:05}-of-{num_parts:05}.gguf"))
    )


# ---- Tensors ----


def _convert(config: dict[str, Any], name: str, weight: torch.Tensor) -> Conversion:
    model_type = config["model_type"]
    hybrid = convert_hybrid(config, name, weight) if model_type in (*QWEN, *MAMBA, *_OTHER_HYBRIDS) else None
    if hybrid is not None:
        return hybrid
    if model_type in _IN_PAIRS and name.endswith(_PROJECTIONS):
        size = config["hidden_size"] // config["num_attention_heads"]
        size = size if model_type == "granite" else config.get("head_dim") or size
        return [(name, _in_pairs(weight, size))], lambda found: _from_pairs(found[0], size)
    if model_type in ("gemma2", "gemma3_text") and name.endswith("norm.weight"):
        return [(name, weight + 1)], lambda found: found[0] - 1
    if name.endswith("kv_b_proj.weight"):
        plain, value = config["qk_nope_head_dim"], config["v_head_dim"]
        keys, values = weight.unflatten(0, (-1, plain + value)).split([plain, value], 1)
        return [
            (name.replace("kv_b", "k_b"), keys.transpose(1, 2)),
            (name.replace("kv_b", "v_b"), values),
        ], _join_latent
    if model_type == "gpt_oss" and ".experts." in name:
        return _convert_interleaved(name, weight)
    for old, new in (
        ("e_score_correction_bias", "e_score_correction.bias"),
        ("self_attn.sinks", "self_attn.sinks.weight"),
        ("block_sparse_moe.experts", "feed_forward.experts"),
    ):
        if old in name:
            new_name = name.replace(old, new)
            return [(new_name.removeprefix("model.") if "experts" in old else new_name, weight)], lambda found: found[0]
    return [(name, weight)], lambda found: found[0]


def _convert_interleaved(name: str, weight: torch.Tensor) -> Conversion:
    """Tensors of all experts, [experts, inputs, outputs] and biases [experts, outputs]."""
    is_bias = name.endswith("_bias")
    kind = ".bias" if is_bias else ".weight"
    name = name.removesuffix("_bias")
    turned = weight if is_bias else weight.transpose(1, 2)
    if "gate_up_proj" not in name:
        return [(name + kind, turned)], lambda found: found[0] if is_bias else found[0].transpose(1, 2)

    def restore(found: list[torch.Tensor]) -> torch.Tensor:
        whole = torch.stack(found, 2).flatten(1, 2)
        return whole if is_bias else whole.transpose(1, 2)

    parts = (turned[:, 0::2], turned[:, 1::2])
    named = [(name.replace("gate_up", part) + kind, each) for part, each in zip(("gate", "up"), parts, strict=True)]
    return named, restore


def _join_latent(found: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat((found[0].transpose(1, 2), found[1]), 1).flatten(0, 1)


def _in_pairs(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    return weight.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2).contiguous()


def _from_pairs(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    return weight.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2).contiguous()


def _joined_experts(tensors: Tensors) -> Tensors:
    """Experts that are stored one by one become one tensor."""
    joined: Tensors = {}
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        before, found, after = name.partition(".experts.")
        number, _, rest = after.partition(".")
        if found and number.isdigit():
            experts.setdefault(f"{before}.experts.{rest}", {})[int(number)] = tensor
        else:
            joined[name] = tensor
    return joined | {name: torch.stack([parts[i] for i in sorted(parts)]) for name, parts in experts.items()}


def _single_experts(values: Tensors) -> Tensors:
    single: Tensors = {}
    for name, tensor in values.items():
        before, found, rest = name.partition(".experts.")
        if found and rest.endswith(".weight"):
            single.update({f"{before}.experts.{number}.{rest}": each for number, each in enumerate(tensor)})
        else:
            single[name] = tensor
    return single


# ---- Fields ----


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    rope = config.get("rope_parameters") or {}
    return rope.get("full_attention") or rope


def _describe(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    model_type, has_latents = config["model_type"], config.get("kv_lora_rank") is not None
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(1 if has_latents else config["num_key_value_heads"])
    if config.get("head_dim") and not has_latents and model_type not in _WITHOUT_HEAD_SIZE:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if model_type == "cohere2":
        writer.add_layer_norm_eps(config["layer_norm_eps"])
    else:
        eps = ("rms_norm_eps", "norm_eps", "layer_norm_epsilon")
        writer.add_layer_norm_rms_eps(next(config[name] for name in eps if name in config))
    _describe_rope(writer, config)
    _describe_experts(writer, config)
    if has_latents:
        _describe_latents(writer, config)
    if config.get("sliding_window") or model_type == "phi3":
        writer.add_sliding_window(config.get("sliding_window") or 0)
    if model_type in ("olmo3", "exaone4") and config.get("sliding_window"):
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    for field, add in (
        ("attention_multiplier", writer.add_attention_scale),
        ("embedding_multiplier", writer.add_embedding_scale),
        ("residual_multiplier", writer.add_residual_scale),
        ("logits_scaling", writer.add_logit_scale),
        ("logit_scale", writer.add_logit_scale),
        ("attn_logit_softcapping", writer.add_attn_logit_softcapping),
        ("final_logit_softcapping", writer.add_final_logit_softcapping),
    ):
        if config.get(field):
            add(config[field])
    describe_hybrid(writer, config)


def _describe_rope(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    model_type, rope = config["model_type"], _rope(config)
    if model_type != "gemma2":
        writer.add_rope_freq_base(rope.get("rope_theta") or config.get("rope_theta", 10000.0))
    size = config["hidden_size"] // config["num_attention_heads"]
    if model_type in ("phi3", "glm4"):
        size = size if model_type == "phi3" else config["head_dim"]
        writer.add_rope_dimension_count(int(size * rope.get("partial_rotary_factor", 1.0)))
    if model_type == "phi3" and "long_factor" in rope:
        original = rope["original_max_position_embeddings"]
        scale = config["max_position_embeddings"] / original
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors((1 + np.log(scale) / np.log(original)) ** 0.5 if scale > 1 else 1.0)
    if rope.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "beta_fast" in rope:
            writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        if "mscale_all_dim" in rope:
            writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"] * (1.0 if model_type == "ministral3" else 0.1))
        if "llama_4_scaling_beta" in rope:
            writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])


def _describe_experts(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    num_experts = next((config[name] for name in names if config.get(name)), 0)
    if not num_experts or "moe" not in config.get("layers_block_type", ["moe"]):
        return
    model_type = config["model_type"]
    writer.add_expert_count(num_experts)
    writer.add_expert_used_count(config.get("num_experts_per_tok") or config["top_k_experts"])
    if model_type != "mixtral":
        writer.add_expert_feed_forward_length(config.get("moe_intermediate_size") or config["intermediate_size"])
    if config.get("n_group"):
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
    if model_type.startswith("deepseek"):
        kinds = gguf.ExpertGatingFuncType
        writer.add_expert_gating_func(kinds.SIGMOID if model_type == "deepseek_v3" else kinds.SOFTMAX)


def _describe_latents(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    rank, rotary = config["kv_lora_rank"], config["qk_rope_head_dim"]
    writer.add_leading_dense_block_count(config.get("first_k_dense_replace", config["num_hidden_layers"]))
    if config.get("q_lora_rank"):
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(rank)
    writer.add_key_length(rank + rotary)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rotary)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_expert_shared_count(config.get("n_shared_experts", 0))
    writer.add_rope_dimension_count(rotary)
    if config.get("routed_scaling_factor"):
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
    if config.get("norm_topk_prob"):
        writer.add_expert_weights_norm(True)
