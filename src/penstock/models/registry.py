"""Which architectures there are: Hugging Face `model_type` -> module and class, imported when asked for."""

from __future__ import annotations

import importlib

from penstock.config.model import ModelConfig
from penstock.models.interface import Model
from penstock.models.weights import Weights
from penstock.utils.errors import ConfigError

MODELS = {
    "llama": ("penstock.models.llama", "LlamaForCausalLM"),
    "mistral": ("penstock.models.mistral", "MistralForCausalLM"),
    "qwen2": ("penstock.models.qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("penstock.models.qwen3", "Qwen3ForCausalLM"),
}


def check_supported(config: ModelConfig) -> None:
    """Raises ConfigError when Penstock does not have the architecture."""
    if config.model_type not in MODELS:
        raise ConfigError(
            f"model_type {config.model_type!r} ({config.architecture or 'no architecture named'}) is not supported; "
            f"supported: {', '.join(MODELS)}"
        )


def build_model(config: ModelConfig, weights: Weights, aux_layers: tuple[int, ...] = ()) -> Model:
    """The finished model, which hands out its residual stream at the inputs of `aux_layers` (ascending).

    Raises ConfigError for an unknown architecture or an unfit checkpoint.
    """
    check_supported(config)
    module, name = MODELS[config.model_type]
    return getattr(importlib.import_module(module), name)(config, weights, aux_layers)
