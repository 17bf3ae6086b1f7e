"""llama.cpp's architectures whose files are read: what they call a family's tensors and fields.

Names and rules are those of its converter (`conversion/` in the repository ggml-org/llama.cpp). A field that it leaves
out, because llama.cpp itself knows the family's value, is added here.
"""

from __future__ import annotations

from typing import Any

from penstock.config.gguf.family import (
    EXPERTS,
    HEAD_NORMS,
    ROUTED,
    Family,
    Fields,
    by_layer,
    head_size,
    qwen3_experts,
    rotated_part,
)
from penstock.config.gguf.file import GGUFFile, read_vector
from penstock.config.gguf.hybrids import HYBRIDS, HYBRIDS_WITH_EXPERTS
from penstock.config.rope import FULL, PROPORTIONAL, SLIDING


def _windows(fields: Fields, period: int) -> dict[str, Any]:
    """Returns the window and the layers that have one: those that the file names, or all but every `period`-th."""
    window = {"sliding_window": fields["attention.sliding_window"]}
    pattern = fields.get("attention.sliding_window_pattern", period)
    if isinstance(pattern, int):
        return {**window, "sliding_window_pattern": pattern}
    return {**window, "layer_types": [SLIDING if is_sliding else FULL for is_sliding in pattern.tolist()]}


def _mixtral(fields: Fields) -> dict[str, Any]:
    return {"num_local_experts": fields["expert_count"], "num_experts_per_tok": fields["expert_used_count"]}


# The largest models of these families divide by another number than the size of a head, and no field says so.
_LAYERS_OF_LARGEST = {"gemma2": 46, "gemma3": 62}


def _gemma(fields: Fields, architecture: str) -> dict[str, Any]:
    is_largest = fields["block_count"] == _LAYERS_OF_LARGEST[architecture]
    by_heads = fields["embedding_length"] // fields["attention.head_count"]
    return {
        "query_pre_attn_scalar": by_heads if is_largest else fields["attention.key_length"],
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": fields.get("final_logit_softcapping"),
    }


def _gemma2(fields: Fields) -> dict[str, Any]:
    caps = {"attn_logit_softcapping": fields.get("attn_logit_softcapping")}
    return {**_gemma(fields, "gemma2"), **_windows(fields, 2), **caps}


def _gemma3(fields: Fields) -> dict[str, Any]:
    local = {"rope_local_base_freq": fields.get("rope.freq_base_swa", 10000.0)}
    return {**_gemma(fields, "gemma3"), **_windows(fields, 6), **local}


def _phi3(fields: Fields) -> dict[str, Any]:
    """A window of 0 is none."""
    return {**rotated_part(fields), "sliding_window": fields.get("attention.sliding_window") or None}


def _granite(fields: Fields) -> dict[str, Any]:
    if not fields.get("rope.scaling.finetuned", True):
        raise ValueError("rope.scaling.finetuned is false: a Granite without rotation is not served")
    return {
        "embedding_multiplier": fields.get("embedding_scale", 1.0),
        "residual_multiplier": fields.get("residual_scale", 1.0),
        "attention_multiplier": fields.get("attention.scale", head_size(fields) ** -0.5),
        "logits_scaling": fields["logit_scale"],
    }


