"""Functions shared by the kernels of decode and verify rows: the division of work, and the merge of a request's splits.

A program takes up to `tile_rows` rows (queries x heads of one KV head) of one request and one split of its positions,
[split * s, split * (s + 1)); programs of splits that no query sees end at once. The only program of a request writes
its rows; of several, each leaves (acc, best, mass) in the workspace, and they are merged from the first split to the
last, by the program that finishes last, determined by a counter, or by a separate kernel. Both give the same bits.

The counter is incremented with release and acquire semantics at GPU scope: what a program wrote before, after a barrier
of its warps, is visible to each program that increments after it. The last one resets it to zero for the next launch or
replay.
"""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.kernels.triton.attention.tiles import (
    block_ids,
    fresh_state,
    id_of_key,
    merge,
    walk,
    walk_phases,
    with_sinks,
)


@triton.jit
def seen_splits(seq_len, count, window: tl.constexpr, split: tl.constexpr):
    """Returns the first and the last split seen by the last `count` of seq_len positions; the last is -1 for
    padding.
    """
    first = 0
    if window > 0:
        first = tl.maximum(seq_len - count - window + 1, 0) // split
    last = tl.where(count > 0, (seq_len + split - 1) // split, 0) - 1
    return first, last


@triton.jit
def _bounds(count, seq_len, index, window: tl.constexpr, tile_keys: tl.constexpr, split: tl.constexpr):
    """Returns, for the part of a split that the queries see, the start of its first tile, its end, and its first
    position.
    """
    low = index * split
    first = low
    if window > 0:
        first = tl.maximum(seq_len - count - window + 1, low)
        low = first // tile_keys * tile_keys
    return low, tl.minimum((index + 1) * split, seq_len), first


@triton.jit
def first_ids(
    table_ptr, count, seq_len, index,
    window: tl.constexpr, tile_keys: tl.constexpr, split: tl.constexpr, block_size: tl.constexpr,
):  # fmt: skip
    """Returns the block ids of the first tile of a split."""
    low, high, _ = _bounds(count, seq_len, index, window, tile_keys, split)
    return block_ids(table_ptr, low, high, tile_keys, block_size)


@triton.jit
def prefetch_split(
    keys_ptr, ids, count, seq_len, index, num_kv_heads: tl.constexpr, head_dim: tl.constexpr,
    block_size: tl.constexpr, window: tl.constexpr, tile_keys: tl.constexpr, split: tl.constexpr,
):  # fmt: skip
    """Prefetches the first tile of a split, keys and values, into the L2 cache. Changes nothing else."""
    low, high, _ = _bounds(count, seq_len, index, window, tile_keys, split)
    plane: tl.constexpr = num_kv_heads * block_size * head_dim
    line: tl.constexpr = 1024 // keys_ptr.dtype.element_ty.primitive_bitwidth  # elements in 128 bytes
    row = id_of_key(ids, tl.arange(0, tile_keys), tile_keys, block_size).to(tl.int64) * (2 * plane)
    row += (tl.minimum(low + tl.arange(0, tile_keys), high - 1) % block_size) * head_dim
    lines = row[:, None] + (tl.arange(0, triton.next_power_of_2(triton.cdiv(head_dim, line))) * line)[None, :]
    for side in tl.static_range(2):
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; // dummy $0", "=r,l", [keys_ptr + lines + side * plane],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def attend_split(
    q,  # [tile_rows, dim_tile]
    q_rest,  # [tile_rows, rest_tile]
    position,  # [tile_rows] int32
    count,  # queries of the request
    seq_len,
    index,  # of the split
    keys_ptr,
    box,
    kv_head,
    table_ptr,  # the request's row
    ids,  # first_ids of the split
    whole,  # keys from this position on are never read by TMA
    scale,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    value_dim: tl.constexpr,
    block_size: tl.constexpr,
    window: tl.constexpr,
    softcap: tl.constexpr,
    tile_keys: tl.constexpr,
    split: tl.constexpr,
    use_tma: tl.constexpr,
    precision: tl.constexpr,
):
    """Returns the state of the rows after one split."""
    acc, best, mass = fresh_state(q.shape[0], q.shape[1])
    low = index * split
    if use_tma:
        acc, best, mass = walk_phases(
            acc, best, mass, q, q_rest, position, keys_ptr, box, kv_head, table_ptr, seq_len - count, seq_len,
            whole, low, low + split, scale,
            num_kv_heads, head_dim, value_dim, block_size, window, softcap, tile_keys, use_tma, precision,
        )  # fmt: skip
    else:
        # One masked loop: the loads dominate, and a single loop keeps them in flight to its end.
        low, high, first = _bounds(count, seq_len, index, window, tile_keys, split)
        acc, best, mass = walk(
            acc, best, mass, q, q_rest, position, keys_ptr, box, kv_head, table_ptr, ids, low, high, first, scale,
            num_kv_heads, head_dim, value_dim, block_size, window, softcap, tile_keys, True, False, precision,
        )  # fmt: skip
    return acc, best, mass


