"""Attention on a Hopper GPU by FlashAttention 3 (Shah et al. 2024, arXiv:2407.08608), package flash-attn-3.

Its function takes the exact lengths and the block table from the device and pages of any strides whose last dimension
is contiguous, so the cache is not copied: a view exchanges the two middle dimensions.
"""

from __future__ import annotations

from flash_attn_interface import flash_attn_with_kvcache  # pyright: ignore[reportMissingImports]
from torch import Tensor

from penstock.attention.backend import AttentionHeads, AttentionMetadata
from penstock.attention.library import LibraryLimits
from penstock.attention.native import queries_of, rotate_and_store
from penstock.messages.kv_cache_spec import KVCacheSpec

# Pages with a whole tile of keys (64 or more) are loaded by TMA, including uninitialised slots after the last token,
# and NaN times zero is NaN (flash-attention's issues 1745 and 2374). Smaller pages are loaded by token.
LIMITS = LibraryLimits(
    backend="flash_attention",
    head_sizes=(64, 80, 96, 128, 192, 256),
    block_sizes=range(8, 64, 8),
    max_group=256,
)


class FlashAttention:
    """Never waits. How it splits long contexts, and so a row's last bits, depends on the batch."""

    captures_ragged = True
    captures_mixed = False
    reads_unseen = True
    runs_encoders = False

    def __init__(self, max_model_len: int) -> None:
        # The launches depend on the block table's width and not on lengths.
        self.graph_contexts: tuple[int, ...] = (max_model_len,)
        self._served: set[tuple[int, KVCacheSpec]] = set()

    def attend(
        self, qkv: Tensor, positions: Tensor, heads: AttentionHeads, kv_cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """See `AttentionBackend.attend`. Rows that belong to no request have undefined content.

        Raises ConfigError for a layer that FlashAttention does not support.
        """
        LIMITS.check_kind(heads)
        layer = (heads.num_heads, heads.spec)
        if layer not in self._served:
            LIMITS.check(heads, kv_cache.shape[3])
            self._served.add(layer)
        rotate_and_store(qkv, positions, heads, kv_cache, metadata)
        keys, values = kv_cache.transpose(2, 3).unbind(1)  # each [num_blocks, block_size, num_kv_heads, head_size]
        # Both bounds count the neighbours of a query's own position; -1 means all.
        window = (heads.spec.sliding_window - 1, 0 if heads.spec.sliding_window else -1)
        out = flash_attn_with_kvcache(
            queries_of(qkv, heads),
            keys,
            values,
            cache_seqlens=metadata.seq_lens,
            page_table=metadata.block_table,
            cu_seqlens_q=metadata.query_start_loc,
            max_seqlen_q=metadata.max_query_len,
            softmax_scale=heads.scale,
            causal=True,
            window_size=window,
        )
        return out.flatten(1)
