"""Attention on a GPU by FlashInfer (Ye et al. 2025, arXiv:2501.01005), package flashinfer-python from 0.6.16 on.

Two of its functions are used. XQA's decode takes exact lengths and block table from the device, for requests that all
have one query, or all have the maximum number of a verification of drafts. Everything else is a paged prefill, which
must be planned on the CPU from the exact lengths.
"""

from __future__ import annotations

import inspect

import numpy as np
import torch
from flashinfer.decode import xqa_batch_decode_with_kv_cache  # pyright: ignore[reportMissingImports]
from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper  # pyright: ignore[reportMissingImports]
from torch import Tensor

from penstock.attention.backend import AttentionHeads, AttentionMetadata
from penstock.attention.library import LibraryLimits
from penstock.attention.native import queries_of, rotate_and_store
from penstock.messages.kv_cache_spec import KVCacheSpec

if "q_cu_seq_lens" not in inspect.signature(xqa_batch_decode_with_kv_cache).parameters:
    # Without this parameter, the queries of a verification all had the sliding window of the last one.
    raise ImportError("the FlashInfer here is older")

LIMITS = LibraryLimits(
    backend="flashinfer",
    head_sizes=(64, 128, 256),
    block_sizes=(16, 32, 64, 128),
    max_group=16,
)
_LAYOUT = "HND"  # FlashInfer's name for a cache [num_blocks, 2, num_kv_heads, block_size, head_size]
# FlashInfer recommends 128 MiB; a prefill of many heads that splits its contexts needs more, and fails with less.
_DECODE_BYTES, _PREFILL_BYTES = 128 << 20, 384 << 20

_Layer = tuple[int, float, KVCacheSpec]  # heads, scale, and other inputs of a plan


class FlashInferAttention:
    """Waits for the device in every step except decode, and verification if all requests have the most drafts.

    These two never wait and can be captured. Layers share workspaces, so all run on one stream. A row's last bits
    depend on the batch.
    """

    captures_ragged = False
    captures_mixed = False
    reads_unseen = True
    runs_encoders = False

    def __init__(self, max_num_reqs: int, max_model_len: int, max_decode_query_len: int, device: torch.device) -> None:
        # The launches depend on the block table's width and not on lengths.
        self.graph_contexts: tuple[int, ...] = (max_model_len,)
        self._max_model_len = max_model_len
        # Each other number of queries would compile another kernel.
        self._masks = {1: None, max_decode_query_len: _causal_mask(max_num_reqs, max_decode_query_len, device)}
        # XQA keeps its semaphores here, which must be zero at first; so the workspaces cannot be shared.
        self._decode_workspace = torch.zeros(_DECODE_BYTES, dtype=torch.uint8, device=device)
        self._prefill_workspace = torch.empty(_PREFILL_BYTES, dtype=torch.uint8, device=device)
        self._wrappers: dict[_Layer, BatchPrefillWithPagedKVCacheWrapper] = {}
        self._planned: dict[_Layer, AttentionMetadata] = {}

    def attend(
        self, qkv: Tensor, positions: Tensor, heads: AttentionHeads, kv_cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """See `AttentionBackend.attend`. Rows that belong to no request have undefined content.

        Raises ConfigError for a layer that FlashInfer does not support.
        """
        LIMITS.check_kind(heads)
        layer = (heads.num_heads, heads.scale, heads.spec)
        if layer not in self._wrappers:
            LIMITS.check(heads, kv_cache.shape[3])
            self._wrappers[layer] = BatchPrefillWithPagedKVCacheWrapper(self._prefill_workspace, kv_layout=_LAYOUT)
        rotate_and_store(qkv, positions, heads, kv_cache, metadata)
        # XQA ignores the strides of the queries.
        queries = queries_of(qkv, heads).contiguous()
        is_uniform = len(queries) == len(metadata.seq_lens) * metadata.max_query_len
        if is_uniform and metadata.max_query_len in self._masks:
            return self._decode(queries, heads, kv_cache, metadata)
        if self._planned.get(layer) is not metadata:
            self._plan(layer, kv_cache.shape[3], metadata)
            self._planned[layer] = metadata
        return self._wrappers[layer].run(queries, kv_cache).flatten(1)

    def _decode(self, queries: Tensor, heads: AttentionHeads, kv_cache: Tensor, metadata: AttentionMetadata) -> Tensor:
        mask = self._masks[metadata.max_query_len]
        out = xqa_batch_decode_with_kv_cache(
            queries,
            kv_cache,
            self._decode_workspace,
            metadata.block_table.contiguous(),
            metadata.seq_lens,
            self._max_model_len,
            bmm1_scale=heads.scale,
            window_left=heads.spec.sliding_window - 1,
            kv_layout=_LAYOUT,
            q_len_per_req=metadata.max_query_len,
            mask=None if mask is None else mask[: len(metadata.seq_lens)],
        )
        return out.view(len(queries), -1)

    def _plan(self, layer: _Layer, block_size: int, metadata: AttentionMetadata) -> None:
        num_heads, scale, spec = layer
        table = metadata.block_table
        starts, lengths = metadata.query_start_loc.cpu(), metadata.seq_lens.cpu()  # this waits
        num_blocks = (lengths + block_size - 1) // block_size
        block_starts = torch.zeros_like(starts)
        torch.cumsum(num_blocks, 0, dtype=torch.int32, out=block_starts[1:])
        is_used = torch.arange(table.shape[1]) < num_blocks[:, None]
        self._wrappers[layer].plan(
            starts,
            block_starts,
            table[is_used.to(table.device)],
            (lengths - 1) % block_size + 1,
            num_heads,
            spec.planes[0].num_heads,
            spec.planes[0].head_size,
            block_size,
            causal=True,
            sm_scale=scale,
            window_left=spec.sliding_window - 1,
            q_data_type=getattr(torch, spec.dtype),
        )


def _causal_mask(num_reqs: int, query_len: int, device: torch.device) -> Tensor | None:
    """Returns [num_reqs, query_len, words] uint16: bit j of row i says whether query i of a request sees query j.

    A row takes whole words of 32 bits. One query needs no mask.
    """
    if query_len == 1:
        return None
    num_bytes = (query_len + 31) // 32 * 4
    rows = b"".join(((2 << row) - 1).to_bytes(num_bytes, "little") for row in range(query_len))
    words = np.frombuffer(rows, dtype=np.uint16).reshape(1, query_len, num_bytes // 2)
    return torch.from_numpy(np.tile(words, (num_reqs, 1, 1))).to(device)
