"""What the fields of a family's `config.json` mean beyond those of every transformer.

Published files leave out fields that have the default of the family's class in transformers; `with_defaults` adds the
ones that Penstock reads. A multimodal checkpoint is read as its text part (`text_part`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.config.fields import read_count, read_number
from penstock.config.layer_heads import GEMMA4
from penstock.config.nemotron import NEMOTRON, nemotron_fields
from penstock.config.recurrent import LINEAR, recurrent_kind, recurrent_layer_types
from penstock.config.rope import FULL, PROPORTIONAL, SLIDING, smollm3_unrotated
from penstock.utils.errors import ConfigError

SILU, GELU, GELU_TANH, SQUARED_RELU = "silu", "gelu", "gelu_tanh", "squared_relu"
_ACTIVATIONS = {"silu": SILU, "swish": SILU, "gelu": GELU, "gelu_new": GELU_TANH, "gelu_pytorch_tanh": GELU_TANH}
_GEMMA: dict[str, Any] = {
    "head_dim": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
}
_GEMMA4: dict[str, Any] = {
    **_GEMMA,
    "vocab_size": 262144,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "max_position_embeddings": 131072,
    "attention_k_eq_v": False,
    "rope_parameters": {
        FULL: {"rope_type": PROPORTIONAL, "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    },
}
_SPARSE_QWEN: dict[str, Any] = {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "intermediate_size": 512,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
}
_MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
_GRANITE: dict[str, Any] = dict.fromkeys(_MULTIPLIERS, 1.0)
_LFM2: dict[str, Any] = {"norm_eps": 1e-5, "rope_theta": 1e6, "num_key_value_heads": 8, "tie_word_embeddings": True}
_QWEN2_VL: dict[str, Any] = {"rope_theta": 1e6, "rms_norm_eps": 1e-5, "max_window_layers": 80}
_DEFAULTS: dict[str, dict[str, Any]] = {
    **{name: {"rms_norm_eps": 1e-5} for name in ("olmo2", "phi3")},
    "cohere2": {
        "tie_word_embeddings": True,
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.0625,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
    "deepseek_v2": {"n_shared_experts": 2},
    "deepseek_v3": {"n_shared_experts": 1, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5},
    "exaone4": {"rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4},
    "gemma2": {
        **_GEMMA,
        "sliding_window_pattern": 2,
        "max_position_embeddings": 8192,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3_text": {
        **_GEMMA,
        "vocab_size": 262208,
        "sliding_window_pattern": 6,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
    "gemma4_text": {**_GEMMA4, "vocab_size_per_layer_input": 262144, "hidden_size_per_layer_input": 256},
    "gemma4_unified_text": {**_GEMMA4, "max_position_embeddings": 262144, "sliding_window": 1024},
    "glm4": {"attention_bias": True, "head_dim": 128, "rms_norm_eps": 1.5625e-07, "partial_rotary_factor": 0.5},
    "glm4_moe_lite": {"rms_norm_eps": 1e-5, "n_shared_experts": 1, "routed_scaling_factor": 1.8},
    "gpt_oss": {
        "attention_bias": True,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "sliding_window": 128,
        "sliding_window_pattern": 2,
    },
    "granitemoehybrid": {**_GRANITE, "num_local_experts": 8, "shared_intermediate_size": 1024},
    "granite": _GRANITE,
    "lfm2": {**_LFM2, "block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256},
    "lfm2_moe": {**_LFM2, "num_dense_layers": 2, "num_experts_per_tok": 4},
    "mistral": {"sliding_window": 4096},
    "mixtral": {"rms_norm_eps": 1e-5, "rope_theta": 1e6},
    "ministral3": {"rms_norm_eps": 1e-5, "head_dim": 128},
    "modernbert": {
        "vocab_size": 50368,
        "hidden_size": 768,
        "intermediate_size": 1152,
        "num_hidden_layers": 22,
        "num_attention_heads": 12,
        "hidden_activation": "gelu",
        "max_position_embeddings": 8192,
        "norm_eps": 1e-5,
        "local_attention": 128,
        "global_attn_every_n_layers": 3,
        "global_rope_theta": 160000.0,
        "local_rope_theta": 10000.0,
    },
    "nemotron_h": {
        "head_dim": 128,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 21504,
        "layer_norm_epsilon": 1e-5,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
    },
    "olmo3": {"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "sliding_window": 4096, "sliding_window_pattern": 4},
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text"), _QWEN2_VL),
    "qwen3_vl_text": {"rope_theta": 5e5},
    "qwen3_5_text": {"head_dim": 256, "partial_rotary_factor": 0.25},
    "qwen3_5_moe_text": _SPARSE_QWEN,
    "qwen3_next": {**_SPARSE_QWEN, "intermediate_size": 5632, "num_experts_per_tok": 10},
    "smollm3": {
        "rope_theta": 2e6,
        "use_sliding_window": False,
        "no_rope_layer_interval": 4,
        "tie_word_embeddings": True,
    },
    "youtu": {"tie_word_embeddings": True},
}
# Families in which only layers that are not a multiple of the pattern have a window.
_WITH_PATTERN = tuple(name for name, fields in _DEFAULTS.items() if "sliding_window_pattern" in fields)
_QWEN_VL = ("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text")
_WITHOUT_DEFAULT_WINDOW = ("qwen2", "qwen3", "qwen3_moe", *_QWEN_VL)
_WITH_FULL_LAYERS_FIRST = ("qwen2", "qwen3", *_QWEN_VL)
# Multimodal models whose text part attends to earlier tokens alone, as if it stood by itself.
_WRAPPERS = (
    "gemma3",
    "gemma4",
    "gemma4_unified",
    "mistral3",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_5",
    "qwen3_5_moe",
)
# Multimodal models whose published files have the fields of the text part outside, without a `text_config`.
_FLAT = ("qwen2_vl", "qwen2_5_vl")
_GEMMA4_SERVED = {"hidden_activation": (None, "gelu_pytorch_tanh"), "use_bidirectional_attention": ("vision", None)}
_NO_TIME_STEP_LIMIT = (None, [0.0, {"__float__": "Infinity"}], [0.0, math.inf])
# Fields that change the result in a way that Penstock does not compute, and the values that do not.
_REFUSED: dict[str, dict[str, tuple[Any, ...]]] = {
    "cohere2": {"use_qk_norm": (None, False), "use_parallel_block": (None, True), "use_gated_activation": (None, True)},
    "gemma2": {"use_bidirectional_attention": (None, False)},
    "gemma3_text": {"use_bidirectional_attention": (None, False), "attn_logit_softcapping": (None,)},
    **dict.fromkeys(GEMMA4, _GEMMA4_SERVED),
    "granitemoehybrid": {
        "hidden_act": (None, "silu"),
        "position_embedding_type": (None, "nope", "rope"),
        "mamba_proj_bias": (None, False),
        "time_step_limit": _NO_TIME_STEP_LIMIT,
    },
    "lfm2": {"conv_bias": (None, False)},
    "lfm2_moe": {"conv_bias": (None, False)},
    "modernbert": {"norm_bias": (None, False), "rope_scaling": (None,)},
    "nemotron_h": {
        "attention_bias": (None, False),
        "mamba_hidden_act": (None, "silu"),
        "mamba_proj_bias": (None, False),
        "mlp_hidden_act": (None, "relu2"),
        "moe_latent_size": (None,),
        "n_shared_experts": (None, 1),
        "residual_in_fp32": (None, False),
        "sliding_window": (None,),
        "time_step_limit": _NO_TIME_STEP_LIMIT,
        "use_bias": (None, False),
    },
    "qwen3_5_text": {"hidden_act": (None, "silu")},
    "olmo2": {"clip_qkv": (None,)},
    "olmo3": {"clip_qkv": (None,)},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MultipliersConfig:
    """Numbers by which a model multiplies what others leave as it is."""

    embedding: float = 1.0  # of a token's vector
    residual: float = 1.0  # of what a sub-layer adds to the residual stream
    attention: float | None = None  # of a product of query and key, by default 1 / sqrt(head_dim)
    logits: float = 1.0
    logits_cap: float = 0.0  # soft cap of the logits, 0: there is none
    query_beta: float = 0.0  # a query at position p is multiplied by 1 + beta * log(1 + p // query_context)
    query_context: int = 0


NO_MULTIPLIERS = MultipliersConfig()


def text_part(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the contents of a `config.json`, or for a multimodal model those of its text part."""
    if not isinstance(raw.get("text_config"), dict):
        return {**raw, "model_type": f"{raw['model_type']}_text"} if raw.get("model_type") in _FLAT else dict(raw)
    if raw.get("model_type") not in _WRAPPERS:
        raise ConfigError(
            f"model_type {raw.get('model_type')!r} has a text_config; those whose text part is served are "
            f"{', '.join(_WRAPPERS)}"
        )
    inner: dict[str, Any] = raw["text_config"]
    dtypes = ("dtype", "torch_dtype")
    if any(raw.get(name) is not None for name in dtypes):
        inner = {name: value for name, value in inner.items() if name not in dtypes}
    outer = {name: raw[name] for name in (*dtypes, "eos_token_id", "is_causal") if raw.get(name) is not None}
    kept = {name: raw[name] for name in ("architectures", "quantization_config") if raw.get(name) is not None}
    # Versions of transformers differ in where they write it.
    parts: tuple[Mapping[str, Any], ...] = (raw, inner)
    is_tied = [part["tie_word_embeddings"] for part in parts if part.get("tie_word_embeddings") is not None]
    return {**outer, **inner, **kept, **({"tie_word_embeddings": any(is_tied)} if is_tied else {})}


