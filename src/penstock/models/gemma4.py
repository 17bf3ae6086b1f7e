"""Gemma 4 (Google DeepMind 2026): the parts of its layers that no other family has.

    stream -> norm -> attention -> norm, + -> MLP (and experts) -> norm, + -> gate -> * own input -> norm, + -> * scalar

In E2B and E4B every layer has an input of its own besides the stream, a vector for each token (`PerLayerInputs`); in
others the gate, and what follows it up to the scalar, is missing.
Shapes: T tokens of this step, H hidden size, L layers, P size of a layer's own input.
"""

from __future__ import annotations

import torch

from penstock.attention.forward_context import ForwardContext
from penstock.config.model import ModelConfig
from penstock.kernels.gelu import gelu_times
from penstock.kernels.residual import add, scale
from penstock.models.norms import rms_norm_rounded_once
from penstock.models.parts import FeedForward, GatedMLP
from penstock.models.weights import Weights


def gemma4_mlp(config: ModelConfig, weights: Weights, layer: int) -> FeedForward:
    """The layer's MLP and the norm before it: the input is the stream, which experts beside the MLP read too."""
    is_wide = config.has_wide_readers and config.kv_source(layer) != layer
    mlp = GatedMLP(config, weights / "mlp", config.intermediate_size * (2 if is_wide else 1))
    norm = rms_norm_rounded_once(weights, "pre_feedforward_layernorm", config.hidden_size, config.rms_norm_eps)
    return lambda x: mlp(norm(x))


class PerLayerInputs:
    """The layers' own inputs: the mean of what a table has of the token, and of a projection of its vector, times the
    square root of two. The table may have fewer tokens than the vocabulary: others have its first row, as in Gemma 3n.
    """

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        inputs = config.per_layer_inputs
        assert inputs is not None
        self._size, width, self._vocab_size = inputs.size, config.num_hidden_layers * inputs.size, inputs.vocab_size
        self._table = weights.embedding("embed_tokens_per_layer", inputs.vocab_size, width)
        # Rounded to the dtype, as that of the tokens' vectors is.
        self._table_scale = float(torch.tensor(inputs.size**0.5, dtype=weights.dtype))
        self._projection = weights.whole_linear("per_layer_model_projection", width, config.hidden_size)
        self._projection_scale = config.hidden_size**-0.5
        self._norm = rms_norm_rounded_once(weights, "per_layer_projection_norm", inputs.size, config.rms_norm_eps)

    def __call__(self, input_ids: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """[T] and [T, H] -> [T, L * P]."""
        projected = self._projection(embedded) * self._projection_scale
        projected = self._norm(projected.view(-1, self._size)).view(projected.shape)
        stored = self._table(input_ids.where(input_ids < self._vocab_size, 0))
        return (projected + stored * self._table_scale) * 2**-0.5


class Gemma4LayerEnd:
    """Adds what a layer makes of its own input, if it has one, and multiplies the stream by the layer's scalar."""

    def __init__(self, config: ModelConfig, weights: Weights, layer: int) -> None:
        self._scalar = float(weights.tensor("layer_scalar", 1))
        self._own: slice | None = None
        if config.per_layer_inputs is not None:
            hidden, size = config.hidden_size, config.per_layer_inputs.size
            self._own = slice(layer * size, (layer + 1) * size)
            self._gate = weights.whole_linear("per_layer_input_gate", size, hidden)
            self._projection = weights.whole_linear("per_layer_projection", hidden, size)
            self._norm = rms_norm_rounded_once(weights, "post_per_layer_input_norm", hidden, config.rms_norm_eps)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """See `LayerEnd`. The next layer adds the result to the stream: both are multiplied."""
        if self._own is not None:
            assert context.per_layer is not None, "a step without the inputs of layers"
            add(x, residual)
            gated = gelu_times(self._gate(residual), context.per_layer[:, self._own], is_tanh=True)  # -> [T, P]
            x = self._norm(self._projection(gated))  # -> [T, H]
        scale(residual, self._scalar)
        scale(x, self._scalar)
        return x
