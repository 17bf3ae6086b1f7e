"""`decode` fused with the preceding operations: norms of query and key heads, rotation, the store of keys and values.

The input is the projection's row itself, [T, (Hq + 2 Hkv) * D], the input of `rope_and_store_kv` followed by
`paged_attention`. Every program norms and rotates its own queries; those whose split holds a new position also store
its key and value, and read them back, like every other key, after a barrier: no other program reads that position
unless it has stored the same bytes there. Requests have at most `max_query_len` queries each, at consecutive positions
that end at seq_lens.

Norm and rotation round where `rope_and_store_kv` does: the quotient of the norm, its product with the weight, and the
rotated value, each to the dtype. Squares are added up in another order, so that the two agree within a rounding and not
in their bits: a deterministic plan, whose prefill goes through `rope_and_store_kv`, has no place for this kernel. The
bits do not depend on the number of queries per request or on the batch, as long as tile and split are the same.

With `pdl` the launch overlaps the end of the kernel before (programmatic dependent launch): before its wait a program
reads the batch's metadata, block ids and angles, and has its first tile brought to the L2 cache. The kernel that writes
these must not still be running: the first kernel after it is launched without PDL. Every program waits, including idle
ones, because kernels that wait for this one rely on that.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from penstock.kernels.triton.attention.decode import launch_merge
from penstock.kernels.triton.attention.plan import DecodeTile, Operands, Workspace
from penstock.kernels.triton.attention.splits import (
    attend_split,
    finish_split,
    first_ids,
    prefetch_split,
    rows_of_tile,
    seen_splits,
    zero_padding,
)
from penstock.kernels.triton.attention.tiles import BATCH
from penstock.kernels.triton.rms_norm import weighted


def launch_decode_fused(
    qkv: torch.Tensor,  # [T, (Hq + 2 * Hkv) * D]
    cos_sin: torch.Tensor,  # [max_pos, rotary_dim] float32
    norms: tuple[torch.Tensor, torch.Tensor] | None,  # q's and k's weights, [D] each
    eps: float,
    operands: Operands,
    tile: DecodeTile,
    workspace: Workspace,
) -> None:
    num_kv_heads, block_size, head_dim = operands.kv_cache.shape[2:]
    q_norm, k_norm = (qkv, qkv) if norms is None else norms
    num_reqs = operands.seq_lens.shape[0]
    options = {"launch_pdl": True} if tile.pdl else {}
    _decode_fused[(num_reqs * tile.row_tiles, num_kv_heads, tile.max_splits)](
        qkv, operands.kv_cache, operands.box, cos_sin, q_norm, k_norm, operands.block_table, operands.query_start_loc,
        operands.seq_lens, operands.sinks, operands.out,
        workspace.parts, workspace.stats, workspace.counters, eps, operands.scale,
        qkv.shape[0], num_reqs, operands.block_table.stride(0), tile.max_splits,
        operands.out.shape[1] // (num_kv_heads * head_dim), num_kv_heads, head_dim, triton.next_power_of_2(head_dim),
        cos_sin.shape[1], block_size, operands.sliding_window, operands.softcap, tile.rows,
        tile.row_tiles, tile.merge_rows, triton.next_power_of_2(tile.max_query_len), tile.keys,
        tile.split, norms is not None, tile.use_tma, tile.merges, tile.pdl,
        "ieee" if qkv.dtype == torch.float32 else "tf32",
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False, **options,
    )  # fmt: skip
    launch_merge(operands, tile, workspace)


@triton.jit
def _angles(cos_sin_ptr, position, is_row, rotary_dim: tl.constexpr, dim_tile: tl.constexpr):
    """cos and signed sin [rows, dim_tile]: rotated = x * cos + partner * sin; 1 and 0 where nothing is rotated."""
    column = tl.arange(0, dim_tile)
    half: tl.constexpr = rotary_dim // 2
    angle = tl.where(column < half, column, column - half)
    source = cos_sin_ptr + (position.to(tl.int64) * rotary_dim)[:, None] + angle[None, :]
    is_rotated = is_row[:, None] & (column < rotary_dim)[None, :]
    cos = tl.load(source, mask=is_rotated, other=1.0)
    sin = tl.load(source + half, mask=is_rotated, other=0.0)
    return cos, tl.where((column < half)[None, :], -sin, sin)


@triton.jit
def _normed_and_rotated(
    source,  # [rows] pointers to heads
    is_row,
    cos,
    sin,
    norm_ptr,
    eps,
    head_dim: tl.constexpr,
    rotary_dim: tl.constexpr,
    has_norm: tl.constexpr,
):
    """[rows, dim_tile] in the dtype. An element's partner in the rotation is loaded separately."""
    column = tl.arange(0, cos.shape[1])
    half: tl.constexpr = rotary_dim // 2
    partner = tl.where(column < half, column + half, column - half)
    partner = tl.where(column < rotary_dim, partner, column)
    is_inside = is_row[:, None] & (column < head_dim)[None, :]
    x = tl.load(source[:, None] + column[None, :], mask=is_inside, other=0.0)
    turned = tl.load(source[:, None] + partner[None, :], mask=is_inside, other=0.0)
    dtype = x.dtype
    x, turned = x.to(tl.float32), turned.to(tl.float32)
    if has_norm:
        weight = tl.load(norm_ptr + column, mask=column < head_dim, other=0.0)
        turned_weight = tl.load(norm_ptr + partner, mask=column < head_dim, other=0.0)
        inverse = (1.0 / tl.sqrt_rn(tl.sum(x * x, 1) / head_dim + eps))[:, None]
        x = weighted(x * inverse, weight[None, :], dtype).to(tl.float32)
        turned = weighted(turned * inverse, turned_weight[None, :], dtype).to(tl.float32)
    return (x * cos + turned * sin).to(dtype)


