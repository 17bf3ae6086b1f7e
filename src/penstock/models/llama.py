"""Llama 2 and 3 (Touvron et al. 2023, arXiv:2307.09288): the decoder that Mistral, Qwen2 and Qwen3 vary.

        ids -> embedding -> [ norm -> attention -> + -> norm -> MLP -> + ] x layers -> norm -> logits

The residual stream is one tensor, updated in place by the fused add-and-normalise at the head of every sub-layer.
Shapes: T tokens of this step, H hidden size, Q and KV heads of size D, I intermediate size.
"""

from __future__ import annotations

import torch

from penstock.attention.metadata import ForwardContext
from penstock.config.model import ModelConfig
from penstock.kernels.silu_and_mul import silu_and_mul
from penstock.layers.attention import PagedAttention
from penstock.layers.embedding import Embedding
from penstock.layers.norm import RMSNorm
from penstock.layers.rotary import rotary_table
from penstock.models.interface import ModelOutput
from penstock.models.weights import Weights


class LlamaAttention:
    qkv_bias = False
    inputs = 1  # how many hidden states stand side by side in a row of the input

    def __init__(self, config: ModelConfig, weights: Weights, layer: int, rotary: torch.Tensor) -> None:
        width, head = self.inputs * config.hidden_size, config.head_dim
        sizes = {
            "q_proj": config.num_attention_heads * head,
            "k_proj": config.num_key_value_heads * head,
            "v_proj": config.num_key_value_heads * head,
        }
        self.qkv = weights.linear(sizes, width, self.qkv_bias or config.attention_bias)
        self.attend = self.make_attention(config, weights, layer, rotary)
        self.out = weights.linear(
            {"o_proj": config.hidden_size}, config.num_attention_heads * head, config.attention_bias
        )

    def make_attention(self, config: ModelConfig, weights: Weights, layer: int, rotary: torch.Tensor) -> PagedAttention:
        return PagedAttention(config, layer, rotary)

    def __call__(self, x: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        return self.out(self.attend(self.qkv(x), positions, context))  # [T, H] -> [T, (Q + 2 KV) D] -> [T, H]


class LlamaMLP:
    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_up = weights.linear({"gate_proj": inner, "up_proj": inner}, hidden, config.mlp_bias)
        self.down = weights.linear({"down_proj": hidden}, inner, config.mlp_bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(silu_and_mul(self.gate_up(x)))  # [T, H] -> [T, 2 I] -> [T, I] -> [T, H]


class LlamaDecoderLayer:
    attention_class = LlamaAttention

    def __init__(self, config: ModelConfig, weights: Weights, layer: int, rotary: torch.Tensor) -> None:
        eps = config.rms_norm_eps
        self.input_norm = RMSNorm(weights.tensor("input_layernorm.weight", config.hidden_size), eps)
        self.attention = self.attention_class(config, weights / "self_attn", layer, rotary)
        self.post_norm = RMSNorm(weights.tensor("post_attention_layernorm.weight", config.hidden_size), eps)
        self.mlp = LlamaMLP(config, weights / "mlp")

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, positions: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """`x` [T, H] is what the layer below adds to the residual; returns what this one adds."""
        x = self.attention(self.input_norm.add(x, residual), positions, context)
        return self.mlp(self.post_norm.add(x, residual))


class LlamaForCausalLM:
    layer_class = LlamaDecoderLayer

    def __init__(self, config: ModelConfig, weights: Weights, aux_layers: tuple[int, ...] = ()) -> None:
        """`aux_layers` are those at whose inputs the residual stream is kept, in `ModelOutput`'s order."""
        vocab, hidden = config.vocab_size, config.hidden_size
        inner = weights / "model"
        self.embedding = Embedding(inner.tensors({"embed_tokens.weight": vocab}, hidden))
        rotary = rotary_table(config.rope, config.head_dim, config.max_position_embeddings)
        self.rotary = rotary.to(self.embedding.weight.device)
        self.layers = [
            self.layer_class(config, inner / "layers" / layer, layer, self.rotary)
            for layer in range(config.num_hidden_layers)
        ]
        self.norm = RMSNorm(inner.tensor("norm.weight", hidden), config.rms_norm_eps)
        tied = config.tie_word_embeddings
        self.head = weights.linear_of(self.embedding.weight) if tied else weights.linear({"lm_head": vocab}, hidden)
        self.kv_cache_specs = {layer.attention.attend.name: layer.attention.attend.spec for layer in self.layers}
        self.aux_layers = aux_layers

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> ModelOutput:
        residual = self.embedding(input_ids)
        x = torch.zeros_like(residual)
        kept = [residual[:, :0]]  # what is left where nobody asked
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
