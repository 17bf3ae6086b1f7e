"""Small random checkpoints of every supported architecture, in odd shapes, made by transformers itself."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import decoders, pre_tokenizers, processors
from transformers.modeling_layers import MtpModel

COMMON: dict[str, Any] = {
    "vocab_size": 301,
    "hidden_size": 96,
    "intermediate_size": 176,
    "num_hidden_layers": 3,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LATENT = {
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "q_lora_rank": 48,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}
SHARED_EXPERTS = {
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 56,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.8,
}

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0 + i / 20 for i in range(12)],
    "long_factor": [1.5 + i / 2 for i in range(12)],
    "original_max_position_embeddings": 64,
}
GQA = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}

DELTA = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
}
CONV = {
    "layer_types": ["conv", "full_attention", "conv"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
GRANITE4 = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_local_experts": 0,
    "shared_intermediate_size": 136,
    "mamba_n_heads": 6,
    # Of three ranks one has heads of both.
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.1,
    "logits_scaling": 3.0,
    "tie_word_embeddings": True,
}
NEMOTRON = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
    "num_hidden_layers": 5,
    # More features than the hidden state's, and groups that three ranks cannot divide.
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 16,
    # transformers limits the time step from below in whole prompts, but not while it generates.
    "time_step_min": 1e-9,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 2,
    "moe_intermediate_size": 56,
    "moe_shared_expert_intermediate_size": 72,
    "routed_scaling_factor": 2.5,
}
DELTA_EXPERTS = {
    "num_experts": 10,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 56,
}

GEMMA4 = {**GQA, "global_head_dim": 64, "sliding_window": 24, "tie_word_embeddings": True}

# name -> (model_type, fields that differ from COMMON)
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2-mha-80": ("llama", {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 80}),
    "llama2-linear-rope": (
        "llama",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        },
    ),
    "llama3-gqa4-tied": (
        "llama",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 64,
            "tie_word_embeddings": True,
            "rope_parameters": LLAMA3_ROPE,
        },
    ),
    "llama-biases": (
        "llama",
        {
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "mistral-window": (
        "mistral",
        {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128, "sliding_window": 21},
    ),
    "mistral-full": (
        "mistral",
        {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64, "sliding_window": None},
    ),
    "qwen2-tied": ("qwen2", {"num_attention_heads": 6, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen2-hybrid-window": (
        "qwen2",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "hidden_size": 256,
            "use_sliding_window": True,
            "sliding_window": 19,
            "max_window_layers": 1,
        },
    ),
    "qwen3-128": ("qwen3", {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128}),
    "qwen3-gqa3-yarn": (
        "qwen3",
        {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64, "rope_parameters": YARN_ROPE},
    ),
    "youtu-latent": ("youtu", {**LATENT, "tie_word_embeddings": True, "attention_bias": True}),
    "youtu-whole-queries-yarn": (
        "youtu",
        {
            **LATENT,
            "q_lora_rank": None,
            "kv_lora_rank": 64,
            "rope_interleave": False,
            "rope_parameters": {**YARN_ROPE, "mscale": 0.7, "mscale_all_dim": 0.9},
        },
    ),
    # Contexts of its tests are longer than the original one: the long factors.
    "phi3-longrope": ("phi3", {"num_attention_heads": 3, "num_key_value_heads": 3, "rope_parameters": LONGROPE}),
    # Its window ends before the context, and both rotated and other dimensions are in a head.
    "phi3-partial": ("phi3", {**GQA, "sliding_window": 23, "rope_parameters": {"partial_rotary_factor": 0.5}}),
    "glm4": ("glm4", {**GQA, "attention_bias": True, "rope_parameters": {"partial_rotary_factor": 0.5}}),
    "granite": (
        "granite",
        {
            **GQA,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.1,
            "logits_scaling": 3.0,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "granite4": ("granitemoehybrid", {**GQA, **GRANITE4}),
    "granite4-moe": (
        "granitemoehybrid",
        {**GQA, **GRANITE4, "num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 72},
    ),
    "granite4-rotated": (
        "granitemoehybrid",
        {**GQA, **GRANITE4, "mamba_n_groups": 1, "mamba_conv_bias": False, "position_embedding_type": "rope"},
    ),
    "nemotron-h": ("nemotron_h", {**GQA, **NEMOTRON}),
    # Its second layer has no rotation.
    "smollm3": ("smollm3", {**GQA, "no_rope_layers": [1, 0, 1], "tie_word_embeddings": True}),
    "smollm3-window": (
        "smollm3",
        {**GQA, "no_rope_layer_interval": 3, "use_sliding_window": True, "sliding_window": 21},
    ),
    # Hybrids: a stage of two may have no attention.
    "lfm2": ("lfm2", {**GQA, **CONV, "block_multiple_of": 16, "tie_word_embeddings": True}),
    # Its first layer is dense.
    "lfm2-moe": (
        "lfm2_moe",
        {
            **GQA,
            **CONV,
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "num_dense_layers": 1,
            "routed_scaling_factor": 1.5,
            "tie_word_embeddings": False,
        },
    ),
    "qwen3.5": ("qwen3_5_text", {**GQA, **DELTA, "tie_word_embeddings": True}),
    "qwen3.5-moe": ("qwen3_5_moe_text", {**GQA, **DELTA, **DELTA_EXPERTS}),
    "qwen3-next": ("qwen3_next", {**GQA, **DELTA, **DELTA_EXPERTS, "mlp_only_layers": [1]}),
    "olmo2": ("olmo2", {**GQA, "num_attention_heads": 6}),
    "olmo3": (
        "olmo3",
        {
            **GQA,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": YARN_ROPE,
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "exaone4": (
        "exaone4",
        {**GQA, "sliding_window": 18, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
    ),
    "exaone4-full": ("exaone4", {**GQA, "sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "ministral3": (
        "ministral3",
        {
            **GQA,
            "rope_parameters": {
                **YARN_ROPE,
                "original_max_position_embeddings": 32,
                "llama_4_scaling_beta": 0.4,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
    ),
    "cohere2": (
        "cohere2",
        {
            **GQA,
            "hidden_size": 128,
            "logit_scale": 0.3,
            "sliding_window": 22,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "tie_word_embeddings": True,
        },
    ),
    "gemma2": (
        "gemma2",
        {
            **GQA,
            "query_pre_attn_scalar": 40,
            "sliding_window": 25,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 4.0,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            **GQA,
            "query_pre_attn_scalar": 40,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
            "final_logit_softcapping": 4.0,
        },
    ),
    # Layers without a window have other heads, and their values are their keys.
    "gemma4": (
        "gemma4_text",
        {
            **GEMMA4,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": 4.0,
        },
    ),
    # The last four layers read the keys and values of the third and fourth.
    "gemma4-shared": (
        "gemma4_text",
        {
            **GEMMA4,
            "num_hidden_layers": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 4,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 24,
            "vocab_size_per_layer_input": COMMON["vocab_size"],
        },
    ),
    # The sizes of heads of all published models.
    "gemma4-512": (
        "gemma4_text",
        {
            **GEMMA4,
            "head_dim": 256,
            "global_head_dim": 512,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "num_kv_shared_layers": 1,
            "hidden_size_per_layer_input": 24,
            "vocab_size_per_layer_input": COMMON["vocab_size"],
        },
    ),
    "gemma4-moe": (
        "gemma4_text",
        {
            **GEMMA4,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 2,
            "attention_bias": True,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 7,
            "top_k_experts": 3,
            "moe_intermediate_size": 40,
        },
    ),
    "gemma4-unified": (
        "gemma4_unified_text",
        {**GEMMA4, "layer_types": ["sliding_attention"] * 2 + ["full_attention"], "num_global_key_value_heads": 1},
    ),
    # Its second layer is dense.
    "qwen3-moe": (
        "qwen3_moe",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "num_experts": 9,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 72,
            "mlp_only_layers": [1],
            "norm_topk_prob": True,
        },
    ),
    "qwen3-moe-not-normalised": (
        "qwen3_moe",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 96,
            "decoder_sparse_step": 2,
            "norm_topk_prob": False,
        },
    ),
    "mixtral": (
        "mixtral",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": None,
        },
    ),
    "gpt-oss": (
        "gpt_oss",
        {
            **GQA,
            "num_attention_heads": 6,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "intermediate_size": 160,
            "sliding_window": 26,
            "rope_parameters": {**YARN_ROPE, "truncate": False},
        },
    ),
    # Groups of experts; the first layer is dense.
    "deepseek-v2": (
        "deepseek_v2",
        {
            **LATENT,
            **SHARED_EXPERTS,
            "num_attention_heads": 6,
            "num_key_value_heads": 6,
            "q_lora_rank": None,
            "topk_method": "group_limited_greedy",
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
        },
    ),
    "deepseek-v3": (
        "deepseek_v3",
        {
            **LATENT,
            **SHARED_EXPERTS,
            "n_routed_experts": 12,
            "n_group": 3,
            "topk_group": 2,
            "rope_parameters": {**YARN_ROPE, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "glm-flash": (
        "glm4_moe_lite",
        {
            **LATENT,
            **SHARED_EXPERTS,
            "n_routed_experts": 10,
            "n_group": 1,
            "topk_group": 1,
            "v_head_dim": 40,
            "num_mtp_layers": 1,
            "mtp_mlp_layer_types": ["sparse"],
        },
    ),
}


_VISION = {"hidden_size": 32, "intermediate_size": 48, "image_size": 28, "patch_size": 14}
_QWEN_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 96}
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5]}
# name of a multimodal model -> (fields of its text part that differ from COMMON, fields of its vision part)
WRAPPERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        {**CHECKPOINTS["gemma3"][1], "model_type": "gemma3_text"},
        {**_VISION, "num_hidden_layers": 1, "num_attention_heads": 2},
    ),
    "gemma4": (
        {**CHECKPOINTS["gemma4-shared"][1], "model_type": "gemma4_text", "pad_token_id": 0},
        {**_VISION, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16},
    ),
    "gemma4_unified": (
        {**CHECKPOINTS["gemma4-unified"][1], "model_type": "gemma4_unified_text", "pad_token_id": 0},
        {"mm_embed_dim": 32, "mm_posemb_size": 16, "output_proj_dims": 32},
    ),
    "mistral3": (
        {**CHECKPOINTS["ministral3"][1], "model_type": "ministral3"},
        {**_VISION, "model_type": "pixtral", "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16},
    ),
    "qwen3_vl": (
        {**GQA, "model_type": "qwen3_vl_text", "rope_parameters": _MROPE},
        {**_QWEN_VISION, "deepstack_visual_indexes": [0]},
    ),
    "qwen3_5": ({**CHECKPOINTS["qwen3.5"][1], "model_type": "qwen3_5_text"}, _QWEN_VISION),
    "qwen2_5_vl": (
        {
            "model_type": "qwen2_5_vl_text",
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "rope_parameters": _MROPE,
        },
        {**_QWEN_VISION, "fullatt_block_indexes": [0]},
    ),
}


ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", {"num_attention_heads": 3, "max_position_embeddings": 240}),
    "roberta": (
        "roberta",
        {"num_attention_heads": 4, "max_position_embeddings": 242, "pad_token_id": 1, "type_vocab_size": 1},
    ),
    "xlm-roberta": (
        "xlm-roberta",
        {"num_attention_heads": 12, "max_position_embeddings": 243, "pad_token_id": 2, "type_vocab_size": 1},
    ),
    # The second and third layer have a window.
    "modernbert": ("modernbert", {"num_attention_heads": 6, "max_position_embeddings": 240, "local_attention": 38}),
}


def make_checkpoint(name: str, folder: Path, dtype: torch.dtype = torch.float32, **save: Any) -> Path:
    """Writes the checkpoint under `folder` and returns its path. `save` goes to `save_pretrained`."""
    return _make(name, folder / name, transformers.AutoModelForCausalLM, dtype, {}, save)


def make_wrapper_checkpoint(name: str, folder: Path, **fields: Any) -> Path:
    """Writes a multimodal checkpoint of `WRAPPERS` in float32, in the layout of transformers' own files. Both parts of
    its configuration have `fields` too."""
    text, vision = WRAPPERS[name]
    text = {**COMMON, **text, **fields}
    config = transformers.AutoConfig.for_model(name, text_config=text, vision_config=vision, **fields)
    return save_random(config, folder / name, transformers.AutoModelForImageTextToText, torch.float32)


def make_mtp_checkpoint(
    name: str, folder: Path, dtype: torch.dtype = torch.float32
) -> tuple[Path, transformers.PreTrainedModel, MtpModel]:
    """Writes the checkpoint with a module for multi-token prediction. Returns its path, the model and the module."""
    path = make_checkpoint(name, folder, dtype)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    torch.manual_seed(1)
    module = MtpModel(model, 1).to(dtype).eval()
    (layer,) = module.layers
    with torch.no_grad():
        for parameter_name, parameter in layer.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + ("norm" in parameter_name))
    names = {"mtp_block.": "", "post_norm.": "shared_head.norm."}
    stored = load_file(path / "model.safetensors")
    for tensor_name, tensor in layer.state_dict().items():
        for old, new in names.items():
            tensor_name = tensor_name.replace(old, new)
        stored[f"model.layers.{COMMON['num_hidden_layers']}.{tensor_name}"] = tensor.contiguous()
    save_file(stored, path / "model.safetensors", {"format": "pt"})
    return path, model, module


def make_qwen_mtp_checkpoint(name: str, folder: Path, dtype: torch.dtype = torch.float32, **config: Any) -> Path:
    """Writes the checkpoint with a module in Qwen3-Next's layout: a layer like the model's with attention, of other
    numbers. `config` extends `config.json`."""
    path = _make(name, folder / name, transformers.AutoModelForCausalLM, dtype, config, {})
    stored, hidden = load_file(path / "model.safetensors"), COMMON["hidden_size"]
    generator = torch.Generator().manual_seed(1)

    def numbers(*shape: int) -> torch.Tensor:
        return (0.2 * torch.randn(shape, generator=generator)).to(dtype)

    # The experts are those of a layer that has some: the layer with attention is dense in "qwen3-next".
    for prefix, has_experts in (("model.layers.1.", False), ("model.layers.2.", True)):
        for part, tensor in list(stored.items()):
            if part.startswith(prefix) and part.startswith(f"{prefix}mlp.") == has_experts:
                stored[f"mtp.layers.0.{part.removeprefix(prefix)}"] = numbers(*tensor.shape)
    stored["mtp.fc.weight"] = numbers(hidden, 2 * hidden)
    for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        stored[f"mtp.{norm}.weight"] = numbers(hidden)
    save_file(stored, path / "model.safetensors", {"format": "pt"})
    return path


def quantize_in_blocks(path: Path, folder: Path, block: tuple[int, int] = (32, 48)) -> tuple[Path, Path]:
    """Writes a checkpoint's linear layers as FP8 with scales of blocks, and a twin with the values they stand for."""
    stored = load_file(path / "model.safetensors")
    twin, quantized = folder / "twin", folder / "fp8"
    for other in (twin, quantized):
        shutil.copytree(path, other)
    values = dict(stored)
    for name, weight in list(stored.items()):
        if weight.ndim < 2 or "proj" not in name:
            continue
        rows, columns = weight.shape[-2:]
        counts = (-(-rows // block[0]), -(-columns // block[1]))
        scales = torch.rand(*weight.shape[:-2], *counts) * 0.01 + 0.001
        whole = scales.repeat_interleave(block[0], -2)[..., :rows, :].repeat_interleave(block[1], -1)[..., :columns]
        stored[name] = (weight.float() / whole).clamp(-448, 448).to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = scales
        values[name] = (stored[name].float() * whole).to(weight.dtype)
    save_file(values, twin / "model.safetensors", {"format": "pt"})
    save_file(stored, quantized / "model.safetensors", {"format": "pt"})
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": list(block)}
    (quantized / "config.json").write_text(json.dumps(config))
    return quantized, twin


def make_classifier_checkpoint(
    name: str, folder: Path, dtype: torch.dtype = torch.float32, num_labels: int = 3, **config: Any
) -> Path:
    """Writes it with a classifier instead of the output head; `config` has further fields of `config.json`."""
    path = folder / f"{name}-{num_labels}-{dtype}".replace("torch.", "")
    kind = transformers.AutoModelForSequenceClassification
    return _make(name, path, kind, dtype, {"num_labels": num_labels, **config}, {})


def make_encoder_checkpoint(
    name: str, folder: Path, dtype: torch.dtype = torch.float32, kind: Any = transformers.AutoModel, **config: Any
) -> Path:
    """Writes a checkpoint of one of `ENCODERS` for transformers' class `kind`; `config` extends `config.json`."""
    path = folder / f"{name}-{kind.__name__}-{dtype}-{len(list(folder.iterdir()))}".replace("torch.", "")
    return _make(name, path, kind, dtype, config, {})


def _make(name: str, path: Path, kind: Any, dtype: torch.dtype, fields: dict[str, Any], save: dict[str, Any]) -> Path:
    model_type, differences = {**CHECKPOINTS, **ENCODERS}[name]
    config = transformers.AutoConfig.for_model(model_type, **{**COMMON, **differences, **fields})
    return save_random(config, path, kind, dtype, save)


def save_random(config: Any, path: Path, kind: Any, dtype: torch.dtype, save: dict[str, Any] | None = None) -> Path:
    """Writes a random model of transformers' class `kind`; `save` goes to `save_pretrained`."""
    torch.manual_seed(0)
    model = kind.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            # Biases and norms start at their neutral values, where a mistake would not show.
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            assert parameter.isfinite().all(), parameter_name
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith(("e_score_correction_bias", "expert_bias", "layer_scalar")):
                buffer.add_(torch.randn_like(buffer) * 0.3)
    model.to(dtype).save_pretrained(path, **(save or {}))
    return path


def save_tokenizer(path: Path, words: tuple[str, ...] = ("yes", "no")) -> tokenizers.Tokenizer:
    """Writes a tokenizer with a token per byte and per word, a special one after a text and one between two texts."""
    alphabet = {byte: number for number, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([tokenizers.AddedToken(word, single_word=True, normalized=False) for word in words])
    tokenizer.add_special_tokens(["<end>", "<sep>"])
    specials = [(name, tokenizer.token_to_id(name)) for name in ("<end>", "<sep>")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <end>", pair="$A <sep> $B <end>", special_tokens=specials
    )
    tokenizer.save(str(path / "tokenizer.json"))
    return tokenizer


def make_pooling_checkpoint(
    name: str, folder: Path, dtype: torch.dtype = torch.float32, mode: str = "lasttoken", normalize: bool = True
) -> Path:
    """Writes the model without its output head, as sentence-transformers stores it; `mode` is its pooling mode."""
    path = folder / f"{name}-{mode}-{dtype}-{normalize}".replace("torch.", "")
    whole = make_checkpoint(name, folder, dtype)
    transformers.AutoModel.from_pretrained(whole, dtype=dtype).save_pretrained(path)
    save_modules(path, mode, normalize)
    return path


def save_modules(path: Path, mode: str, normalize: bool = True) -> None:
    """Writes the files that sentence-transformers adds to a model."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    modules = [
        {"idx": index, "name": str(index), "path": f"{index}_{kind}" if index else "", "type": f"some.module.{kind}"}
        for index, kind in enumerate(kinds)
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir(exist_ok=True)
    flags = ("cls_token", "mean_tokens", "max_tokens", "lasttoken")
    pooling = {"word_embedding_dimension": 96, **{f"pooling_mode_{flag}": flag == mode for flag in flags}}
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
