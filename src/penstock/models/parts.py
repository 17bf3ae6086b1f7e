"""The parts of a decoder's layers: attentions and feed-forwards.

A part takes its tensors when it is constructed and treats every row independently. It holds its own share of the
features that the ranks of a group divide; its inputs and outputs are whole. Shapes: T tokens of this step, H hidden
size, Q and KV heads of size D, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch

from penstock.attention.forward_context import ForwardContext
from penstock.config.model import ModelConfig
from penstock.kernels.silu_and_mul import silu_and_mul
from penstock.layers.attention import PagedAttention
from penstock.messages.kv_cache_spec import KVCacheSpec
from penstock.models.weights import Weights
from penstock.parallel.topology import head_share


class Attention(Protocol):
    kv_cache_specs: dict[str, KVCacheSpec]
    """Layer name -> its keys and values in the KV cache."""

    def __call__(self, x: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """[T, H] at `positions`, [T] -> [T, H]."""
        ...


FeedForward = Callable[[torch.Tensor], torch.Tensor]
"""[T, H] -> [T, H]."""


class GroupedQueryAttention:
    """Query heads that share heads of keys and values in groups (Ainslie et al. 2023, arXiv:2305.13245)."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        layer: int,
        rotary: torch.Tensor,
        qkv_bias: bool = False,
        head_norms: bool = False,
        num_inputs: int = 1,
    ) -> None:
        """`head_norms` normalises every query and key head. Rows hold `num_inputs` concatenated hidden states."""
        hidden, size = config.hidden_size, config.head_dim
        num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        sizes = {"q_proj": num_heads * size, "k_proj": num_kv_heads * size, "v_proj": num_kv_heads * size}
        heads = [head_share(num_heads, num_kv_heads, share) for share in weights.share.all]
        own = heads[weights.share.index]
        queries, kv = (range(part.start * size, part.stop * size) for part in (own.queries, own.kv))
        has_bias = qkv_bias or config.attention_bias
        self.qkv = weights.linear(
            sizes, num_inputs * hidden, has_bias, own={"q_proj": queries, "k_proj": kv, "v_proj": kv}
        )
        norms = [weights.tensor(f"{name}_norm.weight", size) for name in ("q", "k")] if head_norms else []
        sinks = _read_sinks(num_heads, own.queries, weights) if config.has_attention_sinks else None
        self.attend = PagedAttention(config, layer, rotary, own, *norms, sinks=sinks)
        self.out = weights.joining_linear(
            "o_proj", hidden, [len(each.queries) * size for each in heads], config.attention_bias
        )
        self.kv_cache_specs = {self.attend.name: self.attend.spec}

    def __call__(self, x: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        attended = self.attend(self.qkv(x), positions, context)  # [T, H] -> [T, (own Q + 2 own KV) D] -> [T, own Q D]
        return self.out(attended)  # -> [T, H]


def _read_sinks(num_heads: int, own: range, weights: Weights) -> torch.Tensor:
    """Returns [own heads] float32."""
    return replace(weights, dtype=torch.float32).tensors({"sinks": num_heads}, own={"sinks": own})


class GatedMLP:
    """SwiGLU (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, config: ModelConfig, weights: Weights, inner: int | None = None) -> None:
        """`inner` is I, by default the configuration's."""
        hidden, inner = config.hidden_size, config.intermediate_size if inner is None else inner
        self.gate_up = weights.linear({"gate_proj": inner, "up_proj": inner}, hidden, config.mlp_bias)
        self.down = weights.joining_linear("down_proj", hidden, weights.share.sizes(inner), config.mlp_bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        activated = silu_and_mul(self.gate_up(x))  # [T, H] -> [T, 2 own I] -> [T, own I]
        return self.down(activated)  # -> [T, H]


def dense_mlp(config: ModelConfig, weights: Weights, layer: int) -> GatedMLP:
    """The feed-forward part of every layer of a model without experts."""
    return GatedMLP(config, weights / "mlp")
