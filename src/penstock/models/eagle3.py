"""EAGLE-3 (Li et al. 2025, arXiv:2503.01840): a one-layer head that reads the target's residual stream at a few depths.

    streams at t -> fc -> h       token t + 1, h -> norm each, concatenate -> attention -> + -> norm -> MLP -> + -> h'
                                                                    h' -> norm -> head -> token t + 2

For later tokens its input is its own h' instead of fc's. The attention's output is added to h, or to h normalised, as
the checkpoint says. The head may have fewer tokens than the target: `d2t` holds the difference between each of its ids
and the target's.
"""

from __future__ import annotations

import torch

from penstock.attention.forward_context import ForwardContext
from penstock.config.eagle3 import Eagle3Config
from penstock.layers.norm import RMSNorm
from penstock.layers.rotary import rotary_table
from penstock.models.decoder import Decoder
from penstock.models.interface import Model, ModelOutput
from penstock.models.parts import AttentionVariant, GatedMLP, GroupedQueryAttention
from penstock.models.weights import Weights
from penstock.utils.errors import ConfigError


class Eagle3Head:
    def __init__(self, config: Eagle3Config, weights: Weights, model: Model) -> None:
        """Takes from `model` the embedding and the output head if the checkpoint lacks them. Raises ConfigError."""
        assert isinstance(model, Decoder), type(model)
        multipliers = model.config.multipliers
        if multipliers.embedding != 1.0 or multipliers.logits != 1.0 or multipliers.logits_cap:
            raise ConfigError(
                f"method eagle3 in speculative_config is not supported for a {model.config.model_type}, which "
                "multiplies its embeddings, or multiplies or caps its logits"
            )
        shape = config.shape
        hidden, eps = shape.hidden_size, shape.rms_norm_eps
        self.fc = weights.whole_linear("fc", hidden, len(config.aux_layers) * config.target_hidden_size)
        if weights.has("embed_tokens.weight") or hidden != config.target_hidden_size:
            self.embedding = weights.embedding("embed_tokens", shape.vocab_size, hidden)
        else:
            self.embedding = model.embedding
        layer = weights / "midlayer" if weights.has("midlayer.hidden_norm.weight") else weights / "layers" / 0
        self.input_norm = RMSNorm(layer.tensor("input_layernorm.weight", hidden), eps)
        self.hidden_norm = RMSNorm(layer.tensor("hidden_norm.weight", hidden), eps)
        rotary = rotary_table(shape.rope, shape.rotary_dim, shape.max_position_embeddings)
        rotary = rotary.to(weights.device)
        # Its rows are the embedding and the hidden state.
        self.attention = GroupedQueryAttention(shape, layer / "self_attn", 0, rotary, AttentionVariant(num_inputs=2))
        self.post_norm = RMSNorm(layer.tensor("post_attention_layernorm.weight", hidden), eps)
        self.mlp = GatedMLP(shape, layer / "mlp")
        self.norm = RMSNorm(weights.tensor("norm.weight", hidden), eps)
        self.head = model.head
        self.token_ids = torch.arange(config.draft_vocab_size, device=weights.device)
        self.vocab_size = shape.vocab_size
        is_reduced = config.draft_vocab_size < shape.vocab_size
        if is_reduced or hidden != config.target_hidden_size or weights.has("lm_head.weight"):
            self.head = weights.whole_linear("lm_head", config.draft_vocab_size, hidden, is_wide=True)
        if is_reduced:
            self.token_ids = self.token_ids + weights.integers("d2t", config.draft_vocab_size)
            self._check_token_ids(config)
        self.residual_is_normed = config.norm_before_residual
        self.kv_cache_specs = self.attention.kv_cache_specs

    def enter(self, output: ModelOutput) -> torch.Tensor:
        return self.fc.kept(output.aux_hidden)

    def forward(
        self, hidden: torch.Tensor, next_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """See `DraftHead.forward`; the result is before the norm."""
        normed = self.hidden_norm(hidden)
        x = torch.cat((self.input_norm(self.embedding(next_ids)), normed), -1)
        residual = normed if self.residual_is_normed else hidden.clone()
        x = self.mlp(self.post_norm.add(self.attention(x, positions, context), residual))
        return residual.add_(x)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.norm(hidden))
        if len(self.token_ids) == self.vocab_size:
            return logits
        return logits.new_full((len(logits), self.vocab_size), -torch.inf).index_copy_(1, self.token_ids, logits)

    def _check_token_ids(self, config: Eagle3Config) -> None:
        ids = self.token_ids.unique()
        if len(ids) != len(self.token_ids) or ids[0] < 0 or ids[-1] >= self.vocab_size:
            raise ConfigError(
                f"d2t of {config.shape.path} maps the head's tokens to ids {int(ids[0])} to {int(ids[-1])}, "
                f"{len(ids)} different ones; there must be {len(self.token_ids)} from 0 to {self.vocab_size - 1}"
            )
