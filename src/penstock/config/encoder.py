"""The fields that an encoder has besides those of every transformer, read from `config.json`.

An encoder reads a prompt in both directions: every token attends to all of the prompt, so that a step computes a whole
prompt and no KV of it is kept. Only this module decides which model types are encoders.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.config.fields import read_count, read_number
from penstock.utils.errors import ConfigError

_MODEL_TYPES = ("bert", "roberta", "xlm-roberta")
# Their positions start one after the padding token's id.
_COUNTED_FROM_PADDING = ("roberta", "xlm-roberta")
_DEFAULT_PADDING = 1
_HEAD_STEP = 8
_IS_TANH_OF_ACTIVATION = {"gelu": False, "gelu_new": True, "gelu_fast": True, "gelu_pytorch_tanh": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """The sizes of the embedding tables, the epsilon of layer norms, and the form of GELU.

    A prompt's first token has the position `first_position` of the table.
    """

    num_positions: int
    first_position: int
    num_token_types: int
    layer_norm_eps: float
    has_tanh_gelu: bool
    has_gated_layers: bool = False  # a decoder's layers, but with attention in both directions


def read_encoder(raw: Mapping[str, Any]) -> EncoderConfig | None:
    """Reads the contents of a `config.json`; None if it describes a decoder. Raises ConfigError for variants."""
    model_type = raw.get("model_type")
    if model_type == "modernbert":
        _check_heads(read_count(raw, "hidden_size"), read_count(raw, "num_attention_heads"))
        return EncoderConfig(
            num_positions=read_count(raw, "max_position_embeddings"),
            first_position=0,
            num_token_types=1,
            layer_norm_eps=read_number(raw, "norm_eps"),
            has_tanh_gelu=False,
            has_gated_layers=True,
        )
    if model_type not in _MODEL_TYPES:
        if not raw.get("is_causal", True):
            raise ConfigError(f"is_causal of a {model_type} must be true: only encoders attend in both directions")
        return None
    activation = raw.get("hidden_act", "gelu")
    if activation not in _IS_TANH_OF_ACTIVATION:
        known = ", ".join(_IS_TANH_OF_ACTIVATION)
        raise ConfigError(f"hidden_act of a {model_type} must be one of {known}, got {activation!r}")
    if raw.get("position_embedding_type", "absolute") != "absolute":
        raise ConfigError(f"position_embedding_type must be absolute, got {raw['position_embedding_type']!r}")
    if raw.get("is_decoder") or raw.get("add_cross_attention"):
        raise ConfigError(f"a {model_type} with is_decoder or add_cross_attention is not supported")
    _check_heads(read_count(raw, "hidden_size", 768), read_count(raw, "num_attention_heads", 12))
    padding = raw.get("pad_token_id")
    first = (_DEFAULT_PADDING if padding is None else int(padding)) + 1 if model_type in _COUNTED_FROM_PADDING else 0
    return EncoderConfig(
        num_positions=read_count(raw, "max_position_embeddings", 512, least=first + 2),
        first_position=first,
        num_token_types=read_count(raw, "type_vocab_size", 2),
        layer_norm_eps=read_number(raw, "layer_norm_eps", 1e-12),
        has_tanh_gelu=_IS_TANH_OF_ACTIVATION[activation],
    )


def _check_heads(hidden: int, heads: int) -> None:
    if hidden % (_HEAD_STEP * heads):
        raise ConfigError(
            f"hidden_size={hidden} and num_attention_heads={heads} give a head size of {hidden / heads:g}; it must be "
            f"a multiple of {_HEAD_STEP}"
        )
