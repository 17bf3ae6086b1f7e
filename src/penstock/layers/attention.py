"""The heads of one attention layer: a decoder's on the paged KV cache, and an encoder's."""

from __future__ import annotations

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
    """A rank's `own` heads. Its only weights are optional: per-head norms of queries and keys (Qwen3), and the sinks of
    these heads (gpt-oss), [own queries] float32.

    Latent attention stores one vector for each token, which is key and, after its rotated dimensions, value.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        rotary: torch.Tensor,
        own: HeadShare,
        q_norm: torch.Tensor | None = None,
        k_norm: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        self.name = f"model.layers.{layer}.self_attn"
        norms = {"q_norm": q_norm, "k_norm": k_norm, "eps": config.rms_norm_eps}
        scores = {"softcap": config.attn_logit_softcapping, "sinks": sinks}
        self._heads = _heads(config, own, rotary, config.layer_windows[layer], **norms, **scores)
        self.spec = self._heads.spec

    def __call__(self, qkv: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """[num_tokens, (num_heads + 2 * num_kv_heads) * head_size] -> [num_tokens, num_heads * head_size].

        Of latents: [num_tokens, (num_heads + 1) * head_size] -> [num_tokens, num_heads * value_size].

        The keys and values of these tokens are in the cache afterwards; `qkv` may be overwritten.
        """
        context.hooks.wait_for_layer_load(self.name)
        kv_cache, metadata = context.kv_caches[self.name], context.metadata[self.name]
        out = context.attention.attend(qkv, positions, self._heads, kv_cache, metadata)
        context.hooks.save_kv_layer(self.name)
        return out


class EncoderAttention:
    """A rank's `own` heads. Every token attends to all tokens of its prompt, which must be in the step as a whole.

    Keys and values are stored only during the call: the next layer uses the same memory.
    """

    def __init__(self, config: ModelConfig, own: HeadShare, rotary: torch.Tensor, window: int = 0) -> None:
        """A table `rotary` of width 0 means no rotation. A token sees those less than `window` away, 0: all of them."""
        self._heads = _heads(config, own, rotary, window, is_causal=False)
        self.spec = self._heads.spec

    def __call__(self, qkv: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """[num_tokens, 3 * num_heads * head_size] -> [num_tokens, num_heads * head_size]."""
        workspace, metadata = context.kv_caches[WORKSPACE], context.metadata[WORKSPACE]
        return context.attention.attend(qkv, positions, self._heads, workspace, metadata)


def _heads(
    config: ModelConfig, own: HeadShare, rotary: torch.Tensor, window: int = 0, **options: Any
) -> AttentionHeads:
    if config.latent is not None:
        spec = KVCacheSpec.latents(config.head_dim, config.dtype)
        return AttentionHeads(spec, len(own.queries), config.latent.scale, rotary, **options)
    first, total = own.kv.start, config.num_key_value_heads
    spec = KVCacheSpec.keys_and_values(
        len(own.kv), config.head_dim, config.kv_dtype, window, first_head=first, total_heads=total
    )
    scale = config.head_dim**-0.5 if config.multipliers.attention is None else config.multipliers.attention
    return AttentionHeads(spec, len(own.queries), scale, rotary, **options)