def _gemma4(file: GGUFFile, fields: Fields) -> dict[str, Any]:
    """Which values are keys, and which part of a head is rotated without a window, only the tensors tell: frequencies
    that are not rotated have a huge divisor.
    """
    num_layers, name = fields["block_count"], "rope_freqs.weight"
    windows = fields["attention.sliding_window_pattern"].tolist()
    kinds = [SLIDING if is_sliding else FULL for is_sliding in windows]
    inner, kv_heads = (
        by_layer(fields[name], num_layers) for name in ("feed_forward_length", "attention.head_count_kv")
    )
    full, sliding = (kinds.index(kind) if kind in kinds else 0 for kind in (FULL, SLIDING))
    table = file.tensors.get("per_layer_token_embd.weight")
    divisors = read_vector(file, name) if name in file.tensors else []
    factor = sum(divisor == 1.0 for divisor in divisors) / len(divisors) if divisors else 1.0
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": kinds,
        "sliding_window": fields["attention.sliding_window"],
        "head_dim": fields["attention.key_length_swa"],
        "global_head_dim": fields["attention.key_length"],
        "num_key_value_heads": kv_heads[sliding],
        "num_global_key_value_heads": kv_heads[full],
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in file.tensors,
        "num_kv_shared_layers": fields.get("attention.shared_kv_layers", 0),
        "intermediate_size": inner[0],
        "use_double_wide_mlp": inner[-1] != inner[0],
        "hidden_size_per_layer_input": fields.get("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": table.shape[0] if table is not None else 0,
        "final_logit_softcapping": fields.get("final_logit_softcapping"),
        "rope_parameters": {
            FULL: {
                "rope_type": PROPORTIONAL,
                "partial_rotary_factor": factor,
                "rope_theta": fields.get("rope.freq_base", 1e6),
            },
            SLIDING: {"rope_type": "default", "rope_theta": fields.get("rope.freq_base_swa", 1e4)},
        },
        "enable_moe_block": bool(fields.get("expert_count")),
        "num_experts": fields.get("expert_count"),
        "top_k_experts": fields.get("expert_used_count"),
        "moe_intermediate_size": fields.get("expert_feed_forward_length"),
    }


def _olmo(fields: Fields) -> dict[str, Any]:
    """OLMo 3 is OLMo 2 with windows."""
    if not fields.get("attention.sliding_window"):
        return {}
    return {"model_type": "olmo3", **_windows(fields, 4)}


def _exaone4(fields: Fields) -> dict[str, Any]:
    return _windows(fields, 4) if fields.get("attention.sliding_window") else {"sliding_window": None}


def _cohere2(fields: Fields) -> dict[str, Any]:
    return {**_windows(fields, 4), "logit_scale": fields["logit_scale"]}


def _gpt_oss(fields: Fields) -> dict[str, Any]:
    return {
        **_windows(fields, 2),
        "num_local_experts": fields["expert_count"],
        "num_experts_per_tok": fields["expert_used_count"],
        "intermediate_size": fields["expert_feed_forward_length"],
    }


_SIGMOID = 2  # of `expert_gating_func`


def _deepseek(fields: Fields) -> dict[str, Any]:
    """Files of all models with latent attention have this architecture: of DeepSeek-V2 and V3, of GLM-4.7-Flash, which
    is V3 with other sizes, and of Youtu, which has no experts.
    """
    rotary, num_experts = fields["rope.dimension_count"], fields.get("expert_count")
    # The sizes of a head, in newer files beside those of what the cache stores.
    keys, values = (
        fields.get(f"attention.{name}_length_mla", fields.get(f"attention.{name}_length")) for name in ("key", "value")
    )
    config = {
        "model_type": "youtu",
        "num_hidden_layers": fields["block_count"] - fields.get("nextn_predict_layers", 0),
        "num_key_value_heads": fields["attention.head_count"],
        "q_lora_rank": fields.get("attention.q_lora_rank"),
        "kv_lora_rank": fields["attention.kv_lora_rank"],
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": keys - rotary,  # pyright: ignore[reportOptionalOperand]
        "v_head_dim": values,
    }
    if not num_experts:
        return config
    is_v3 = fields["expert_gating_func"] == _SIGMOID
    num_groups = fields.get("expert_group_count", 1)
    v2_method = "greedy" if num_groups == 1 else "group_limited_greedy"
    return {
        **config,
        "model_type": "deepseek_v3" if is_v3 else "deepseek_v2",
        "topk_method": "noaux_tc" if is_v3 else v2_method,
        "n_routed_experts": num_experts,
        "num_experts_per_tok": fields["expert_used_count"],
        "moe_intermediate_size": fields["expert_feed_forward_length"],
        "n_shared_experts": fields.get("expert_shared_count", 0),
        "first_k_dense_replace": fields.get("leading_dense_block_count", 0),
        "n_group": num_groups,
        "topk_group": fields.get("expert_group_used_count", 1),
        "routed_scaling_factor": fields.get("expert_weights_scale", 1.0),
        "norm_topk_prob": bool(fields.get("expert_weights_norm", False)),
    }


