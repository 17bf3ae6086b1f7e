"""llama.cpp's architectures whose files are read: what they call a family's tensors and fields.

Names and rules are those of its converter (`conversion/` in the repository ggml-org/llama.cpp). A field that it leaves
out, because llama.cpp itself knows the family's value, is added here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.config.rope import FULL, SLIDING

Fields = Mapping[str, Any]
"""An architecture's metadata, without the architecture's name before it."""


@dataclass(frozen=True, slots=True)
class Family:
    """`tensors` are the names that differ from Llama's; one with a point is the tensor's whole name. `has_pairs` says
    that rows of queries and keys were reordered for a rotation of neighbours, and `norm_offset` what was added to the
    weights of norms. `fields` and `scaling` return fields of `config.json`, and of its `rope_scaling` if there is one.
    """

    model_type: str
    tensors: Mapping[str, str] = field(default_factory=dict[str, str])
    has_pairs: bool = False
    norm_offset: float = 0.0
    fields: Callable[[Fields], dict[str, Any]] = lambda _: {}
    scaling: Callable[[Fields], dict[str, Any]] = lambda _: {}


def head_size(fields: Fields) -> int:
    """Returns the size of a head of keys. Raises KeyError if the fields do not tell."""
    size = fields.get("attention.key_length")
    return fields["embedding_length"] // fields["attention.head_count"] if size is None else size


def _windows(fields: Fields, period: int) -> dict[str, Any]:
    """Returns the window and the layers that have one: those that the file names, or all but every `period`-th."""
    window = {"sliding_window": fields["attention.sliding_window"]}
    pattern = fields.get("attention.sliding_window_pattern", period)
    if isinstance(pattern, int):
        return {**window, "sliding_window_pattern": pattern}
    return {**window, "layer_types": [SLIDING if is_sliding else FULL for is_sliding in pattern.tolist()]}


def _rotated_part(fields: Fields) -> dict[str, Any]:
    size = head_size(fields)
    return {"partial_rotary_factor": fields.get("rope.dimension_count", size) / size}


def _qwen3_moe(fields: Fields) -> dict[str, Any]:
    return {
        "num_experts": fields["expert_count"],
        "num_experts_per_tok": fields["expert_used_count"],
        "moe_intermediate_size": fields["expert_feed_forward_length"],
        "norm_topk_prob": True,
    }


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
    return {**_rotated_part(fields), "sliding_window": fields.get("attention.sliding_window") or None}


def _granite(fields: Fields) -> dict[str, Any]:
    if not fields.get("rope.scaling.finetuned", True):
        raise ValueError("rope.scaling.finetuned is false: a Granite without rotation is not served")
    return {
        "embedding_multiplier": fields.get("embedding_scale", 1.0),
        "residual_multiplier": fields.get("residual_scale", 1.0),
        "attention_multiplier": fields.get("attention.scale", head_size(fields) ** -0.5),
        "logits_scaling": fields["logit_scale"],
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


_HEAD_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
_EXPERTS = {
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}
_ROUTED = {**_EXPERTS, "mlp.gate": "ffn_gate_inp"}
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
    **_ROUTED,
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
    **_EXPERTS,
    "post_attention_layernorm": "post_attention_norm",
    "mlp.router": "ffn_gate_inp",
    "self_attn.sinks": "attn_sinks.weight",
}
# llama.cpp's `general.architecture` -> the family.
FAMILIES = {
    "llama": Family("llama", has_pairs=True),
    "qwen2": Family("qwen2"),
    "qwen3": Family("qwen3", _HEAD_NORMS),
    "qwen3moe": Family("qwen3_moe", {**_HEAD_NORMS, **_ROUTED}, fields=_qwen3_moe),
    "gemma2": Family("gemma2", _SANDWICH, norm_offset=1.0, fields=_gemma2),
    "gemma3": Family("gemma3_text", {**_HEAD_NORMS, **_SANDWICH}, norm_offset=1.0, fields=_gemma3),
    "phi3": Family("phi3", {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"}, fields=_phi3),
    "granite": Family("granite", has_pairs=True, fields=_granite),
    # llama.cpp knows which layers have no rotation: every fourth, which is the default here too.
    "smollm3": Family("smollm3", has_pairs=True),
    "olmo2": Family("olmo2", {**_HEAD_NORMS, **_AFTER}, fields=_olmo),
    "exaone4": Family("exaone4", {**_HEAD_NORMS, **_AFTER}, fields=_exaone4),
    "cohere2": Family("cohere2", fields=_cohere2),
    "mistral3": Family("ministral3", has_pairs=True, scaling=_ministral_scaling),
    "glm4": Family("glm4", _GLM4, fields=_rotated_part),
    # Its YaRN does not round the limits between frequencies, which the files do not say.
    "gpt-oss": Family("gpt_oss", _GPT_OSS, fields=_gpt_oss, scaling=lambda _: {"truncate": False}),
    "deepseek2": Family("deepseek_v3", _LATENT, fields=_deepseek, scaling=_deepseek_scaling),
}
# A "llama" with experts.
MIXTRAL = Family(
    "mixtral",
    {
        "block_sparse_moe.gate": "ffn_gate_inp",
        "block_sparse_moe.experts.w1": "ffn_gate_exps",
        "block_sparse_moe.experts.w2": "ffn_down_exps",
        "block_sparse_moe.experts.w3": "ffn_up_exps",
    },
    has_pairs=True,
    fields=_mixtral,
)
