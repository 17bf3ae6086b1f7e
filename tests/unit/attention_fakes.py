"""Stand-ins in torch for the two libraries behind optional attention backends, with their signatures and checks.

Facts are from FlashAttention 3.0.0 (`flash_attn_with_kvcache` in hopper/flash_attn_interface.py, and the checks of
`mha_fwd` in flash_api_stable.cpp) and FlashInfer 0.6.18 (`xqa_batch_decode_with_kv_cache` in decode.py, `xqa` in
xqa.py, `BatchPrefillWithPagedKVCacheWrapper` in prefill.py). Unlike the real ones, these accept float32 and the CPU.

They read and write as carelessly as the real ones may: everything that a request's table names up to its length is
read, and multiplied by zero where a query does not see it; rows that belong to no request are not written.
"""

# ruff: noqa: PT018 - these assertions are a library's checks, not a test's

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
SEMAPHORES = 4096  # bytes of them that are checked


def attend(
    q: torch.Tensor,  # [n, Hq, D]
    k: torch.Tensor,  # [length, Hkv, D]
    v: torch.Tensor,
    sees: torch.Tensor,  # [n, length] bool
    scale: float,
) -> torch.Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("nhd,lhd->hnl", q.float(), k).mul(scale).masked_fill(~sees, -torch.inf)
    return torch.einsum("hnl,lhd->nhd", scores.softmax(-1), v).to(q.dtype)


def gather(pages: torch.Tensor, ids: torch.Tensor, length: int) -> torch.Tensor:
    """[num_pages, page_size, Hkv, D] -> [length, Hkv, D]."""
    return pages[ids.long()].flatten(0, 1)[:length]


def in_window(num_queries: int, length: int, left: int, right: int = -1) -> torch.Tensor:
    """Returns which positions each query sees, [num_queries, length]: `left` and `right` neighbours, all if < 0.

    The last query is at the last position.
    """
    distances = torch.arange(length) - torch.arange(length - num_queries, length)[:, None]
    return (distances >= (-left if left >= 0 else -length)) & (distances <= (right if right >= 0 else length))


def check_int32(like: torch.Tensor, *shape: int) -> None:
    assert like.dtype == torch.int32 and like.is_contiguous() and like.shape == shape, (like.dtype, like.shape, shape)


# --- FlashAttention 3


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    qv=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    page_table=None,
    cu_seqlens_q=None,
    cu_seqlens_k_new=None,
    max_seqlen_q=None,
    rotary_seqlens=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    rotary_interleaved=True,
    scheduler_metadata=None,
    num_splits=0,
    pack_gqa=None,
    sm_margin=0,
    return_softmax_lse=False,
):
    """Supports only paged caches with `cu_seqlens_q`, and appends nothing."""
    num_requests = len(cu_seqlens_q) - 1
    check_int32(cu_seqlens_q, num_requests + 1)
    check_int32(cache_seqlens, num_requests)
    assert page_table.dtype == torch.int32 and page_table.stride(-1) == 1 and len(page_table) == num_requests
    assert q.dim() == 3 and q.dtype in FLOATS and q.shape[2] % 8 == 0 and q.shape[2] <= 256
    for cache in (k_cache, v_cache):
        assert cache.dtype == q.dtype and cache.stride(-1) == 1 and cache.dim() == 4
        assert cache.shape == k_cache.shape and cache.shape[3] == q.shape[2] and q.shape[1] % cache.shape[2] == 0
    starts, lengths = cu_seqlens_q.tolist(), cache_seqlens.tolist()
    left, right = window_size[0], 0 if causal else window_size[1]
    out = torch.full(q.shape, torch.nan, dtype=q.dtype)
    for table, start, end, length in zip(page_table, starts, starts[1:], lengths, strict=False):
        assert end - start <= max_seqlen_q
        if end > start:
            keys, values = (gather(cache, table, length) for cache in (k_cache, v_cache))
            sees = in_window(end - start, length, left, right)
            out[start:end] = attend(q[start:end], keys, values, sees, softmax_scale)
    return out


# --- FlashInfer


