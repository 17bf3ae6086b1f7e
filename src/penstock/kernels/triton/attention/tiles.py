"""The loop over tiles of keys in every attention kernel, and the arithmetic of a row.

A row is one query of one head. Over tiles of `tile_keys` positions, which begin at multiples of `tile_keys`, and with
z = scale * log2(e) * (q . k) (Milakov and Gimelshein 2018, arXiv:1805.02867, in powers of two):

    best' = max(best, max z)    kept = exp2(best - best')    weights = exp2(z - best')
    mass' = mass * kept + sum weights    acc' = acc * kept + weights @ v

The result is acc / mass. Two such states of disjoint positions are merged by the same formula (`merge`). With a
softcap, z = softcap * log2(e) * tanh(scale / softcap * (q . k)). A sink is added to mass after all positions
(`with_sinks`).

What a row's bits depend on. Every elementwise operation has the rounding given by the source: fused multiply-adds are
explicit, and kernels are compiled without any other contraction (`enable_fp_fusion=False`). A maximum has no rounding.
The rest are two sums whose order is determined by the compiler and the hardware. The products of `tl.dot`: a tensor
core instruction computes an element from its row, its column and its previous value, in the same way at every position
of its tile, and the instructions of an element are executed in the order of the summed dimension. And `sum weights`:
first over the registers of a thread, then over the threads and warps that share a row. Both are given by the shape of
the tile, the number of warps and the dtype, which give the layout of the accumulator, and are the same for every row of
it. A tile in which a row sees no position leaves the row unchanged, because its weights are exact zeros and kept is
exp2(0) = 1; so does a mask that hides no position. The bits of a row therefore depend on what it sees, on tile rows and
keys, on warps, and on where its states are merged; not on its position in the tile, the other rows, the batch, the
chunk, or the location of blocks. For fast plans this holds within a plan. A deterministic plan has 16 rows, one `keys`,
one number of warps and one `split` in prefill and decode, and so one result for a row, whichever kernel computes it.
tests/kernels/test_triton_attention_gpu.py checks this on a GPU.

Masked keys and values are not loaded but replaced by zeros: values that no row sees may be NaN.

Latents are keys whose last `value_dim` elements are their values. A tile of them is loaded once, as two tiles whose
widths are powers of two: the elements before the value, with which the part `q_rest` of a query is multiplied first,
and the value. Without latents value_dim is head_dim, and `q_rest` is not read.
"""

from __future__ import annotations

import triton
import triton.language as tl

BATCH = ["table_ptr", "starts_ptr", "seq_lens_ptr"]
"""Kernel arguments that may be views of larger buffers with any alignment; kernels are not specialised on it."""

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def fresh_state(rows: tl.constexpr, dim_tile: tl.constexpr):
    """Returns the state (acc, best, mass) of rows that have seen nothing."""
    acc = tl.zeros([rows, dim_tile], tl.float32)
    best = tl.full([rows], float("-inf"), tl.float32)
    mass = tl.zeros([rows], tl.float32)
    return acc, best, mass


@triton.jit
def load_query(
    source,  # [rows] pointers to the queries of one head
    is_row,
    head_dim: tl.constexpr,
    value_dim: tl.constexpr,
    dim_tile: tl.constexpr,  # value_dim, rounded up to a power of two
):
    """Returns the last value_dim elements of queries [rows, dim_tile], and those before, [rows, rest_tile]; the first
    tile in place of the second if there are none.
    """
    column = tl.arange(0, dim_tile)
    is_inside = is_row[:, None] & (column < value_dim)[None, :]
    q = tl.load(source[:, None] + (head_dim - value_dim + column)[None, :], mask=is_inside, other=0.0)
    if value_dim < head_dim:
        rest: tl.constexpr = head_dim - value_dim
        rest_column = tl.arange(0, max(triton.next_power_of_2(rest), 16))
        in_rest = is_row[:, None] & (rest_column < rest)[None, :]
        q_rest = tl.load(source[:, None] + rest_column[None, :], mask=in_rest, other=0.0)
    else:
        q_rest = q
    return q, q_rest


@triton.jit
def merge(acc, best, mass, part_acc, part_best, part_mass):
    """Merges two states of disjoint positions."""
    new_best = tl.maximum(best, part_best)
    # For a row that has seen nothing yet, weights are zero instead of inf - inf.
    finite = tl.where(new_best == float("-inf"), 0.0, new_best)
    kept = tl.exp2(best - finite)
    added = tl.exp2(part_best - finite)
    acc = tl.fma(part_acc, added[:, None], acc * kept[:, None])
    mass = tl.fma(part_mass, added, mass * kept)
    return acc, new_best, mass


@triton.jit
def with_sinks(mass, best, sinks_ptr, head, is_row):
    """Returns the sums of rows that have seen all their positions, with the sinks of their heads if there are any."""
    if sinks_ptr is not None:
        sinks = tl.load(sinks_ptr + head, mask=is_row, other=0.0)
        mass += tl.exp2(sinks * _LOG2_E - best)
    return mass


