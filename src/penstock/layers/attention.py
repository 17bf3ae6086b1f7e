"""The heads of one attention layer: a decoder's on the paged KV cache, and an encoder's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from penstock.attention.backend import AttentionHeads
from penstock.attention.forward_context import ForwardContext
from penstock.config.model import ModelConfig
from penstock.messages.kv_cache_spec import KVCacheSpec
from penstock.parallel.topology import HeadShare

WORKSPACE = "workspace"
"""`ForwardContext`'s name for the memory in which an encoder's layers, one after the other, store a step's prompts."""


class PagedAttention:
    """A rank's `own` heads. Its only weights are optional: per-head norms of queries and keys (Qwen3) and of values
    (Gemma 4), and the sinks of these heads (gpt-oss), [own queries] float32.

    A layer that reads the keys and values of another, `ModelConfig.kv_source`, stores nothing.

    Latent attention stores one vector for each token, which is key and, after its rotated dimensions, value.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        rotary: torch.Tensor,
        own: HeadShare,
        norms: Sequence[torch.Tensor] = (),
        sinks: torch.Tensor | None = None,
    ) -> None:
        """`norms` are those of queries, keys and values, as many as there are."""
        source = config.kv_source(layer)
        self.name = cache_name(source)
        self.has_own_kv = source == layer
        weights = dict(zip(("q_norm", "k_norm", "v_norm"), norms, strict=False))
        scores = {"softcap": config.attn_logit_softcapping, "sinks": sinks, "has_own_kv": self.has_own_kv}
        self._heads = _heads(config, own, rotary, layer, eps=config.rms_norm_eps, **weights, **scores)
        self.spec = self._heads.spec

    def __call__(self, qkv: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """[num_tokens, (num_heads + 2 * num_kv_heads) * head_size] -> [num_tokens, num_heads * head_size].

        Of latents: [num_tokens, (num_heads + 1) * head_size] -> [num_tokens, num_heads * value_size].

        The keys and values of these tokens are in the cache afterwards; `qkv` may be overwritten. A layer without its
        own has queries alone, and its source has run before.
        """
        kv_cache, metadata = context.kv_caches[self.name], context.metadata[self.name]
        if not self.has_own_kv:
            return context.attention.attend(qkv, positions, self._heads, kv_cache, metadata)
        context.hooks.wait_for_layer_load(self.name)
        out = context.attention.attend(qkv, positions, self._heads, kv_cache, metadata)
        context.hooks.save_kv_layer(self.name)
        return out


def cache_name(layer: int) -> str:
    """Returns the name of the cache of a layer's keys and values."""
    return f"model.layers.{layer}.self_attn"


class EncoderAttention:
    """A rank's `own` heads. Every token attends to all tokens of its prompt, which must be in the step as a whole.

    Keys and values are stored only during the call: the next layer uses the same memory.
    """

    def __init__(self, config: ModelConfig, own: HeadShare, rotary: torch.Tensor, layer: int) -> None:
        """A table `rotary` of width 0 means no rotation. A token sees those less than the layer's window away."""
        self._heads = _heads(config, own, rotary, layer, is_causal=False)
        self.spec = self._heads.spec

    def __call__(self, qkv: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """[num_tokens, 3 * num_heads * head_size] -> [num_tokens, num_heads * head_size]."""
        workspace, metadata = context.kv_caches[WORKSPACE], context.metadata[WORKSPACE]
        return context.attention.attend(qkv, positions, self._heads, workspace, metadata)


def _heads(config: ModelConfig, own: HeadShare, rotary: torch.Tensor, layer: int, **options: Any) -> AttentionHeads:
    if config.latent is not None:
        spec = KVCacheSpec.latents(config.head_dim, config.dtype)
        return AttentionHeads(spec, len(own.queries), config.latent.scale, rotary, **options)
    first, heads = own.kv.start, config.layer_heads(layer)
    window = config.layer_windows[layer]
    spec = KVCacheSpec.keys_and_values(
        len(own.kv), heads.size, config.kv_dtype, window, first_head=first, total_heads=heads.count
    )
    scale = heads.size**-0.5 if config.multipliers.attention is None else config.multipliers.attention
    return AttentionHeads(spec, len(own.queries), scale, rotary, **options)