def _deepseek_scaling(fields: Fields) -> dict[str, Any]:
    """The file has a tenth of `mscale_all_dim`, which is `mscale` in all models of the family."""
    stored = fields.get("rope.scaling.yarn_log_multiplier")
    return {} if stored is None else dict.fromkeys(("mscale", "mscale_all_dim"), round(10 * stored, 6))


def _ministral_scaling(fields: Fields) -> dict[str, Any]:
    multiplier = fields.get("rope.scaling.yarn_log_multiplier")
    scales = {} if multiplier is None else {"mscale": multiplier, "mscale_all_dim": multiplier}
    return {**scales, "llama_4_scaling_beta": fields.get("attention.temperature_scale")}


_SANDWICH = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_AFTER = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
_LATENT = {
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    **ROUTED,
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}
_GLM4 = {
    "post_self_attn_layernorm": "post_attention_norm",
    "post_mlp_layernorm": "post_ffw_norm",
    "mlp.gate_up_proj": "ffn_up",
}
_GPT_OSS = {
    **EXPERTS,
    "post_attention_layernorm": "post_attention_norm",
    "mlp.router": "ffn_gate_inp",
    "self_attn.sinks": "attn_sinks.weight",
}
_GEMMA4 = {
    **HEAD_NORMS,
    **_SANDWICH,
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "router.proj": "ffn_gate_inp",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_proj": "ffn_gate_exps",
    "experts.up_proj": "ffn_up_exps",
    "experts.down_proj": "ffn_down_exps",
    "layer_scalar": "layer_output_scale.weight",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
}
_GEMMA4_OUTER = {
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
}


# llama.cpp's `general.architecture` -> the family.
FAMILIES = {
    "llama": Family("llama", has_pairs=True),
    "qwen2": Family("qwen2"),
    "qwen3": Family("qwen3", HEAD_NORMS),
    "qwen3moe": Family("qwen3_moe", {**HEAD_NORMS, **ROUTED}, fields=qwen3_experts),
    "gemma2": Family("gemma2", _SANDWICH, norm_offset=1.0, fields=_gemma2),
    "gemma3": Family("gemma3_text", {**HEAD_NORMS, **_SANDWICH}, norm_offset=1.0, fields=_gemma3),
    "phi3": Family("phi3", {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"}, fields=_phi3),
    "granite": Family("granite", has_pairs=True, fields=_granite),
    # llama.cpp knows which layers have no rotation: every fourth, which is the default here too.
    "smollm3": Family("smollm3", has_pairs=True),
    "olmo2": Family("olmo2", {**HEAD_NORMS, **_AFTER}, fields=_olmo),
    "exaone4": Family("exaone4", {**HEAD_NORMS, **_AFTER}, fields=_exaone4),
    "cohere2": Family("cohere2", fields=_cohere2),
    "mistral3": Family("ministral3", has_pairs=True, scaling=_ministral_scaling),
    "glm4": Family("glm4", _GLM4, fields=rotated_part),
    # Its YaRN does not round the limits between frequencies, which the files do not say.
    "gpt-oss": Family("gpt_oss", _GPT_OSS, fields=_gpt_oss, scaling=lambda _: {"truncate": False}),
    "deepseek2": Family("deepseek_v3", _LATENT, fields=_deepseek, scaling=_deepseek_scaling),
    "gemma4": Family("gemma4_text", _GEMMA4, _GEMMA4_OUTER, tensor_fields=_gemma4),
    **HYBRIDS,
}
# The same for files with experts, if their tensors have other names.
WITH_EXPERTS = {
    "llama": Family(
        "mixtral",
        {
            "block_sparse_moe.gate": "ffn_gate_inp",
            "block_sparse_moe.experts.w1": "ffn_gate_exps",
            "block_sparse_moe.experts.w2": "ffn_down_exps",
            "block_sparse_moe.experts.w3": "ffn_up_exps",
        },
        has_pairs=True,
        fields=_mixtral,
    ),
    **HYBRIDS_WITH_EXPERTS,
}