@triton.jit
def _attend_tile(
    q,  # [rows, dim_tile]
    q_rest,  # [rows, rest_tile]
    k,  # [tile_keys, dim_tile]
    k_rest,  # [tile_keys, rest_tile]
    v,  # [tile_keys, dim_tile]
    acc,
    best,
    mass,
    scale,  # of q . k, times log2(e)
    is_seen,  # [rows, tile_keys], read where is_masked
    softcap: tl.constexpr,
    has_rest: tl.constexpr,
    is_masked: tl.constexpr,
    precision: tl.constexpr,
):
    if has_rest:
        scores = tl.dot(q_rest, tl.trans(k_rest), input_precision=precision)
        scores = tl.dot(q, tl.trans(k), scores, input_precision=precision)
    else:
        scores = tl.dot(q, tl.trans(k), input_precision=precision)
    if softcap > 0:
        # tanh(x) = 1 - 2 / (1 + exp(2 x)), whose absolute error is that of a rounding of 1.
        scores = 1.0 - 2.0 / (1.0 + tl.exp2(scores * (scale * (2.0 / softcap))))
        scale = tl.full([], softcap * _LOG2_E, tl.float32)
    if is_masked:
        scores = tl.where(is_seen, scores, float("-inf"))
    new_best = tl.maximum(best, tl.max(scores, 1) * scale)
    finite = new_best
    if is_masked:
        finite = tl.where(new_best == float("-inf"), 0.0, new_best)
    weights = tl.exp2(tl.fma(scores, scale, -finite[:, None]))
    kept = tl.exp2(best - finite)
    mass = tl.fma(mass, kept, tl.sum(weights, 1))
    acc = tl.dot(weights.to(v.dtype), v, acc * kept[:, None], input_precision=precision)
    return acc, new_best, mass


@triton.jit
def block_ids(table_ptr, start, end, tile_keys: tl.constexpr, block_size: tl.constexpr):
    """Returns the ids of a tile's blocks, at most four; arbitrary ids for positions outside the tile, or from `end`
    on.
    """
    tl.static_assert(tile_keys <= 4 * block_size)
    index = start // block_size
    last = tl.maximum(end - 1, 0) // block_size
    first_id = tl.load(table_ptr + tl.minimum(index, last))
    second_id, third_id, fourth_id = first_id, first_id, first_id
    if tile_keys > block_size:
        second_id = tl.load(table_ptr + tl.minimum(index + 1, last))
    if tile_keys > 2 * block_size:
        third_id = tl.load(table_ptr + tl.minimum(index + 2, last))
        fourth_id = tl.load(table_ptr + tl.minimum(index + 3, last))
    return first_id, second_id, third_id, fourth_id


@triton.jit
def id_of_key(ids, place, tile_keys: tl.constexpr, block_size: tl.constexpr):
    """Returns the block of every position in a tile, with scalars and selects, because separate loads would cost
    registers.
    """
    first_id, second_id, third_id, fourth_id = ids
    block = place // block_size
    own = first_id
    if tile_keys > block_size:
        own = tl.where(block == 0, first_id, second_id)
    if tile_keys > 2 * block_size:
        own = tl.where(block < 2, own, tl.where(block == 2, third_id, fourth_id))
    return own


@triton.jit
def _load_latents(
    source, is_there, rest: tl.constexpr, value_dim: tl.constexpr, rest_tile: tl.constexpr, dim_tile: tl.constexpr
):
    """`source` [tile_keys] pointers -> the elements before the values [tile_keys, rest_tile], and the values
    [tile_keys, dim_tile]; zeros where `is_there` is false.
    """
    column = tl.arange(0, rest_tile)
    before = tl.load(
        source[:, None] + column[None, :], mask=is_there[:, None] & (column < rest)[None, :], other=0.0
    )  # fmt: skip
    column = rest + tl.arange(0, dim_tile)
    in_value = is_there[:, None] & (column < rest + value_dim)[None, :]
    return before, tl.load(source[:, None] + column[None, :], mask=in_value, other=0.0)


