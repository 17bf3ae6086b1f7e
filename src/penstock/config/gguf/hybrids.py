"""Models with recurrent layers in GGUF files (`families`)."""

from __future__ import annotations

from typing import Any

from penstock.config.gguf.family import (
    HEAD_NORMS,
    ROUTED,
    Family,
    Fields,
    by_layer,
    head_size,
    qwen3_experts,
    rotated_part,
)
from penstock.config.nemotron import EXPERTS, MLP
from penstock.config.recurrent import LINEAR
from penstock.config.rope import FULL


def _granite_hybrid(fields: Fields) -> dict[str, Any]:
    inner, heads = fields["ssm.inner_size"], fields["ssm.time_step_rank"]
    hidden, num_experts = fields["embedding_length"], fields.get("expert_count") or 0
    kv_heads = by_layer(fields["attention.head_count_kv"], fields["block_count"])
    config = {
        "embedding_multiplier": fields.get("embedding_scale", 1.0),
        "residual_multiplier": fields.get("residual_scale", 1.0),
        "attention_multiplier": fields.get("attention.scale", head_size(fields) ** -0.5),
        "logits_scaling": fields["logit_scale"],
        "position_embedding_type": "rope" if fields.get("rope.scaling.finetuned", True) else "nope",
        "layer_types": [FULL if count else LINEAR for count in kv_heads],
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_expand": inner // hidden,
        "mamba_n_groups": fields["ssm.group_count"],
        "mamba_d_state": fields["ssm.state_size"],
        "mamba_d_conv": fields["ssm.conv_kernel"],
        "shared_intermediate_size": fields.get("expert_shared_feed_forward_length", fields["feed_forward_length"]),
        "num_local_experts": num_experts,
    }
    return {**config, "num_experts_per_tok": fields["expert_used_count"]} if num_experts else config


def _nemotron(fields: Fields) -> dict[str, Any]:
    num_layers = fields["block_count"] - fields.get("nextn_predict_layers", 0)
    sizes, kv_heads = (
        by_layer(fields[name], fields["block_count"]) for name in ("feed_forward_length", "attention.head_count_kv")
    )
    num_experts, heads = fields.get("expert_count") or 0, fields["ssm.time_step_rank"]
    feed_forward = EXPERTS if num_experts else MLP
    kinds = [FULL if count else feed_forward if size else LINEAR for size, count in zip(sizes, kv_heads, strict=True)]
    config = {
        "layer_types": kinds[:num_layers],
        "layer_norm_epsilon": fields["attention.layer_norm_rms_epsilon"],
        "mamba_num_heads": heads,
        "mamba_head_dim": fields["ssm.inner_size"] // heads,
        "n_groups": fields["ssm.group_count"],
        "ssm_state_size": fields["ssm.state_size"],
        "conv_kernel": fields["ssm.conv_kernel"],
        "moe_latent_size": fields.get("moe_latent_size"),
    }
    if not num_experts:
        return config
    return {
        **config,
        "n_routed_experts": num_experts,
        "num_experts_per_tok": fields["expert_used_count"],
        "moe_intermediate_size": fields["expert_feed_forward_length"],
        "moe_shared_expert_intermediate_size": fields["expert_shared_feed_forward_length"],
        "n_shared_experts": fields.get("expert_shared_count", 1),
        "n_group": fields.get("expert_group_count", 1),
        "topk_group": fields.get("expert_group_used_count", 1),
        "routed_scaling_factor": fields.get("expert_weights_scale", 1.0),
        "norm_topk_prob": bool(fields.get("expert_weights_norm", True)),
    }


def _lfm2(fields: Fields) -> dict[str, Any]:
    kv_heads = by_layer(fields["attention.head_count_kv"], fields["block_count"])
    config = {
        "layer_types": [FULL if count else "conv" for count in kv_heads],
        "conv_L_cache": fields["shortconv.l_cache"],
        "block_auto_adjust_ff_dim": False,
    }
    if not fields.get("expert_count"):
        return config
    return {
        **config,
        "num_experts": fields["expert_count"],
        "num_experts_per_tok": fields["expert_used_count"],
        "moe_intermediate_size": fields["expert_feed_forward_length"],
        "num_dense_layers": fields.get("leading_dense_block_count", 0),
        "norm_topk_prob": True,
    }


