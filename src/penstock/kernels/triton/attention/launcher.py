"""Entry points of paged attention on a GPU, which take a plan (`penstock.kernels.triton.attention.plan`).

`paged_attention` takes the arguments of the wrapper of the same name in `penstock.kernels`. Nothing here waits for the
device or reads from it, and grids depend only on shapes and the plan: every call can be captured in a graph.
"""

from __future__ import annotations

import math

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from penstock.kernels.paged_attention import check_sinks
from penstock.kernels.triton.attention.decode import launch_decode
from penstock.kernels.triton.attention.decode_fused import launch_decode_fused
from penstock.kernels.triton.attention.plan import (
    AttentionPlan,
    DecodeTile,
    Operands,
    PrefillTile,
    heads_of_tile,
)
from penstock.kernels.triton.attention.prefill import launch_prefill

_LOG2_E = math.log2(math.e)


def paged_attention(
    q: torch.Tensor,  # [T, Hq, D], rows may be strided
    kv_cache: torch.Tensor,  # [num_blocks, 2 (K, V), Hkv, block_size, D]
    block_table: torch.Tensor,  # [R, max_blocks] int32; entries that no row sees are never followed
    query_start_loc: torch.Tensor,  # [R + 1] int32: request r's queries are the rows from [r] to [r + 1]
    seq_lens: torch.Tensor,  # [R] int32, these queries included; 0 for padding, which has no queries
    scale: float,
    sliding_window: int,  # a query sees this many positions, including its own; 0 is all of them
    plan: AttentionPlan,  # made for at least these query lengths and contexts, and this many requests
    out: torch.Tensor | None = None,  # [T, Hq * D]
    softcap: float = 0.0,  # as in `Softmax` of the wrapper
    sinks: torch.Tensor | None = None,  # [Hq] float32
    latent_value_dim: int = 0,  # V of latents, with one plane of keys that end in their values: out is [T, Hq * V]
) -> torch.Tensor:
    """Returns [T, Hq * D], in `out` if given; rows after query_start_loc[R] are zeros."""
    num_tokens, num_heads, head_dim = q.shape
    planes, num_kv_heads = kv_cache.shape[1:3]
    assert q.stride(2) == 1 and q.stride(1) == head_dim, f"q has strides {q.stride()}"
    assert q.dtype == kv_cache.dtype and num_heads % num_kv_heads == 0, f"{num_heads} heads of {q.dtype}"
    assert planes == (1 if latent_value_dim else 2), f"{tuple(kv_cache.shape)} with values of {latent_value_dim}"
    _check(kv_cache, head_dim, block_table, query_start_loc, seq_lens)
    check_sinks(sinks, num_heads)
    value_dim = latent_value_dim or head_dim
    out = _out_like(q, num_tokens, num_heads * value_dim, out)
    tile = plan.tile
    heads = (value_dim, heads_of_tile(num_heads // num_kv_heads, latent_value_dim > 0))
    batch = (block_table, query_start_loc, seq_lens, scale * _LOG2_E, sliding_window, softcap, sinks)
    operands = Operands(kv_cache, *heads, _box(kv_cache, tile), *batch, out)
    if isinstance(tile, PrefillTile):
        launch_prefill(q, operands, tile)
    else:
        launch_decode(q, operands, tile, plan.workspace)
    return out


def decode_attention_fused(
    qkv: torch.Tensor,  # [T, (Hq + 2 * Hkv) * D]: raw rows of the projection, only read
    num_heads: int,
    cos_sin: torch.Tensor,  # [max_pos, rotary_dim] float32: rotary_dim / 2 cosines, then as many sines
    norms: tuple[torch.Tensor, torch.Tensor] | None,  # weights of the norms of q and k heads, [D] each
    eps: float,
    kv_cache: torch.Tensor,  # [num_blocks, 2, Hkv, block_size, D], written at the positions of these tokens
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    sliding_window: int,
    plan: AttentionPlan,
    out: torch.Tensor | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """`rope_and_store_kv`, then `paged_attention`, in one kernel, for a plan of decode that is not deterministic.

    Positions are the last ones of seq_lens, and slots follow from the block table.
    """
    tile = plan.tile
    assert isinstance(tile, DecodeTile) and not plan.deterministic, f"{plan.tile}, deterministic {plan.deterministic}"
    num_kv_heads, _, head_dim = kv_cache.shape[2:]
    assert qkv.is_contiguous() and qkv.dtype == kv_cache.dtype, f"qkv is {qkv.dtype}, strides {qkv.stride()}"
    assert qkv.shape[1] == (num_heads + 2 * num_kv_heads) * head_dim and num_heads % num_kv_heads == 0, (
        f"qkv is {qkv.shape[1]} wide for {num_heads} + 2 * {num_kv_heads} heads of {head_dim}"
    )
    assert cos_sin.dtype == torch.float32 and cos_sin.is_contiguous() and cos_sin.shape[1] <= head_dim, (
        f"cos_sin is {cos_sin.dtype} {tuple(cos_sin.shape)}"
    )
    _check(kv_cache, head_dim, block_table, query_start_loc, seq_lens)
    check_sinks(sinks, num_heads)
    out = _out_like(qkv, qkv.shape[0], num_heads * head_dim, out)
    batch = (block_table, query_start_loc, seq_lens, scale * _LOG2_E, sliding_window, softcap, sinks)
    heads = (head_dim, num_heads // num_kv_heads)
    operands = Operands(kv_cache, *heads, _box(kv_cache, tile), *batch, out)
    launch_decode_fused(qkv, cos_sin, norms, eps, operands, tile, plan.workspace)
    return out


def _box(kv_cache: torch.Tensor, tile: PrefillTile | DecodeTile) -> object:
    """The rows of the cache for TMA: [num_blocks * 2 * Hkv * block_size, D], `keys` of them a load."""
    if not tile.use_tma:
        return kv_cache
    head_dim = kv_cache.shape[4]
    return TensorDescriptor(kv_cache, [kv_cache.numel() // head_dim, head_dim], [head_dim, 1], [tile.keys, head_dim])


def _out_like(x: torch.Tensor, rows: int, width: int, out: torch.Tensor | None) -> torch.Tensor:
    out = x.new_empty((rows, width)) if out is None else out
    assert out.shape == (rows, width) and out.dtype == x.dtype and out.is_contiguous(), f"{out.shape} {out.dtype}"
    return out


def _check(
    kv_cache: torch.Tensor,
    head_dim: int,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
) -> None:
    assert kv_cache.is_contiguous() and kv_cache.shape[4] == head_dim, f"{tuple(kv_cache.shape)} for {head_dim}"
    requests = seq_lens.shape[0]
    assert block_table.shape[0] == requests and query_start_loc.shape == (requests + 1,), (
        f"{tuple(block_table.shape)} block table, {tuple(query_start_loc.shape)} starts for {requests} requests"
    )
    assert block_table.dtype == query_start_loc.dtype == seq_lens.dtype == torch.int32, (
        f"block table {block_table.dtype}, starts {query_start_loc.dtype}, lengths {seq_lens.dtype}"
    )
    assert block_table.stride(1) == 1, f"block table has strides {block_table.stride()}"
