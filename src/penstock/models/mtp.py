"""Multi-token prediction (Gloeckle et al. 2024, arXiv:2404.19737), chained as in DeepSeek-V3 (arXiv:2412.19437, 2.2).

A module of one decoder layer predicts one token further than the model:

    hidden state at t, token t + 1 -> norm each, concatenate -> fc -> layer -> norm -> the model's head -> token t + 2

and may be given its own hidden state and prediction to predict further tokens. Two checkpoint layouts are supported:
Qwen3-Next's (`mtp.fc`, `mtp.layers.0`, embedding first) and DeepSeek's (`model.layers.N.eh_proj`, `enorm`, `hnorm`,
embedding first, with a `shared_head.norm`), N being the number of the model's own layers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from penstock.attention.forward_context import ForwardContext
from penstock.config.model import ModelConfig
from penstock.models.decoder import Decoder, DecoderLayer
from penstock.models.interface import Model, ModelOutput
from penstock.models.sources.source import WeightSource
from penstock.models.weights import Weights
from penstock.utils.errors import ConfigError


@dataclass(frozen=True, slots=True)
class _Layout:
    """The names of the module's parts in a checkpoint."""

    root: tuple[str, ...]
    layer: tuple[str, ...]
    fc: str
    embedding_norm: str
    hidden_norm: str
    norm: str


_QWEN3_NEXT = _Layout(("mtp",), ("layers", "0"), "fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
_DEEPSEEK = _Layout(("model", "layers", "{layer}"), (), "eh_proj", "enorm", "hnorm", "shared_head.norm")


class MultiTokenPredictor:
    def __init__(self, config: ModelConfig, weights: Weights, model: Decoder, layout: _Layout) -> None:
        number, hidden, eps = config.num_hidden_layers, config.hidden_size, config.rms_norm_eps
        for part in layout.root:
            weights = weights / part.format(layer=number)
        self.fc = weights.whole_linear(layout.fc, hidden, 2 * hidden)
        read_norm = model.architecture.read_norm
        self.embedding_norm = read_norm(weights, layout.embedding_norm, hidden, eps)
        self.hidden_norm = read_norm(weights, layout.hidden_norm, hidden, eps)
        self.norm = read_norm(weights, layout.norm, hidden, eps)
        for part in layout.layer:
            weights = weights / part
        # The module's layer comes after the model's, and attends like its last one.
        config = replace(config, layer_windows=(*config.layer_windows, config.layer_windows[-1]))
        rotary = model.rotary.table(config.layer_rope(number - 1), config.layer_rotary_dim(number - 1))
        self.layer = DecoderLayer(model.architecture, config, weights, number, rotary)
        self.embedding = model.embedding
        self.compute_logits = model.compute_logits
        self.kv_cache_specs = self.layer.attention.kv_cache_specs

    def enter(self, output: ModelOutput) -> torch.Tensor:
        return output.hidden

    def forward(
        self, hidden: torch.Tensor, next_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """Hidden states at `positions` and the tokens after them -> [num_tokens, hidden_size] for `compute_logits`."""
        embedded = self.embedding_norm(self.embedding(next_ids))
        residual = self.fc.kept(torch.cat((embedded, self.hidden_norm(hidden)), -1))
        x = self.layer(torch.zeros_like(residual), residual, positions, context)
        return self.norm.add(x, residual)


def build_mtp(config: ModelConfig, weights: Weights, model: Model) -> MultiTokenPredictor:
    """Builds the checkpoint's module. Raises ConfigError if it has none."""
    assert isinstance(model, Decoder), type(model)
    for layout, probe in _probes(config):
        if weights.has(probe):
            return MultiTokenPredictor(config, weights, model, layout)
    raise ConfigError(
        f"{config.path} has no multi-token-prediction module (mtp.fc.weight or {_deepseek_probe(config)}): choose "
        "another method in speculative_config"
    )


def has_mtp(config: ModelConfig, source: WeightSource) -> bool:
    """Returns whether the checkpoint has a module."""
    return any(source.has(probe) for _, probe in _probes(config))


def _probes(config: ModelConfig) -> tuple[tuple[_Layout, str], ...]:
    """Returns a tensor's name that identifies each layout."""
    return (_QWEN3_NEXT, "mtp.fc.weight"), (_DEEPSEEK, _deepseek_probe(config))


def _deepseek_probe(config: ModelConfig) -> str:
    return f"model.layers.{config.num_hidden_layers}.eh_proj.weight"
