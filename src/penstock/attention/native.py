"""Attention on a CPU, by the native kernels or their torch references."""

from __future__ import annotations

from torch import Tensor

from penstock.attention.backend import AttentionHeads, AttentionMetadata
from penstock.kernels.paged_attention import bidirectional_attention, latent_attention, paged_attention
from penstock.kernels.rope_and_store_kv import rope_and_store_kv


class NativeAttention:
    graph_contexts: tuple[int, ...] = ()
    captures_ragged = True
    captures_mixed = True
    reads_unseen = False
    runs_encoders = True

    def attend(
        self, qkv: Tensor, positions: Tensor, heads: AttentionHeads, kv_cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """See `AttentionBackend.attend`."""
        rotate_and_store(qkv, positions, heads, kv_cache, metadata)
        requests = (metadata.block_table, metadata.query_start_loc, metadata.seq_lens)
        if not heads.is_causal:
            return bidirectional_attention(queries_of(qkv, heads), kv_cache, *requests, heads.softmax)
        if len(heads.spec.planes) == 1:
            return latent_attention(queries_of(qkv, heads), kv_cache, *requests, heads.softmax, heads.value_size)
        return paged_attention(queries_of(qkv, heads), kv_cache, *requests, heads.softmax)


def queries_of(qkv: Tensor, heads: AttentionHeads) -> Tensor:
    """Returns [num_tokens, num_heads, head_size]: a view of `qkv`."""
    size = heads.keys.head_size
    return qkv[:, : heads.num_heads * size].unflatten(1, (heads.num_heads, size))


def rotate_and_store(
    qkv: Tensor, positions: Tensor, heads: AttentionHeads, kv_cache: Tensor, metadata: AttentionMetadata
) -> None:
    """Rotates the queries in `qkv`, and stores rotated keys, and values, if there are any."""
    num_kv_heads = heads.keys.num_heads if heads.has_own_kv else 0
    tokens = (positions, kv_cache[:, :, :num_kv_heads], metadata.slot_mapping)
    norms = (heads.q_norm, heads.k_norm, heads.eps, heads.v_norm)
    rope_and_store_kv(qkv, heads.num_heads, num_kv_heads, heads.rotary, *tokens, *norms)
