"""Qwen3, dense (Yang et al. 2025, arXiv:2505.09388): Llama with a norm on every query and key head."""

from __future__ import annotations

import torch

from penstock.config.model import ModelConfig
from penstock.layers.attention import PagedAttention
from penstock.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM
from penstock.models.weights import Weights


class Qwen3Attention(LlamaAttention):
    def make_attention(self, config: ModelConfig, weights: Weights, layer: int, rotary: torch.Tensor) -> PagedAttention:
        q_norm = weights.tensor("q_norm.weight", config.head_dim)
        k_norm = weights.tensor("k_norm.weight", config.head_dim)
        return PagedAttention(config, layer, rotary, q_norm, k_norm)


class Qwen3DecoderLayer(LlamaDecoderLayer):
    attention_class = Qwen3Attention


class Qwen3ForCausalLM(LlamaForCausalLM):
    layer_class = Qwen3DecoderLayer
