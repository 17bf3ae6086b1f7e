"""Attention of decode and verify rows over splits of the context: few queries per request, with a context of any
length.

Grid (R * row tiles, groups of heads, max_splits): see `penstock.kernels.triton.attention.splits`. The queries of a
request and a group of heads, those that share a KV head or some of them, are packed into tiles of 16 or 32 rows, padded
if there are fewer. Requests may have up to `max_query_len` queries; a request without queries writes nothing. Rows
after the last request become zeros.

A row's bits depend on its own q, on the keys and values that it sees, and on the plan's tile and split.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from penstock.kernels.triton.attention.plan import DecodeTile, Operands, Workspace
from penstock.kernels.triton.attention.splits import (
    attend_split,
    finish_split,
    first_ids,
    merge_parts,
    rows_of_tile,
    seen_splits,
    zero_padding,
)
from penstock.kernels.triton.attention.tiles import BATCH, load_query


def launch_decode(q: torch.Tensor, operands: Operands, tile: DecodeTile, workspace: Workspace) -> None:
    """`q` is [T, Hq, D]."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, block_size = operands.kv_cache.shape[2:4]
    num_reqs = operands.seq_lens.shape[0]
    num_groups = num_heads // operands.group
    _decode[(num_reqs * tile.row_tiles, num_groups, tile.max_splits)](
        q, operands.kv_cache, operands.box, operands.block_table, operands.query_start_loc, operands.seq_lens,
        operands.sinks, operands.out, workspace.parts, workspace.stats, workspace.counters, operands.scale,
        num_tokens, num_reqs, operands.block_table.stride(0), tile.max_splits, q.stride(0),
        operands.group, num_groups, num_kv_heads, head_dim, operands.value_dim,
        triton.next_power_of_2(operands.value_dim), block_size, operands.sliding_window, operands.softcap,
        tile.rows, tile.row_tiles, tile.merge_rows, tile.keys, tile.split, tile.use_tma,
        tile.merges, "ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
    )  # fmt: skip
    launch_merge(operands, tile, workspace)


def launch_merge(operands: Operands, tile: DecodeTile, workspace: Workspace) -> None:
    """Merges the splits in a separate kernel, if the programs do not merge them."""
    if tile.merges or tile.max_splits == 1:
        return
    num_groups = operands.out.shape[1] // (operands.group * operands.value_dim)
    _merge[(operands.seq_lens.shape[0] * tile.row_tiles, num_groups)](
        operands.query_start_loc, operands.seq_lens, operands.sinks, operands.out, workspace.parts, workspace.stats,
        tile.max_splits, operands.group, num_groups, operands.value_dim, triton.next_power_of_2(operands.value_dim),
        operands.sliding_window, tile.rows, tile.row_tiles, tile.merge_rows,
        tile.split,
        num_warps=tile.warps, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["num_tokens", "num_reqs", "table_stride", "max_splits"], do_not_specialize_on_alignment=BATCH
)
def _decode(
    q_ptr, cache_ptr, box, table_ptr, starts_ptr, seq_lens_ptr, sinks_ptr, out_ptr, parts_ptr, stats_ptr, counters_ptr,
    scale, num_tokens, num_reqs, table_stride, max_splits, q_stride,
    group: tl.constexpr, num_groups: tl.constexpr, num_kv_heads: tl.constexpr, head_dim: tl.constexpr,
    value_dim: tl.constexpr, dim_tile: tl.constexpr, block_size: tl.constexpr, window: tl.constexpr,
    softcap: tl.constexpr, tile_rows: tl.constexpr, row_tiles: tl.constexpr, merge_rows: tl.constexpr,
    tile_keys: tl.constexpr, split: tl.constexpr, use_tma: tl.constexpr, merges: tl.constexpr,
    precision: tl.constexpr,
):  # fmt: skip
    request, tile = tl.program_id(0) // row_tiles, tl.program_id(0) % row_tiles
    head_group, index = tl.program_id(1), tl.program_id(2)
    kv_head = head_group // (num_groups // num_kv_heads)
    start = tl.load(starts_ptr + request)
    count = tl.load(starts_ptr + request + 1) - start
    seq_len = tl.load(seq_lens_ptr + request)
    end = tl.load(starts_ptr + num_reqs)
    first, last = seen_splits(seq_len, count, window, split)
    if index == 0 and tile == 0:
        zero_padding(out_ptr, end, request, head_group, num_reqs, num_tokens, group * value_dim)
    if index < first or index > last or tile * tile_rows >= count * group:
        return

    query, head, is_row = rows_of_tile(count, tile, head_group, tile_rows, tile_rows, group)
    source = q_ptr + (start + query).to(tl.int64) * q_stride + head * head_dim
    q, q_rest = load_query(source, is_row, head_dim, value_dim, dim_tile)
    row_table_ptr = table_ptr + request.to(tl.int64) * table_stride
    acc, best, mass = attend_split(
        q, q_rest, seq_len - count + query, count, seq_len, index, cache_ptr + kv_head * (block_size * head_dim), box,
        kv_head, row_table_ptr, first_ids(row_table_ptr, count, seq_len, index, window, tile_keys, split, block_size),
        seq_len - count + 1, scale,
        num_kv_heads, head_dim, value_dim, block_size, window, softcap, tile_keys, split, use_tma, precision,
    )  # fmt: skip
    counter_ptr = counters_ptr + tl.program_id(0) * num_groups + head_group
    finish_split(
        acc, best, mass, out_ptr, sinks_ptr, parts_ptr, stats_ptr, counter_ptr, start, count, tile, head_group, index,
        first, last, max_splits, group, num_groups, value_dim, merge_rows, merges,
    )  # fmt: skip


@triton.jit(do_not_specialize=["max_splits"], do_not_specialize_on_alignment=BATCH[1:])
def _merge(
    starts_ptr, seq_lens_ptr, sinks_ptr, out_ptr, parts_ptr, stats_ptr, max_splits,
    group: tl.constexpr, num_groups: tl.constexpr, value_dim: tl.constexpr, dim_tile: tl.constexpr,
    window: tl.constexpr, tile_rows: tl.constexpr, row_tiles: tl.constexpr, merge_rows: tl.constexpr,
    split: tl.constexpr,
):  # fmt: skip
    request, tile = tl.program_id(0) // row_tiles, tl.program_id(0) % row_tiles
    start = tl.load(starts_ptr + request)
    count = tl.load(starts_ptr + request + 1) - start
    first, last = seen_splits(tl.load(seq_lens_ptr + request), count, window, split)
    if first < last:
        query, head, is_row = rows_of_tile(count, tile, tl.program_id(1), merge_rows, tile_rows, group)
        place = (start + query).to(tl.int64) * (group * num_groups) + head
        merge_parts(
            parts_ptr, stats_ptr, out_ptr, sinks_ptr, place, head, is_row, first, last, max_splits, value_dim, dim_tile
        )  # fmt: skip