def _qwen_hybrid(fields: Fields) -> dict[str, Any]:
    value_heads = fields["ssm.time_step_rank"]
    config = {
        **rotated_part(fields),
        "num_hidden_layers": fields["block_count"] - fields.get("nextn_predict_layers", 0),
        "full_attention_interval": fields.get("full_attention_interval", 4),
        "linear_num_key_heads": fields["ssm.group_count"],
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": fields["ssm.state_size"],
        "linear_value_head_dim": fields["ssm.inner_size"] // value_heads,
        "linear_conv_kernel_dim": fields["ssm.conv_kernel"],
    }
    if not fields.get("expert_count"):
        return config
    shared = fields.get("expert_shared_feed_forward_length", 0)
    return {**config, **qwen3_experts(fields), "shared_expert_intermediate_size": shared}


_MAMBA = {
    "in_proj": "ssm_in",
    "conv1d": "ssm_conv1d",
    "A_log": "ssm_a",
    "dt_bias": "ssm_dt.bias",
    "D": "ssm_d",
    "norm": "ssm_norm",
    "out_proj": "ssm_out",
}
_SHARED_EXPERT = {
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
_QWEN_HYBRID = {
    **HEAD_NORMS,
    **ROUTED,
    **_SHARED_EXPERT,
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    # Of older files of Qwen3-Next.
    "linear_attn.in_proj_qkvz": "ssm_in",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
_LFM2 = {
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "conv.in_proj": "shortconv.in_proj",
    "conv.conv": "shortconv.conv",
    "conv.out_proj": "shortconv.out_proj",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
    "feed_forward.gate": "ffn_gate_inp",
    "feed_forward.expert_bias": "exp_probs_b.bias",
    "feed_forward.experts.w1": "ffn_gate_exps",
    "feed_forward.experts.w3": "ffn_up_exps",
    "feed_forward.experts.w2": "ffn_down_exps",
}
_GRANITE_HYBRID = {f"mamba.{name}": stored for name, stored in _MAMBA.items()}
_NEMOTRON = {
    **{f"mixer.{name}": stored for name, stored in _MAMBA.items()},
    "norm": "attn_norm",
    "mixer.q_proj": "attn_q",
    "mixer.k_proj": "attn_k",
    "mixer.v_proj": "attn_v",
    "mixer.o_proj": "attn_output",
    "mixer.up_proj": "ffn_up",
    "mixer.down_proj": "ffn_down",
    "mixer.gate": "ffn_gate_inp",
    "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mixer.experts.up_proj": "ffn_up_exps",
    "mixer.experts.down_proj": "ffn_down_exps",
    "mixer.shared_experts.up_proj": "ffn_up_shexp",
    "mixer.shared_experts.down_proj": "ffn_down_shexp",
}


def _qwen_family(model_type: str, has_tiled_values: bool = True) -> Family:
    return Family(
        model_type,
        _QWEN_HYBRID,
        has_tiled_values=has_tiled_values,
        norm_offset=1.0,
        plain_norms=("linear_attn.norm",),
        fields=_qwen_hybrid,
    )


def _lfm2_family(model_type: str) -> Family:
    return Family(model_type, _LFM2, {"model.embedding_norm": "token_embd_norm"}, fields=_lfm2)


_NEMOTRON_FAMILY = Family(
    "nemotron_h",
    _NEMOTRON,
    {"model.embeddings": "token_embd", "model.norm_f": "output_norm"},
    # Its attention has no rotation, but the rows were reordered all the same.
    has_pairs=True,
    fields=_nemotron,
)
HYBRIDS = {
    "qwen35": _qwen_family("qwen3_5_text"),
    "qwen35moe": _qwen_family("qwen3_5_moe_text"),
    "qwen3next": _qwen_family("qwen3_next", has_tiled_values=False),
    "lfm2": _lfm2_family("lfm2"),
    "lfm2moe": _lfm2_family("lfm2_moe"),
    "granitehybrid": Family(
        "granitemoehybrid",
        {**_GRANITE_HYBRID, "shared_mlp.output_linear": "ffn_down"},
        halves={"shared_mlp.input_linear": ("ffn_gate", "ffn_up")},
        has_pairs=True,
        fields=_granite_hybrid,
    ),
    "nemotron_h": _NEMOTRON_FAMILY,
    "nemotron_h_moe": _NEMOTRON_FAMILY,
}
# The same for files with experts, if their tensors have other names.
HYBRIDS_WITH_EXPERTS = {
    "granitehybrid": Family(
        "granitemoehybrid",
        {
            **_GRANITE_HYBRID,
            "block_sparse_moe.router.layer": "ffn_gate_inp",
            "block_sparse_moe.output_linear": "ffn_down_exps",
            "shared_mlp.output_linear": "ffn_down_shexp",
        },
        halves={
            "block_sparse_moe.input_linear": ("ffn_gate_exps", "ffn_up_exps"),
            "shared_mlp.input_linear": ("ffn_gate_shexp", "ffn_up_shexp"),
        },
        has_pairs=True,
        fields=_granite_hybrid,
    ),
}
