"""Attention of whole prompts, chunks and mixed batches: a program computes a tile of queries of one KV head.

The heads that share a KV head, or a group of them, are adjacent rows of a tile: with `group` heads, row i is query i //
group of the tile, head i % group, and a tile has tile_rows // group queries. The grid is (tiles, groups) with as many
tiles as any split of `num_tokens` rows into `num_reqs` requests can need; a program finds its request by a binary
search in query_start_loc, so the CPU needs only shapes. Rows after the last request are treated as the queries of
another request, and are written as zeros. Requests are taken from the last to the first, their tiles from the longest
to the shortest.

With split = 0 a row is one walk over its positions; else it is the merge, from first to last, of the walks over [0,
split), [split, 2 split), ..., as the decode kernel computes: the same bits, if the tile is the same
(`penstock.kernels.triton.attention.tiles` explains why). A row's bits never depend on its chunk or batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from penstock.kernels.triton.attention.plan import Operands, PrefillTile
from penstock.kernels.triton.attention.splits import attend_split, first_ids, seen_splits
from penstock.kernels.triton.attention.tiles import BATCH, fresh_state, load_query, merge, walk_phases, with_sinks
from penstock.kernels.triton.segments import find_segment, first_row


def launch_prefill(q: torch.Tensor, operands: Operands, tile: PrefillTile) -> None:
    """`q` is [T, Hq, D]."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, block_size = operands.kv_cache.shape[2:4]
    num_reqs = operands.seq_lens.shape[0]
    group = operands.group
    num_groups = num_heads // group
    tiles = num_tokens // (tile.rows // group) + num_reqs + 1
    _prefill[(tiles, num_groups)](
        q, operands.kv_cache, operands.box, operands.block_table, operands.query_start_loc, operands.seq_lens,
        operands.sinks, operands.out, operands.scale,
        num_tokens, num_reqs, operands.block_table.stride(0), q.stride(0),
        group, num_groups, num_kv_heads, head_dim, operands.value_dim, triton.next_power_of_2(operands.value_dim),
        block_size, operands.sliding_window, operands.softcap, tile.rows, tile.keys,
        tile.split, tile.use_tma, "ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens", "num_reqs", "table_stride"], do_not_specialize_on_alignment=BATCH)
def _prefill(
    q_ptr, cache_ptr, box, table_ptr, starts_ptr, seq_lens_ptr, sinks_ptr, out_ptr, scale,
    num_tokens, num_reqs, table_stride, q_stride,
    group: tl.constexpr, num_groups: tl.constexpr, num_kv_heads: tl.constexpr, head_dim: tl.constexpr,
    value_dim: tl.constexpr, dim_tile: tl.constexpr, block_size: tl.constexpr, window: tl.constexpr,
    softcap: tl.constexpr, tile_rows: tl.constexpr, tile_keys: tl.constexpr, split: tl.constexpr,
    use_tma: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    queries: tl.constexpr = tile_rows // group
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head_group = tl.program_id(1)
    kv_head = head_group // (num_groups // num_kv_heads)
    request = find_segment(starts_ptr, tile, num_reqs, queries)
    start = tl.load(starts_ptr + request)
    is_padding = request == num_reqs
    behind = tl.load(starts_ptr + request + 1, mask=request < num_reqs, other=0)
    count = tl.where(is_padding, num_tokens, behind) - start
    first_query = first_row(start, tile, request, queries)
    if first_query >= count:
        return

    row = tl.arange(0, tile_rows)
    query = first_query + row // group
    is_row = (row < queries * group) & (query < count)
    token = (start + query).to(tl.int64)
    head = head_group * group + row % group
    column = tl.arange(0, dim_tile)
    is_inside = is_row[:, None] & (column < value_dim)[None, :]
    target = out_ptr + ((token * (group * num_groups) + head) * value_dim)[:, None] + column[None, :]
    if is_padding:
        tl.store(target, tl.zeros([tile_rows, dim_tile], out_ptr.dtype.element_ty), mask=is_inside)
        return

    q, q_rest = load_query(q_ptr + token * q_stride + head * head_dim, is_row, head_dim, value_dim, dim_tile)
    before = tl.load(seq_lens_ptr + request) - count
    oldest = before + first_query
    end = before + tl.minimum(first_query + queries, count)
    keys_ptr = cache_ptr + kv_head * (block_size * head_dim)
    row_table_ptr = table_ptr + request.to(tl.int64) * table_stride
    acc, best, mass = fresh_state(tile_rows, dim_tile)
    if split == 0:
        acc, best, mass = walk_phases(
            acc, best, mass, q, q_rest, before + query, keys_ptr, box, kv_head, row_table_ptr, oldest, end, oldest + 1,
            0, end, scale,
            num_kv_heads, head_dim, value_dim, block_size, window, softcap, tile_keys, use_tma, precision,
        )  # fmt: skip
    else:
        first, last = seen_splits(end, end - oldest, window, split)
        for index in tl.range(first, last + 1):
            ids = first_ids(row_table_ptr, end - oldest, end, index, window, tile_keys, split, block_size)
            part_acc, part_best, part_mass = attend_split(
                q, q_rest, before + query, end - oldest, end, index, keys_ptr, box, kv_head, row_table_ptr, ids,
                oldest + 1, scale,
                num_kv_heads, head_dim, value_dim, block_size, window, softcap, tile_keys, split, use_tma, precision,
            )  # fmt: skip
            acc, best, mass = merge(acc, best, mass, part_acc, part_best, part_mass)
    mass = with_sinks(mass, best, sinks_ptr, head, is_row)
    out = acc / tl.where(is_row, mass, 1.0)[:, None]
    tl.store(target, out.to(out_ptr.dtype.element_ty), mask=is_inside)
