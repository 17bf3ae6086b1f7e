"""One attention layer's heads on the paged KV cache: rotate, store, attend."""

from __future__ import annotations

import torch

from penstock.attention.metadata import ForwardContext
from penstock.config.model import ModelConfig
from penstock.kernels.paged_attention import paged_attention
from penstock.kernels.rope_and_store_kv import rope_and_store_kv
from penstock.messages.kv_cache_spec import KVCacheSpec


class PagedAttention:
    """Holds no weights but the optional per-head norms of queries and keys (Qwen3)."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        rotary: torch.Tensor,
        q_norm: torch.Tensor | None = None,
        k_norm: torch.Tensor | None = None,
    ) -> None:
        self.name = f"model.layers.{layer}.self_attn"
        self.spec = KVCacheSpec(
            num_kv_heads=config.num_key_value_heads,
            head_size=config.head_dim,
            dtype=config.dtype,
            sliding_window=config.layer_windows[layer],
        )
        self._num_heads = config.num_attention_heads
        self._scale = config.head_dim**-0.5
        self._rotary = rotary  # [max_position, head_dim] float32: cos, sin
        self._q_norm = q_norm
        self._k_norm = k_norm
        self._eps = config.rms_norm_eps

    def __call__(self, qkv: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """[num_tokens, (num_heads + 2 * num_kv_heads) * head_size] -> [num_tokens, num_heads * head_size].

        The keys and values of these tokens are in the cache afterwards; `qkv` is overwritten.
        """
        metadata = context.metadata[self.name]
        kv_cache = context.kv_caches[self.name]
        context.hooks.wait_for_layer_load(self.name)
        rope_and_store_kv(
            qkv,
            self._num_heads,
            self.spec.num_kv_heads,
            self._rotary,
            positions,
            kv_cache,
            metadata.slot_mapping,
            self._q_norm,
            self._k_norm,
            self._eps,
        )
        queries = qkv[:, : self._num_heads * self.spec.head_size].unflatten(1, (self._num_heads, self.spec.head_size))
        context.hooks.save_kv_layer(self.name)
        return paged_attention(
            queries,
            kv_cache,
            metadata.block_table,
            metadata.query_start_loc,
            metadata.seq_lens,
            self._scale,
            self.spec.sliding_window,
        )
