"""The supported architectures: each Hugging Face `model_type` has a module of its name, with underscores, imported on
first use.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from penstock.config.model import ModelConfig
from penstock.models.decoder import Decoder
from penstock.models.encoder import Encoder, EncoderArchitecture
from penstock.models.weights import Weights
from penstock.parallel.topology import Stage
from penstock.utils.errors import ConfigError

MODELS = ("llama", "mistral", "qwen2", "qwen3")
ENCODERS = ("bert", "roberta", "xlm-roberta")


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
    return Decoder(_module(config).ARCHITECTURE, config, weights, aux_layers, stage, feeds_head, has_logits)


def build_encoder(config: ModelConfig, weights: Weights) -> Encoder:
    """Builds the encoder. Raises ConfigError as `build_model` does."""
    check_supported(config)
    return Encoder(encoder_architecture(config), config, weights)


def encoder_architecture(config: ModelConfig) -> EncoderArchitecture:
    """Returns how an encoder's checkpoints name their tensors."""
    return _module(config).ARCHITECTURE


def _module(config: ModelConfig) -> ModuleType:
    return importlib.import_module(f"penstock.models.{config.model_type.replace('-', '_')}")