@triton.jit
def walk(
    acc,
    best,
    mass,
    q,  # [rows, dim_tile]
    q_rest,  # [rows, rest_tile]
    position,  # [rows] int32: the position of each query
    keys_ptr,  # the first key of this KV head in block 0
    box,  # descriptor of the cache's rows, read where use_tma
    kv_head,
    table_ptr,  # the request's row of the block table
    ids,  # block_ids of the tile at `low`
    low,
    high,
    first,  # the first position that is loaded; tiles begin at `low`, a multiple of tile_keys
    scale,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    value_dim: tl.constexpr,
    block_size: tl.constexpr,
    window: tl.constexpr,
    softcap: tl.constexpr,
    tile_keys: tl.constexpr,
    is_masked: tl.constexpr,  # else every row sees all positions in [low, high), which are whole tiles
    use_tma: tl.constexpr,  # whole tiles of one block each
    precision: tl.constexpr,
):
    """Returns the state after the tiles of [low, high)."""
    plane: tl.constexpr = num_kv_heads * block_size * head_dim  # elements from a key to its value, in another plane
    rest: tl.constexpr = head_dim - value_dim
    place = tl.arange(0, tile_keys)
    column = tl.arange(0, acc.shape[1])
    in_head = column < value_dim
    # The ids of the next tile are loaded while this one is computed, so that keys never wait for the table.
    for start in tl.range(low, high, tile_keys):
        next_ids = block_ids(table_ptr, start + tile_keys, high, tile_keys, block_size)
        keys = start + place
        if rest > 0:
            own = id_of_key(ids, place, tile_keys, block_size)
            source = keys_ptr + own.to(tl.int64) * plane + (keys % block_size) * head_dim
            is_there = (keys >= first) & (keys < high)
            k_rest, k = _load_latents(source, is_there, rest, value_dim, q_rest.shape[1], acc.shape[1])
            v = k
        elif use_tma:
            row = (ids[0] * (2 * num_kv_heads) + kv_head) * block_size + start % block_size
            k = box.load([row, 0])
            v = box.load([row + num_kv_heads * block_size, 0])
        else:
            own = id_of_key(ids, place, tile_keys, block_size)
            source = keys_ptr + own.to(tl.int64) * (2 * plane) + (keys % block_size) * head_dim
            source = source[:, None] + column[None, :]
            if is_masked:
                is_there = ((keys >= first) & (keys < high))[:, None] & in_head[None, :]
                k = tl.load(source, mask=is_there, other=0.0)
                v = tl.load(source + plane, mask=is_there, other=0.0)
            elif head_dim != column.shape[0]:
                k = tl.load(source, mask=in_head[None, :], other=0.0)
                v = tl.load(source + plane, mask=in_head[None, :], other=0.0)
            else:
                k = tl.load(source)
                v = tl.load(source + plane)
        is_seen = keys[None, :] <= position[:, None]
        if window > 0:
            is_seen &= keys[None, :] > position[:, None] - window
        acc, best, mass = _attend_tile(
            q, q_rest, k, k_rest if rest > 0 else k, v, acc, best, mass, scale, is_seen, softcap, rest > 0, is_masked,
            precision,
        )  # fmt: skip
        ids = next_ids
    return acc, best, mass


@triton.jit
def walk_phases(
    acc,
    best,
    mass,
    q,
    q_rest,
    position,
    keys_ptr,
    box,
    kv_head,
    table_ptr,
    oldest,  # the position of the first query of the tile
    end,  # one after that of the last query
    whole,  # tiles that end here are seen whole, at most oldest + 1; keys from here on are never read by TMA
    low,  # the range of positions to process: multiples of tile_keys
    high,
    scale,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    value_dim: tl.constexpr,
    block_size: tl.constexpr,
    window: tl.constexpr,
    softcap: tl.constexpr,
    tile_keys: tl.constexpr,
    use_tma: tl.constexpr,
    precision: tl.constexpr,
):
    """`walk` over what the queries see of [low, high), with masks only where some query does not see all of a tile."""
    first = 0
    inner = low
    if window > 0:
        first = tl.maximum(oldest - window + 1, 0)
        low = tl.maximum(low, first // tile_keys * tile_keys)
        inner = tl.cdiv(tl.maximum(end - window, 0), tile_keys) * tile_keys
        inner = tl.minimum(tl.maximum(inner, low), tl.minimum(end, high))
        acc, best, mass = walk(
            acc, best, mass, q, q_rest, position, keys_ptr, box, kv_head, table_ptr,
            block_ids(table_ptr, low, inner, tile_keys, block_size), low, inner, first, scale,
            num_kv_heads, head_dim, value_dim, block_size, window, softcap, tile_keys, True, False, precision,
        )  # fmt: skip
    end = tl.minimum(end, high)
    outer = tl.minimum(tl.maximum(whole // tile_keys * tile_keys, inner), high)
    acc, best, mass = walk(
        acc, best, mass, q, q_rest, position, keys_ptr, box, kv_head, table_ptr,
        block_ids(table_ptr, inner, outer, tile_keys, block_size), inner, outer, first, scale,
        num_kv_heads, head_dim, value_dim, block_size, window, softcap, tile_keys, False, use_tma, precision,
    )  # fmt: skip
    acc, best, mass = walk(
        acc, best, mass, q, q_rest, position, keys_ptr, box, kv_head, table_ptr,
        block_ids(table_ptr, outer, end, tile_keys, block_size), outer, end, first, scale,
        num_kv_heads, head_dim, value_dim, block_size, window, softcap, tile_keys, True, False, precision,
    )  # fmt: skip
    return acc, best, mass