@triton.jit
def rows_of_tile(count, tile, head_group, rows: tl.constexpr, tile_rows: tl.constexpr, group: tl.constexpr):
    """(query, head, whether there is such a query) of the first `rows` rows of a tile."""
    row = tile * tile_rows + tl.arange(0, rows)
    query = row // group
    return query, head_group * group + row % group, query < count


@triton.jit
def write_rows(out_ptr, place, head, is_row, acc, best, mass, sinks_ptr, value_dim: tl.constexpr):
    """`place` [rows] int64 is a row's token and head, `head` [rows] the head alone."""
    mass = with_sinks(mass, best, sinks_ptr, head, is_row)
    column = tl.arange(0, acc.shape[1])
    target = out_ptr + (place * value_dim)[:, None] + column[None, :]
    # A row of the tile that is not a query may have seen nothing.
    values = (acc / tl.where(is_row, mass, 1.0)[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(target, values, mask=is_row[:, None] & (column < value_dim)[None, :])


@triton.jit
def leave_part(
    parts_ptr, stats_ptr, place, is_row, index, max_splits, acc, best, mass, value_dim: tl.constexpr
):  # fmt: skip
    """Writes the state of one split to the workspace: parts [T * Hq, max_splits, V], stats [T * Hq, max_splits, 2]."""
    column = tl.arange(0, acc.shape[1])
    slot = place * max_splits + index
    target = parts_ptr + (slot * value_dim)[:, None] + column[None, :]
    tl.store(target, acc, mask=is_row[:, None] & (column < value_dim)[None, :])
    tl.store(stats_ptr + slot * 2, best, mask=is_row)
    tl.store(stats_ptr + slot * 2 + 1, mass, mask=is_row)


@triton.jit
def merge_parts(
    parts_ptr, stats_ptr, out_ptr, sinks_ptr, place, head, is_row, first, last, max_splits,
    value_dim: tl.constexpr, dim_tile: tl.constexpr,
):  # fmt: skip
    """Merges the states of splits `first` to `last` in this order, and writes the rows."""
    column = tl.arange(0, dim_tile)
    is_inside = is_row[:, None] & (column < value_dim)[None, :]
    acc, best, mass = fresh_state(place.shape[0], dim_tile)
    for index in tl.range(first, last + 1, loop_unroll_factor=4 if place.shape[0] <= 4 else 1):
        slot = place * max_splits + index
        part_acc = tl.load(parts_ptr + (slot * value_dim)[:, None] + column[None, :], mask=is_inside, other=0.0)
        part_best = tl.load(stats_ptr + slot * 2, mask=is_row, other=0.0)
        part_mass = tl.load(stats_ptr + slot * 2 + 1, mask=is_row, other=1.0)
        acc, best, mass = merge(acc, best, mass, part_acc, part_best, part_mass)
    write_rows(out_ptr, place, head, is_row, acc, best, mass, sinks_ptr, value_dim)


@triton.jit
def finish_split(
    acc,
    best,
    mass,
    out_ptr,
    sinks_ptr,  # one number per head, or None
    parts_ptr,
    stats_ptr,
    counter_ptr,  # of this tile of rows
    start,
    count,
    tile,
    head_group,
    index,
    first,
    last,
    max_splits,
    group: tl.constexpr,
    num_groups: tl.constexpr,
    value_dim: tl.constexpr,
    merge_rows: tl.constexpr,  # maximum number of rows of the tile that exist
    merges: tl.constexpr,
):
    """Writes the rows, or stores their state and merges the splits if this is the last one to finish."""
    num_heads: tl.constexpr = group * num_groups
    query, head, is_row = rows_of_tile(count, tile, head_group, acc.shape[0], acc.shape[0], group)
    place = (start + query).to(tl.int64) * num_heads + head
    if first == last:
        write_rows(out_ptr, place, head, is_row, acc, best, mass, sinks_ptr, value_dim)
    else:
        leave_part(parts_ptr, stats_ptr, place, is_row, index, max_splits, acc, best, mass, value_dim)
        if merges:
            tl.debug_barrier()
            arrived = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")
            if arrived == last - first:
                tl.store(counter_ptr, 0)
                query_here, head_here, is_here = rows_of_tile(
                    count, tile, head_group, merge_rows, acc.shape[0], group
                )  # fmt: skip
                place_here = (start + query_here).to(tl.int64) * num_heads + head_here
                merge_parts(
                    parts_ptr, stats_ptr, out_ptr, sinks_ptr, place_here, head_here, is_here, first, last, max_splits,
                    value_dim, acc.shape[1],
                )  # fmt: skip


@triton.jit
def zero_padding(out_ptr, end, request, head_group, num_reqs, num_tokens, row_dim: tl.constexpr):
    """Zeros a group of heads, `row_dim` wide, of every num_reqs-th row from `end`, where the last request's end."""
    column = tl.arange(0, triton.next_power_of_2(row_dim))
    values = tl.zeros([triton.next_power_of_2(row_dim)], out_ptr.dtype.element_ty)
    for token in tl.range((end + request).to(tl.int64), num_tokens, num_reqs):
        target = out_ptr + (token * tl.num_programs(1) + head_group) * row_dim
        tl.store(target + column, values, mask=column < row_dim)