@triton.jit
def _store_new(
    qkv_ptr, cache_ptr, cos_sin_ptr, norm_ptr, eps, table_ptr, start, count, oldest, index, kv_head,
    group: tl.constexpr, num_kv_heads: tl.constexpr, head_dim: tl.constexpr, dim_tile: tl.constexpr,
    rotary_dim: tl.constexpr, block_size: tl.constexpr, split: tl.constexpr, new_tile: tl.constexpr,
    has_norm: tl.constexpr,
):  # fmt: skip
    """The keys and values of the new positions in this split, to their slots."""
    new = tl.arange(0, new_tile)
    position = oldest + new
    is_stored = (new < count) & (position // split == index)
    ids = tl.load(table_ptr + position // block_size, mask=is_stored, other=0).to(tl.int64)
    cos, sin = _angles(cos_sin_ptr, position, is_stored, rotary_dim, dim_tile)
    heads: tl.constexpr = (group + 2) * num_kv_heads
    k_source = qkv_ptr + ((start + new).to(tl.int64) * heads + group * num_kv_heads + kv_head) * head_dim
    k = _normed_and_rotated(k_source, is_stored, cos, sin, norm_ptr, eps, head_dim, rotary_dim, has_norm)
    column = tl.arange(0, dim_tile)
    is_inside = is_stored[:, None] & (column < head_dim)[None, :]
    v = tl.load(k_source[:, None] + num_kv_heads * head_dim + column[None, :], mask=is_inside, other=0.0)
    row = (ids * (2 * num_kv_heads) + kv_head) * block_size + position % block_size
    target = cache_ptr + (row * head_dim)[:, None] + column[None, :]
    tl.store(target, k, mask=is_inside)
    tl.store(target + num_kv_heads * block_size * head_dim, v, mask=is_inside)


@triton.jit(
    do_not_specialize=["num_tokens", "num_reqs", "table_stride", "max_splits"], do_not_specialize_on_alignment=BATCH
)
def _decode_fused(
    qkv_ptr, cache_ptr, box, cos_sin_ptr, q_norm_ptr, k_norm_ptr, table_ptr, starts_ptr, seq_lens_ptr,
    sinks_ptr, out_ptr, parts_ptr, stats_ptr, counters_ptr, eps, scale,
    num_tokens, num_reqs, table_stride, max_splits,
    group: tl.constexpr, num_kv_heads: tl.constexpr, head_dim: tl.constexpr, dim_tile: tl.constexpr,
    rotary_dim: tl.constexpr, block_size: tl.constexpr, window: tl.constexpr, softcap: tl.constexpr,
    tile_rows: tl.constexpr, row_tiles: tl.constexpr, merge_rows: tl.constexpr, new_tile: tl.constexpr,
    tile_keys: tl.constexpr, split: tl.constexpr, has_norm: tl.constexpr, use_tma: tl.constexpr, merges: tl.constexpr,
    pdl: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    if pdl:
        tl.extra.cuda.gdc_launch_dependents()
    request, tile = tl.program_id(0) // row_tiles, tl.program_id(0) % row_tiles
    kv_head, index = tl.program_id(1), tl.program_id(2)
    start = tl.load(starts_ptr + request)
    count = tl.load(starts_ptr + request + 1) - start
    seq_len = tl.load(seq_lens_ptr + request)
    end = tl.load(starts_ptr + num_reqs)
    oldest = seq_len - count
    first, last = seen_splits(seq_len, count, window, split)
    if index < first or index > last or tile * tile_rows >= count * group:
        if pdl:
            tl.extra.cuda.gdc_wait()
        if index == 0 and tile == 0:
            zero_padding(out_ptr, end, request, kv_head, num_reqs, num_tokens, group * head_dim)
        return

    row_table_ptr = table_ptr + request.to(tl.int64) * table_stride
    ids = first_ids(row_table_ptr, count, seq_len, index, window, tile_keys, split, block_size)
    query, head, is_row = rows_of_tile(count, tile, kv_head, merge_rows, tile_rows, group)
    cos, sin = _angles(cos_sin_ptr, oldest + query, is_row, rotary_dim, dim_tile)
    keys_ptr = cache_ptr + kv_head * (block_size * head_dim)
    if pdl:
        prefetch_split(
            keys_ptr, ids, count, seq_len, index, num_kv_heads, head_dim, block_size, window, tile_keys, split
        )  # fmt: skip
        tl.extra.cuda.gdc_wait()
    if index == 0 and tile == 0:
        zero_padding(out_ptr, end, request, kv_head, num_reqs, num_tokens, group * head_dim)
    if (index + 1) * split > oldest:
        _store_new(
            qkv_ptr, cache_ptr, cos_sin_ptr, k_norm_ptr, eps, row_table_ptr, start, count, oldest, index, kv_head,
            group, num_kv_heads, head_dim, dim_tile, rotary_dim, block_size, split, new_tile, has_norm,
        )  # fmt: skip
    source = qkv_ptr + ((start + query).to(tl.int64) * ((group + 2) * num_kv_heads) + head) * head_dim
    q = _normed_and_rotated(source, is_row, cos, sin, q_norm_ptr, eps, head_dim, rotary_dim, has_norm)
    # A tensor core needs 16 rows; missing ones are copies of those that exist.
    q = tl.reshape(
        tl.broadcast_to(q[None, :, :], [tile_rows // merge_rows, merge_rows, dim_tile]), [tile_rows, dim_tile]
    )
    position = oldest + (tile * tile_rows + tl.arange(0, tile_rows) % merge_rows) // group
    tl.debug_barrier()
    acc, best, mass = attend_split(
        q, q, position, count, seq_len, index, keys_ptr, box, kv_head, row_table_ptr, ids, oldest, scale,
        num_kv_heads, head_dim, head_dim, block_size, window, softcap, tile_keys, split, use_tma, precision,
    )  # fmt: skip
    counter_ptr = counters_ptr + tl.program_id(0) * num_kv_heads + kv_head
    finish_split(
        acc, best, mass, out_ptr, sinks_ptr, parts_ptr, stats_ptr, counter_ptr, start, count, tile, kv_head, index,
        first, last, max_splits, group, num_kv_heads, head_dim, merge_rows, merges,
    )  # fmt: skip
