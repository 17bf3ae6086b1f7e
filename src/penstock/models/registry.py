"""The supported architectures, by Hugging Face `model_type`.

A family that is Llama or BERT with other names or switches is an entry here; others are modules like `decoder`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from penstock.config.model import ModelConfig
from penstock.models.decoder import Architecture, Decoder, NormNames
from penstock.models.encoder import Encoder, EncoderArchitecture, GatedEncoder
from penstock.models.experts import experts_beside_mlp, sparse_mlp
from penstock.models.gated_delta_net import GatedDeltaNet
from penstock.models.gemma4 import Gemma4LayerEnd, PerLayerInputs, gemma4_mlp
from penstock.models.latent_attention import LatentAttention
from penstock.models.mamba2 import Mamba2Layer
from penstock.models.norms import layer_norm, rms_norm, rms_norm_from_one, rms_norm_rounded_once
from penstock.models.parts import AttentionVariant, GroupedQueryAttention, UngatedMLP, dense_mlp
from penstock.models.short_conv import ShortConvLayer
from penstock.models.weights import Weights
from penstock.parallel.topology import Stage
from penstock.utils.errors import ConfigError


def _attention(**switches: Any) -> Callable[[ModelConfig, Weights, int, torch.Tensor], GroupedQueryAttention]:
    """Returns grouped-query attention with the switches of `AttentionVariant`."""
    return partial(GroupedQueryAttention, variant=AttentionVariant(**switches))


_SANDWICH = NormNames(
    after_attention="post_attention_layernorm",
    feed_forward="pre_feedforward_layernorm",
    after_feed_forward="post_feedforward_layernorm",
)
_AFTER = NormNames(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
_LFM2 = partial(
    Architecture,
    _attention(head_norms=rms_norm, norm="layernorm", out="out_proj"),
    norms=NormNames("operator_norm", None, "ffn_norm", None),
    recurrent=ShortConvLayer,
    recurrent_name="conv",
    end_norm="embedding_norm",
)
_LFM2_MLP = partial(dense_mlp, part="feed_forward", gate_up=("w1", "w3"), down="w2")
_FUSED_MLP = partial(dense_mlp, stored_as="gate_up_proj")
_QWEN2 = _attention(qkv_bias=True, out_bias=False)
_QWEN3 = _attention(head_norms=rms_norm)
_GATED = _attention(head_norms=rms_norm_from_one, has_gate=True)
_GEMMA4 = Architecture(
    _attention(head_norms=rms_norm_rounded_once, has_value_norm=True),
    partial(experts_beside_mlp, mlp=gemma4_mlp),
    rms_norm_rounded_once,
    NormNames(
        after_attention="post_attention_layernorm", feed_forward=None, after_feed_forward="post_feedforward_layernorm"
    ),
    layer_end=Gemma4LayerEnd,
    per_layer=PerLayerInputs,
)
MODELS = {
    # Llama 2 and 3 (Touvron et al. 2023, arXiv:2307.09288).
    "llama": Architecture(GroupedQueryAttention, dense_mlp),
    # Jiang et al. 2023, arXiv:2310.06825: with a sliding window, which the configuration gives.
    "mistral": Architecture(GroupedQueryAttention, dense_mlp),
    # Qwen2 and Qwen2.5 (Yang et al. 2024, arXiv:2407.10671): with biases on queries, keys and values.
    "qwen2": Architecture(_QWEN2, dense_mlp),
    # Qwen3, dense (Yang et al. 2025, arXiv:2505.09388): with a norm on every query and key head.
    "qwen3": Architecture(_QWEN3, dense_mlp),
    # Phi-3 and Phi-4 (Abdin et al. 2024, arXiv:2404.14219 and 2412.08905): fused tensors; Phi-4-mini has a partial
    # rotation and LongRoPE.
    "phi3": Architecture(_attention(stored_as="qkv_proj"), _FUSED_MLP),
    # GLM-4-0414 (Zhipu AI 2025): rotated pairs are neighbours, and there are norms on both sides of the parts.
    "glm4": Architecture(
        _attention(has_pairs=True, out_bias=False),
        _FUSED_MLP,
        norms=NormNames(after_attention="post_self_attn_layernorm", after_feed_forward="post_mlp_layernorm"),
    ),
    # Granite 3 (IBM 2024): Llama with multipliers, which the configuration gives.
    "granite": Architecture(GroupedQueryAttention, dense_mlp),
    # Granite 4 (IBM 2025): Granite with Mamba2 in most layers, and attention without rotation in the others.
    "granitemoehybrid": Architecture(
        GroupedQueryAttention,
        partial(
            sparse_mlp, dense=partial(dense_mlp, part="shared_mlp", stored_as="input_linear", down="output_linear")
        ),
        recurrent=Mamba2Layer,
        recurrent_name="mamba",
    ),
    # SmolLM3 (Hugging Face 2025): Llama without rotation in some layers, which the configuration names.
    "smollm3": Architecture(GroupedQueryAttention, dense_mlp),
    # OLMo 2 (OLMo et al. 2024, arXiv:2501.00656): norms after the parts, and of all queries and all keys.
    "olmo2": Architecture(_attention(width_norms=rms_norm_rounded_once), dense_mlp, rms_norm_rounded_once, _AFTER),
    # OLMo 3 (Ai2 2025): OLMo 2 with windows, whose layers have a rotation of their own.
    "olmo3": Architecture(_attention(width_norms=rms_norm_rounded_once), dense_mlp, rms_norm_rounded_once, _AFTER),
    # EXAONE 4 (LG AI Research 2025, arXiv:2507.11407): norms after the parts, and no rotation without a window.
    "exaone4": Architecture(_QWEN3, dense_mlp, norms=_AFTER),
    # Ministral 3 (Mistral AI 2025): queries are multiplied by a number that grows with the position.
    "ministral3": Architecture(GroupedQueryAttention, dense_mlp),
    # Command A and R7B (Cohere 2025, arXiv:2504.00698): parallel parts, and no rotation in layers without a window.
    "cohere2": Architecture(
        _attention(has_pairs=True), dense_mlp, layer_norm, NormNames(feed_forward=None), is_parallel=True
    ),
    # Gemma 2 (Gemma Team 2024, arXiv:2408.00118): norms on both sides of the parts, and soft caps.
    "gemma2": Architecture(GroupedQueryAttention, dense_mlp, rms_norm_from_one, _SANDWICH),
    # Gemma 3 (Gemma Team 2025, arXiv:2503.19786): norms on both sides of the parts, and two rotations.
    "gemma3_text": Architecture(_attention(head_norms=rms_norm_from_one), dense_mlp, rms_norm_from_one, _SANDWICH),
    # Gemma 4 (Google DeepMind 2026): other heads without a window, and layers that read others' keys and values.
    "gemma4_text": _GEMMA4,
    # The text part of Gemma 4 with vision and sound in one model.
    "gemma4_unified_text": _GEMMA4,
    # gpt-oss (OpenAI 2025, arXiv:2508.10925): experts with biases, windows and attention sinks.
    "gpt_oss": Architecture(GroupedQueryAttention, sparse_mlp, rms_norm_rounded_once),
    # The text parts of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: with text alone, a position has three equal coordinates.
    "qwen2_vl_text": Architecture(_QWEN2, dense_mlp),
    "qwen2_5_vl_text": Architecture(_QWEN2, dense_mlp),
    "qwen3_vl_text": Architecture(_QWEN3, dense_mlp),
    # Qwen3-Next (Qwen Team 2025) and Qwen3.5 (2026): three gated delta nets to one attention, whose result has a gate.
    "qwen3_next": Architecture(_GATED, sparse_mlp, rms_norm_from_one, recurrent=GatedDeltaNet),
    "qwen3_5_text": Architecture(_GATED, dense_mlp, rms_norm_from_one, recurrent=GatedDeltaNet),
    "qwen3_5_moe_text": Architecture(_GATED, sparse_mlp, rms_norm_from_one, recurrent=GatedDeltaNet),
    # LFM2 (Liquid AI 2025, arXiv:2511.23404), dense and with experts: gated short convolutions, and a few attentions.
    "lfm2": _LFM2(_LFM2_MLP),
    "lfm2_moe": _LFM2(partial(sparse_mlp, dense=_LFM2_MLP)),
    # Nemotron-H (NVIDIA 2025, arXiv:2504.03624) and Nemotron 3: a layer is one part, in many of them Mamba2.
    "nemotron_h": Architecture(
        GroupedQueryAttention,
        partial(sparse_mlp, dense=lambda config, weights, layer: UngatedMLP(config, weights / "mixer")),
        rms_norm_rounded_once,
        NormNames("norm"),
        attention_name="mixer",
        recurrent=Mamba2Layer,
        recurrent_name="mixer",
        embedding_name="embeddings",
        end_norm="norm_f",
        has_single_parts=True,
    ),
    # Qwen3 with experts, from the same report.
    "qwen3_moe": Architecture(_QWEN3, sparse_mlp),
    # Jiang et al. 2024, arXiv:2401.04088: Mistral with experts.
    "mixtral": Architecture(GroupedQueryAttention, sparse_mlp),
    # DeepSeek-AI 2024, arXiv:2405.04434: latent attention, and experts beside shared ones.
    "deepseek_v2": Architecture(LatentAttention, sparse_mlp),
    # DeepSeek-AI 2024, arXiv:2412.19437: DeepSeek-V2 with another router.
    "deepseek_v3": Architecture(LatentAttention, sparse_mlp),
    # GLM-4.7-Flash (Zhipu AI 2026): DeepSeek-V3 with other sizes.
    "glm4_moe_lite": Architecture(LatentAttention, sparse_mlp),
    # Youtu-LLM (Tencent 2025, arXiv:2512.24618): latent attention without experts.
    "youtu": Architecture(LatentAttention, dense_mlp),
}
_MODERNBERT = Architecture(
    _attention(stored_as="Wqkv", out="Wo"),
    partial(dense_mlp, stored_as="Wi", down="Wo"),
    layer_norm,
    NormNames("attn_norm", None, "mlp_norm", None),
    attention_name="attn",
)
ENCODERS = {
    # Devlin et al. 2018, arXiv:1810.04805. A classifier reads the result of BERT's pooler.
    "bert": EncoderArchitecture("bert", head_dense="bert.pooler.dense", head_out="classifier"),
    # Liu et al. 2019, arXiv:1907.11692: with positions counted from the padding token's id, which the configuration
    # states, and a classifier of its own.
    "roberta": EncoderArchitecture("roberta", head_dense="classifier.dense", head_out="classifier.out_proj"),
    # Conneau et al. 2019, arXiv:1911.02116: RoBERTa with another vocabulary.
    "xlm-roberta": EncoderArchitecture("roberta", head_dense="classifier.dense", head_out="classifier.out_proj"),
    # Warner et al. 2024, arXiv:2412.13663: with a decoder's layers, and windows in most of them.
    "modernbert": EncoderArchitecture("model", head_dense="head.dense", head_out="classifier", layers=_MODERNBERT),
}


def check_supported(config: ModelConfig) -> None:
    """Raises ConfigError if Penstock does not support the architecture."""
    if config.model_type not in (*MODELS, *ENCODERS):
        raise ConfigError(
            f"model_type {config.model_type!r} ({config.architecture or 'no architecture named'}) is not supported; "
            f"supported: {', '.join((*MODELS, *ENCODERS))}"
        )


def build_model(
    config: ModelConfig,
    weights: Weights,
    aux_layers: tuple[int, ...] = (),
    stage: Stage | None = None,
    feeds_head: bool = False,
    has_logits: bool = True,
) -> Decoder:
    """Builds the model or a stage of it, which also returns its residual stream at the inputs of `aux_layers`
    (ascending); `feeds_head` and `has_logits` are as for `Decoder`.

    Raises ConfigError for an unknown architecture or an unsuitable checkpoint.
    """
    check_supported(config)
    _check_sources(config, stage)
    return Decoder(MODELS[config.model_type], config, weights, aux_layers, stage, feeds_head, has_logits)


def _check_sources(config: ModelConfig, stage: Stage | None) -> None:
    """Raises ConfigError if a layer of the stage reads the keys and values of a layer in another one."""
    count, first = config.num_hidden_layers, config.first_source
    layers = range(count) if stage is None else stage.layers
    for layer in layers:
        source = config.kv_source(layer)
        if source not in layers and first is not None:
            raise ConfigError(
                f"layer {layer} of {config.path} reads the keys and values of layer {source}, which is in an earlier "
                f"stage of the pipeline: let the last stage begin with layer {first} or an earlier one "
                f"(pipeline_layers={first},{count - first} of two stages), or use tensor_parallel_size instead"
            )


def build_encoder(config: ModelConfig, weights: Weights) -> Encoder:
    """Builds the encoder. Raises ConfigError as `build_model` does."""
    check_supported(config)
    architecture = ENCODERS[config.model_type]
    return (Encoder if architecture.layers is None else GatedEncoder)(architecture, config, weights)


def architecture_of(config: ModelConfig) -> Architecture | EncoderArchitecture:
    """Returns how the family's checkpoints name their tensors."""
    return (MODELS if config.encoder is None else ENCODERS)[config.model_type]
