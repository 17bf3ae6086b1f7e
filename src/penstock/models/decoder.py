"""The decoder that an `Architecture` fills with its parts.

        ids -> embedding -> [ norm -> attention -> + -> norm -> feed-forward -> + ] x layers -> norm -> logits

The residual stream is one tensor, updated in place by the fused add-and-normalise at the head of every sub-layer.
Shapes: T tokens of this step, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from penstock.attention.metadata import ForwardContext
from penstock.config.model import ModelConfig
from penstock.layers.embedding import Embedding
from penstock.layers.norm import RMSNorm
from penstock.layers.rotary import rotary_table
from penstock.models.interface import ModelOutput
from penstock.models.parts import Attention, FeedForward
from penstock.models.weights import Weights


@dataclass(frozen=True, slots=True)
class Architecture:
    """What makes the parts of a layer, each from the configuration and the weights under the part's own prefix.

    The attention is told the number of its layer and the rotary table, too.
    """

    attention: Callable[[ModelConfig, Weights, int, torch.Tensor], Attention]
    feed_forward: Callable[[ModelConfig, Weights], FeedForward]


class DecoderLayer:
    def __init__(
        self, architecture: Architecture, config: ModelConfig, weights: Weights, layer: int, rotary: torch.Tensor
    ) -> None:
        eps = config.rms_norm_eps
        self.input_norm = RMSNorm(weights.tensor("input_layernorm.weight", config.hidden_size), eps)
        self.attention = architecture.attention(config, weights / "self_attn", layer, rotary)
        self.post_norm = RMSNorm(weights.tensor("post_attention_layernorm.weight", config.hidden_size), eps)
        self.feed_forward = architecture.feed_forward(config, weights / "mlp")

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, positions: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """`x` [T, H] is what the layer below adds to the residual; returns what this one adds."""
        x = self.attention(self.input_norm.add(x, residual), positions, context)
        return self.feed_forward(self.post_norm.add(x, residual))


class Decoder:
    """A `Model`."""

    def __init__(
        self, architecture: Architecture, config: ModelConfig, weights: Weights, aux_layers: tuple[int, ...] = ()
    ) -> None:
        """`aux_layers` are those at whose inputs the residual stream is kept, in `ModelOutput`'s order."""
        vocab, hidden = config.vocab_size, config.hidden_size
        inner = weights / "model"
        self.architecture = architecture
        self.embedding = Embedding(inner.tensors({"embed_tokens.weight": vocab}, hidden))
        rotary = rotary_table(config.rope, config.head_dim, config.max_position_embeddings)
        self.rotary = rotary.to(self.embedding.weight.device)
        self.layers = [
            DecoderLayer(architecture, config, inner / "layers" / layer, layer, self.rotary)
            for layer in range(config.num_hidden_layers)
        ]
        self.norm = RMSNorm(inner.tensor("norm.weight", hidden), config.rms_norm_eps)
        if config.tie_word_embeddings:
            self.head = weights.linear_of("lm_head", self.embedding.weight, is_wide=True)
        else:
            self.head = weights.linear({"lm_head": vocab}, hidden, is_wide=True)
        self.logits_dtype = self.head.out_dtype
        specs = [layer.attention.kv_cache_specs for layer in self.layers]
        self.kv_cache_specs = {name: spec for of_layer in specs for name, spec in of_layer.items()}
        self.aux_layers = aux_layers

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> ModelOutput:
        residual = self.embedding(input_ids)
        x = torch.zeros_like(residual)
        kept = [residual[:, :0]]  # the result where no layer is asked for
        for number, layer in enumerate(self.layers):
            if number in self.aux_layers:
                kept.append(residual + x)
            x = layer(x, residual, positions, context)
        hidden = self.norm.add(x, residual)
        if len(self.layers) in self.aux_layers:
            kept.append(residual)
        return ModelOutput(hidden, torch.cat(kept, -1))

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden)
