"""The decoder, whose parts an `Architecture` provides.

        ids -> embedding -> [ norm -> attention -> + -> norm -> feed-forward -> + ] x layers -> norm -> logits

The residual stream is one tensor, updated in place by the fused add-and-normalise at the head of every sub-layer. A
stage of a pipeline has a range of the layers, the first stage the embedding and the last one the norm and the head.
Shapes: T tokens of this step, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from penstock.attention.forward_context import ForwardContext
from penstock.config.model import ModelConfig
from penstock.layers.embedding import Embedding
from penstock.layers.linear import GatheredLinear
from penstock.layers.norm import RMSNorm
from penstock.layers.rotary import rotary_table
from penstock.models.interface import ModelOutput
from penstock.models.parts import Attention, FeedForward
from penstock.models.weights import Weights
from penstock.parallel.topology import Stage


@dataclass(frozen=True, slots=True)
class IntermediateTensors:
    """The tensors passed from one layer to the next, and from one stage to the next."""

    x: torch.Tensor  # [T, H]: the layer below's addition to the residual stream
    residual: torch.Tensor  # [T, H]
    aux_hidden: torch.Tensor  # [T, kept so far * H]: as in `ModelOutput`


@dataclass(frozen=True, slots=True)
class Architecture:
    """Builds the parts of a layer, each from the configuration, weights and the number of its layer.

    The attention's weights have its own prefix, and it also receives the rotary table; the feed-forward part's have the
    layer's prefix.
    """

    attention: Callable[[ModelConfig, Weights, int, torch.Tensor], Attention]
    feed_forward: Callable[[ModelConfig, Weights, int], FeedForward]


class DecoderLayer:
    def __init__(
        self, architecture: Architecture, config: ModelConfig, weights: Weights, layer: int, rotary: torch.Tensor
    ) -> None:
        eps = config.rms_norm_eps
        self.input_norm = RMSNorm(weights.tensor("input_layernorm.weight", config.hidden_size), eps)
        self.attention = architecture.attention(config, weights / "self_attn", layer, rotary)
        self.post_norm = RMSNorm(weights.tensor("post_attention_layernorm.weight", config.hidden_size), eps)
        self.feed_forward = architecture.feed_forward(config, weights, layer)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, positions: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """`x` [T, H] is the layer below's addition to the residual; returns this layer's."""
        x = self.attention(self.input_norm.add(x, residual), positions, context)
        return self.feed_forward(self.post_norm.add(x, residual))


class Decoder:
    """A `Model`, or one stage of it."""

    def __init__(
        self,
        architecture: Architecture,
        config: ModelConfig,
        weights: Weights,
        aux_layers: tuple[int, ...] = (),
        stage: Stage | None = None,
        feeds_head: bool = False,
        has_logits: bool = True,
    ) -> None:
        """`aux_layers` are those at whose inputs the residual stream is kept, in `ModelOutput`'s order.

        `feeds_head`: a draft head after the last layer shares the embedding. Without `has_logits` there is no output
        head, and the checkpoint's tensors may lack the prefix that distinguishes them from it.
        """
        self.stage = stage or Stage(range(config.num_hidden_layers))
        self.architecture = architecture
        self.config = config
        self.aux_layers = aux_layers
        inner = weights / "model"
        if not has_logits and not inner.has("norm.weight"):
            inner = weights
        rotary = rotary_table(config.rope, config.rotary_dim, config.max_position_embeddings)
        self.rotary = rotary.to(weights.device)
        self.layers = [
            DecoderLayer(architecture, config, inner / "layers" / layer, layer, self.rotary)
            for layer in self.stage.layers
        ]
        specs = [layer.attention.kv_cache_specs for layer in self.layers]
        self.kv_cache_specs = {name: spec for of_layer in specs for name, spec in of_layer.items()}
        self._embedding: Embedding | None = None
        if self.stage.is_first or feeds_head or (has_logits and self.stage.is_last and config.tie_word_embeddings):
            self._embedding = inner.embedding("embed_tokens", config.vocab_size, config.hidden_size)
        self._end: DecoderEnd | None = None
        if self.stage.is_last:
            norm = RMSNorm(inner.tensor("norm.weight", config.hidden_size), config.rms_norm_eps)
            self._end = DecoderEnd(norm, _make_head(config, weights, self._embedding) if has_logits else None)

    @property
    def embedding(self) -> Embedding:
        """Exists on the first stage, and on a last one that needs it."""
        assert self._embedding is not None, f"{self.stage} has no embedding"
        return self._embedding

    @property
    def end(self) -> DecoderEnd:
        """Exists on the last stage."""
        assert self._end is not None, f"{self.stage} is not the last one"
        return self._end

    @property
    def head(self) -> GatheredLinear:
        """Exists on the last stage of a model with logits."""
        assert self.end.head is not None, "a model without logits"
        return self.end.head

    @property
    def logits_dtype(self) -> torch.dtype:
        return self.head.out_dtype

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> ModelOutput:
        """Runs a whole model."""
        return self.finish(self.run_layers(self.embed(input_ids), positions, context))

    def embed(self, input_ids: torch.Tensor) -> IntermediateTensors:
        """Returns the first layer's input."""
        residual = self.embedding(input_ids)
        return IntermediateTensors(torch.zeros_like(residual), residual, residual[:, :0])

    def run_layers(
        self, tensors: IntermediateTensors, positions: torch.Tensor, context: ForwardContext
    ) -> IntermediateTensors:
        """Runs the stage's layers. The given residual stream is overwritten."""
        x, residual = tensors.x, tensors.residual
        kept = [tensors.aux_hidden]
        for number, layer in zip(self.stage.layers, self.layers, strict=True):
            if number in self.aux_layers:
                kept.append(residual + x)
            x = layer(x, residual, positions, context)
        return IntermediateTensors(x, residual, torch.cat(kept, -1) if len(kept) > 1 else kept[0])

    def finish(self, tensors: IntermediateTensors) -> ModelOutput:
        """Runs the part after the last layer."""
        hidden, aux_hidden = self.end.norm.add(tensors.x, tensors.residual), tensors.aux_hidden
        if self.stage.layers.stop in self.aux_layers:
            aux_hidden = torch.cat((aux_hidden, tensors.residual), -1)
        return ModelOutput(hidden, aux_hidden)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden)


@dataclass(frozen=True, slots=True)
class DecoderEnd:
    """The part after the last layer; a model whose hidden states are the result has no output head."""

    norm: RMSNorm
    head: GatheredLinear | None


def _make_head(config: ModelConfig, weights: Weights, embedding: Embedding | None) -> GatheredLinear:
    vocab, hidden = config.vocab_size, config.hidden_size
    if not config.tie_word_embeddings:
        return weights.whole_linear("lm_head", vocab, hidden, is_wide=True)
    assert embedding is not None, "a tied head without an embedding"
    return weights.gathered(weights.linear_of("lm_head", embedding.weight, is_wide=True), vocab)