def xqa_batch_decode_with_kv_cache(
    query,
    kv_cache,
    workspace_buffer,
    block_tables,
    seq_lens,
    max_seq_len,
    bmm1_scale=1.0,
    bmm2_scale=1.0,
    window_left=-1,
    out=None,
    sinks=None,
    kv_layout="NHD",
    enable_pdl=None,
    q_len_per_req=1,
    o_scale=1.0,
    mask=None,
    kv_cache_sf=None,
    q_cu_seq_lens=None,
):
    """Supports only equally many queries per request. The kernel ignores the strides of queries and block tables."""
    num_requests, query_len = len(seq_lens), q_len_per_req
    assert kv_cache.dim() == 5 and kv_cache.shape[1] == 2 and kv_cache.dtype == query.dtype
    pages = kv_cache if kv_layout == "NHD" else kv_cache.transpose(2, 3)
    page_size, num_kv_heads, head_size = pages.shape[2:]
    assert page_size in (16, 32, 64, 128) and head_size % 16 == 0 and query.dtype in FLOATS
    assert query.is_contiguous() and query.dim() == 3 and len(query) == num_requests * query_len
    assert query.shape[1] % num_kv_heads == 0 and query.shape[1] // num_kv_heads <= 32
    check_int32(seq_lens, num_requests)
    check_int32(block_tables, num_requests, block_tables.shape[1])
    assert workspace_buffer.dtype == torch.uint8 and not workspace_buffer[:SEMAPHORES].any(), "spoiled semaphores"
    drafts = torch.ones(num_requests, query_len, query_len, dtype=torch.bool)
    if query_len > 1:
        assert mask.dtype == torch.uint16 and mask.is_contiguous()
        assert mask.shape == (num_requests, query_len, (query_len + 31) // 32 * 2)
        bits = mask.int()[..., None] >> torch.arange(16) & 1
        drafts = bits.flatten(2)[..., :query_len].bool()
    shape = query.shape if query_len == 1 else (num_requests, query_len, *query.shape[1:])
    found = torch.full(shape, torch.nan, dtype=query.dtype).view(num_requests, query_len, *query.shape[1:])
    queries = query.view(found.shape)
    for number, length in enumerate(seq_lens.tolist()):
        if length:
            sees = in_window(query_len, length, window_left)
            sees[:, length - query_len :] &= drafts[number]
            keys, values = (gather(pages[:, side], block_tables[number], length) for side in (0, 1))
            found[number] = attend(queries[number], keys, values, sees, bmm1_scale * bmm2_scale)
    return found.view(shape)


class BatchPrefillWithPagedKVCacheWrapper:
    plans = 0  # calls of `plan` on any wrapper

    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        qo_indptr_buf=None,
        paged_kv_indptr_buf=None,
        paged_kv_indices_buf=None,
        paged_kv_last_page_len_buf=None,
        custom_mask_buf=None,
        mask_indptr_buf=None,
        backend="auto",
        jit_args=None,
        jit_kwargs=None,
    ) -> None:
        assert kv_layout in ("NHD", "HND") and float_workspace_buffer.data_ptr() % 16 == 0
        self.workspace, self.layout = float_workspace_buffer, kv_layout
        self.planned: dict[str, Any] = {}

    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        head_dim_vo=None,
        custom_mask=None,
        packed_custom_mask=None,
        causal=False,
        pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False,
        sm_scale=None,
        window_left=-1,
        logits_soft_cap=None,
        rope_scale=None,
        rope_theta=None,
        q_data_type="float16",
        kv_data_type=None,
        o_data_type=None,
        non_blocking=True,
        prefix_len_ptr=None,
        token_pos_in_items_ptr=None,
        token_pos_in_items_len=0,
        max_item_len_ptr=None,
        seq_lens=None,
        seq_lens_q=None,
        block_tables=None,
        max_token_per_sequence=None,
        max_sequence_kv=None,
        fixed_split_size=None,
        disable_split_kv=False,
    ) -> None:
        num_requests = len(qo_indptr) - 1
        check_int32(qo_indptr, num_requests + 1)
        check_int32(paged_kv_indptr, num_requests + 1)
        check_int32(paged_kv_last_page_len, num_requests)
        check_int32(paged_kv_indices, int(paged_kv_indptr[-1]))
        assert ((paged_kv_last_page_len >= 1) & (paged_kv_last_page_len <= page_size)).all()
        self.workspace[:SEMAPHORES] = 255
        self.starts = qo_indptr.tolist()
        self.pages = paged_kv_indices.split(paged_kv_indptr.diff().tolist())
        self.last_page_lens = paged_kv_last_page_len.tolist()
        self.q_shape = (self.starts[-1], num_qo_heads, head_dim_qk)
        self.page_shape = (page_size, num_kv_heads, head_dim_qk)
        self.planned = {
            "window_left": window_left,
            "window_right": 0 if causal else -1,
            "scale": sm_scale,
            "dtype": q_data_type,
        }
        BatchPrefillWithPagedKVCacheWrapper.plans += 1

    def run(
        self,
        q,
        paged_kv_cache,
        *args,
        q_scale=None,
        k_scale=None,
        v_scale=None,
        out=None,
        lse=None,
        return_lse=False,
        enable_pdl=None,
        window_left=None,
        sinks=None,
        kv_cache_sf=None,
        skip_softmax_threshold_scale_factor=None,
        use_fp16_softmax=None,
        uses_spcompress=None,
    ):
        pages = paged_kv_cache if self.layout == "NHD" else paged_kv_cache.transpose(2, 3)
        assert q.shape == self.q_shape and pages.shape[2:] == self.page_shape, (q.shape, self.q_shape)
        assert q.dtype == self.planned["dtype"] == pages.dtype and q.dtype in FLOATS
        found = torch.full(q.shape, torch.nan, dtype=q.dtype)
        for start, end, ids, last in zip(self.starts, self.starts[1:], self.pages, self.last_page_lens, strict=False):
            length = (len(ids) - 1) * self.page_shape[0] + last
            keys, values = (gather(pages[:, side], ids, length) for side in (0, 1))
            sees = in_window(end - start, length, self.planned["window_left"], self.planned["window_right"])
            found[start:end] = attend(q[start:end], keys, values, sees, self.planned["scale"])
        return found


def _module(name: str, *members: Any) -> ModuleType:
    module = ModuleType(name)
    for member in members:
        setattr(module, member.__name__, member)
    return module


def modules(backend: str) -> Sequence[ModuleType]:
    """Returns the modules of this attention backend's library."""
    if backend == "flash_attention":
        return (_module("flash_attn_interface", flash_attn_with_kvcache),)
    return (
        _module("flashinfer"),
        _module("flashinfer.decode", xqa_batch_decode_with_kv_cache),
        _module("flashinfer.prefill", BatchPrefillWithPagedKVCacheWrapper),
    )