def with_defaults(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Adds the fields that the family's class would add. Raises ConfigError for a variant that is not supported."""
    model_type = raw["model_type"]
    for name, allowed in _REFUSED.get(model_type, {}).items():
        if raw.get(name) not in allowed:
            raise ConfigError(f"{name} of a {model_type} must be {allowed[-1]}, got {raw[name]!r}")
    filled = {**_DEFAULTS.get(model_type, {}), **raw}
    if model_type == "granitemoehybrid" and read_count(filled, "num_local_experts", least=0) == 0:
        return {**filled, "intermediate_size": filled["shared_intermediate_size"]}
    if model_type in GEMMA4:
        return {**filled, **_gemma4_fields(filled)}
    if model_type == NEMOTRON:
        return {**filled, **nemotron_fields(filled)}
    return {**filled, **_lfm2_fields(filled)} if model_type in ("lfm2", "lfm2_moe") else filled


def _gemma4_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the kinds of all layers, of which the last always has no window; and the default for null."""
    num_layers = read_count(raw, "num_hidden_layers")
    types = read_layer_types(raw, num_layers)
    rope = raw.get("rope_parameters") or _GEMMA4["rope_parameters"]
    return {"layer_types": [*types[:-1], FULL], "rope_parameters": rope}


def _lfm2_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields that LFM2's published files have under names of their own, or from which they are computed."""
    found: dict[str, Any] = {"tie_word_embeddings": raw.get("tie_embedding", raw["tie_word_embeddings"])}
    if raw["model_type"] == "lfm2":
        inner = read_count(raw, "block_ff_dim" if raw.get("block_ff_dim") is not None else "intermediate_size")
        if raw["block_auto_adjust_ff_dim"]:
            inner = int(2 * inner / 3)
            if raw["block_ffn_dim_multiplier"] is not None:
                step = read_count(raw, "block_multiple_of")
                inner = -(-int(raw["block_ffn_dim_multiplier"] * inner) // step) * step
        found["intermediate_size"] = inner
    return found


def read_activation(raw: Mapping[str, Any]) -> str:
    """Returns the activation of a decoder's MLPs. Raises ConfigError for one that is not supported."""
    if raw["model_type"] == NEMOTRON:
        return SQUARED_RELU
    field = "hidden_activation" if raw.get("hidden_activation") is not None else "hidden_act"
    found = raw.get(field, SILU)
    if found not in _ACTIVATIONS:
        raise ConfigError(f"{field} must be one of {', '.join(_ACTIVATIONS)}, got {found!r}")
    return _ACTIVATIONS[found]


def read_layer_types(raw: Mapping[str, Any], num_layers: int) -> tuple[str, ...]:
    """Returns FULL, SLIDING or LINEAR for every layer: from `layer_types` if given, else by the rule of the family.
    Layers of Nemotron-H may also be of one of the kinds `FEED_FORWARD`.

    Raises ConfigError for another kind of layer.
    """
    given: list[str] | None = raw.get("layer_types")
    if raw["model_type"] == NEMOTRON:
        return tuple(raw["layer_types"])
    if given:
        if len(given) != num_layers:
            raise ConfigError(f"layer_types names {len(given)} layers of {num_layers}")
        served = (FULL, recurrent_kind(raw) or SLIDING)
        if raw["model_type"] == "granitemoehybrid":
            given = [{"mamba": LINEAR, "attention": FULL}.get(kind, kind) for kind in given]
        unknown = next((kind for kind in given if kind not in served), None)
        if unknown is not None:
            raise ConfigError(f"layer_types of a {raw['model_type']} may name {' and '.join(served)}, got {unknown!r}")
        return tuple(LINEAR if kind == recurrent_kind(raw) else kind for kind in given)
    model_type = raw["model_type"]
    if recurrent_kind(raw):
        return recurrent_layer_types(raw, num_layers, FULL)
    if not read_window(raw):
        return (FULL,) * num_layers
    if model_type == "modernbert":
        every = read_count(raw, "global_attn_every_n_layers")
        return tuple(SLIDING if layer % every else FULL for layer in range(num_layers))
    if model_type in _WITH_PATTERN:
        pattern = read_count(raw, "sliding_window_pattern")
        return tuple(SLIDING if (layer + 1) % pattern else FULL for layer in range(num_layers))
    if model_type == "smollm3":
        unrotated = smollm3_unrotated(raw, num_layers)
        return tuple(SLIDING if layer in unrotated else FULL for layer in range(num_layers))
    first = read_count(raw, "max_window_layers", 28, least=0) if model_type in _WITH_FULL_LAYERS_FIRST else 0
    return tuple(SLIDING if layer >= first else FULL for layer in range(num_layers))


def read_window(raw: Mapping[str, Any]) -> int:
    """Returns how many tokens a layer with a window sees, 0 if no layer has one. Raises ConfigError for another number.

    An encoder's layer sees as many in both directions, of which the token itself is one.
    """
    if raw["model_type"] == "modernbert":
        return read_count(raw, "local_attention") // 2 + 1
    window = read_count(raw, "sliding_window", 0, least=0)
    return window if raw.get("use_sliding_window", raw["model_type"] not in _WITHOUT_DEFAULT_WINDOW) else 0


def read_soft_cap(raw: Mapping[str, Any], name: str) -> float:
    """Returns the limit of scores or logits; 0 if there is none. Raises ConfigError for another number."""
    return 0.0 if raw.get(name) is None else read_number(raw, name)


def read_multipliers(raw: Mapping[str, Any], rope: Mapping[str, Any]) -> MultipliersConfig:
    """Reads the fields of the families that have such numbers; `rope` has the parameters of the rotation."""
    model_type = raw["model_type"]
    if model_type in ("granite", "granitemoehybrid"):
        return MultipliersConfig(
            embedding=read_number(raw, "embedding_multiplier"),
            residual=read_number(raw, "residual_multiplier"),
            attention=read_number(raw, "attention_multiplier"),
            logits=1 / read_number(raw, "logits_scaling"),
        )
    if model_type in ("gemma2", "gemma3_text", *GEMMA4):
        return MultipliersConfig(
            embedding=math.sqrt(raw["hidden_size"]),
            attention=1.0 if model_type in GEMMA4 else read_number(raw, "query_pre_attn_scalar") ** -0.5,
            logits_cap=read_soft_cap(raw, "final_logit_softcapping"),
        )
    if model_type == "cohere2":
        return MultipliersConfig(logits=read_number(raw, "logit_scale"))
    if model_type == "ministral3" and rope.get("llama_4_scaling_beta"):
        context = read_count(rope, "original_max_position_embeddings")
        return MultipliersConfig(query_beta=read_number(rope, "llama_4_scaling_beta"), query_context=context)
    return NO_MULTIPLIERS
