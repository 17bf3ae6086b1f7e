"""The kernels of a decode step: `prepare`, which embeds its tokens, and its two products, y = x @ W.T, `gemv` for one
token without tensor cores, and `gemm` for more with them.

W is [N, K], row-major, in bfloat16, float16 or float32; x is [T, K] of the same dtype; sums are float32. If x is the
`scaled` of a stream, whose squares are given in `num_parts`, sums are divided by the stream's rms. The weight is on the
long side of the tensor core's tile ("swapped"), so that few tokens waste little of it.

A program reads its first tile of the weight before it waits for the preceding kernels. Tensor cores add that tile last,
so that the next tiles are being loaded before its input is needed; without `early` they begin with it, after the wait.

A row's bits depend only on its own numbers and on the tile, so on the bucket of T, not on T or the neighbours.
"""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.kernels.triton.linear.device import (
    begin_early,
    finish,
    inverse_rms,
    load_rows,
    load_squares,
    load_weight,
    wait_for_inputs,
)


@triton.jit
def gemv(
    x, weight, squares, bias, old_residual, gain, residual, out, side, eps,
    n: tl.constexpr, k: tl.constexpr, num_parts: tl.constexpr, tile_rows: tl.constexpr, depth: tl.constexpr,
    stages: tl.constexpr, epilogue: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """One token; grid [tiles of n]. n counts the outputs: a silu weight has 2 n rows, the gate's first."""
    begin_early(pdl)
    first_row = tl.program_id(0) * tile_rows
    if epilogue == "silu":
        # Gate and up of an output are adjacent in the tile, and are separated by a reshape.
        place = tl.arange(0, 2 * tile_rows)
        rows = tl.minimum(first_row + place // 2, n - 1) + (place % 2) * n
    else:
        rows = tl.minimum(first_row + tl.arange(0, tile_rows), n - 1)
    tile = load_rows(weight, rows.to(tl.int64), 0, k, depth)
    outputs = first_row + tl.arange(0, tile_rows)
    gains = tl.load(gain + outputs, mask=outputs < n, other=0.0) if epilogue == "residual" else 0.0
    wait_for_inputs(pdl)
    old = 0.0
    if epilogue == "residual":
        old = tl.load(old_residual + outputs[None, :], mask=outputs[None, :] < n, other=0.0)
    token = tl.arange(0, 1)
    sums_of_squares = load_squares(squares, token, num_parts) if num_parts > 0 else 0.0
    inputs = load_rows(x, token.to(tl.int64), 0, k, depth)
    products = tl.zeros(tile.shape, tl.float32)
    for column in tl.range(depth, k, depth):
        if stages > 1:
            next_tile = load_rows(weight, rows.to(tl.int64), column, k, depth)
            next_inputs = load_rows(x, token.to(tl.int64), column, k, depth)
            products += tile.to(tl.float32) * inputs.to(tl.float32)
            tile = next_tile
            inputs = next_inputs
        else:
            products += tile.to(tl.float32) * inputs.to(tl.float32)
            tile = load_rows(weight, rows.to(tl.int64), column, k, depth)
            inputs = load_rows(x, token.to(tl.int64), column, k, depth)
    products += tile.to(tl.float32) * inputs.to(tl.float32)
    acc = tl.sum(products, axis=1)
    if num_parts > 0:
        acc *= tl.sum(inverse_rms(sums_of_squares, eps, k))
    up = 0.0
    if epilogue == "silu":
        acc, up = tl.split(tl.reshape(acc, [tile_rows, 2]))
        up = up[None, :]
    finish(acc[None, :], up, old, gains, bias, residual, out, side, first_row, 0, 1,
           n, tile_rows, 1, epilogue)  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens"])
def gemm(
    x, weight, squares, bias, old_residual, gain, residual, out, side, eps, partials, counters, num_tokens,
    n: tl.constexpr, k: tl.constexpr, num_parts: tl.constexpr, tile_rows: tl.constexpr, tile_tokens: tl.constexpr,
    depth: tl.constexpr, split: tl.constexpr, early: tl.constexpr, epilogue: tl.constexpr,
    tma: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """Any number of tokens; grid [tiles of tokens, tiles of n, split], where `split` divides the steps of k."""
    begin_early(pdl)
    first_token = tl.program_id(0) * tile_tokens
    first_row = tl.program_id(1) * tile_rows
    tl.static_assert(split == 1 or epilogue == "residual", "only what ends in the stream is added up across programs")
    steps: tl.constexpr = (k + depth - 1) // depth // split
    begin = tl.program_id(2) * (steps * depth)
    pair: tl.constexpr = epilogue == "silu"
    if early:
        first_tile, first_up_tile = load_tiles(weight, first_row, begin, n, k, tile_rows, depth, tma, pair)
    outputs = first_row + tl.arange(0, tile_rows)
    gains = tl.load(gain + outputs, mask=outputs < n, other=0.0) if epilogue == "residual" else 0.0
    wait_for_inputs(pdl)
    tokens = first_token + tl.arange(0, tile_tokens)
    # Rows beyond the last token recompute it, which is harmless.
    token_rows = tl.minimum(tokens, num_tokens - 1).to(tl.int64)
    if early:
        first_inputs = tl.trans(load_rows(x, token_rows, begin, k, depth))
    sums_of_squares = load_squares(squares, token_rows, num_parts) if num_parts > 0 else 0.0
    old = 0.0
    if epilogue == "residual":
        places = token_rows[:, None] * n + outputs[None, :]
        old = tl.load(old_residual + places, mask=outputs[None, :] < n, other=0.0)
    acc = tl.zeros([tile_rows, tile_tokens], tl.float32)
    up = acc
    for step in tl.range(1 if early else 0, steps):
        column = begin + step * depth
        inputs = tl.trans(load_rows(x, token_rows, column, k, depth))
        tile, up_tile = load_tiles(weight, first_row, column, n, k, tile_rows, depth, tma, pair)
        acc, up = add_products(acc, up, tile, up_tile, inputs, pair)
    if early:
        acc, up = add_products(acc, up, first_tile, first_up_tile, first_inputs, pair)
    acc, up = tl.trans(acc), tl.trans(up)
    if split > 1:
        tile_id = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        is_last = share_sums(acc, partials, counters, tile_id, tile_rows, tile_tokens, split)
        if is_last:
            acc = gather_sums(partials, tile_id, tile_rows, tile_tokens, split)
            finish(acc, up, old, gains, bias, residual, out, side, first_row, first_token, num_tokens,
                   n, tile_rows, tile_tokens, epilogue)  # fmt: skip
    else:
        if num_parts > 0:
            scale = inverse_rms(sums_of_squares, eps, k)[:, None]
            acc *= scale
            up *= scale
        finish(acc, up, old, gains, bias, residual, out, side, first_row, first_token, num_tokens,
               n, tile_rows, tile_tokens, epilogue)  # fmt: skip


@triton.jit
def load_tiles(weight, row, column, n: tl.constexpr, k: tl.constexpr, tile_rows: tl.constexpr, depth: tl.constexpr,
               tma: tl.constexpr, pair: tl.constexpr):  # fmt: skip
    """Returns [tile_rows, depth] of the weight and, for a pair with n rows each, of its other half."""
    if pair:
        tile = load_weight(weight, row, column, 2 * n, k, tile_rows, depth, tma)
        up_tile = load_weight(weight, n + row, column, 2 * n, k, tile_rows, depth, tma)
    else:
        tile = load_weight(weight, row, column, n, k, tile_rows, depth, tma)
        up_tile = tile
    return tile, up_tile


@triton.jit
def add_products(acc, up, tile, up_tile, inputs, pair: tl.constexpr):
    acc = tl.dot(tile, inputs, acc, input_precision="ieee")
    if pair:
        up = tl.dot(up_tile, inputs, up, input_precision="ieee")
    return acc, up


@triton.jit
def places_of_sums(tile_id, tile_rows: tl.constexpr, tile_tokens: tl.constexpr):
    return (tile_id * tile_tokens + tl.arange(0, tile_tokens))[:, None] * tile_rows + tl.arange(0, tile_rows)[None, :]


@triton.jit
def share_sums(
    acc, partials, counters, tile_id, tile_rows: tl.constexpr, tile_tokens: tl.constexpr, split: tl.constexpr
):
    """Stores this part's sums for the other programs, and returns whether all other parts have done so already."""
    part = tl.program_id(2)
    tl.store(partials + places_of_sums(tile_id * split + part, tile_rows, tile_tokens), acc)
    # All threads must have stored before one of them counts the part.
    tl.debug_barrier()
    is_last = tl.atomic_add(counters + tile_id, 1, sem="acq_rel", scope="gpu") == split - 1
    if is_last:
        # Resets it for the next launch: no other program reads it any more.
        tl.store(counters + tile_id, 0)
    return is_last


@triton.jit
def gather_sums(partials, tile_id, tile_rows: tl.constexpr, tile_tokens: tl.constexpr, split: tl.constexpr):
    """Returns [tile_tokens, tile_rows]: all parts' sums, in the order of the parts, whichever program finished last."""
    acc = tl.zeros([tile_tokens, tile_rows], tl.float32)
    for part in tl.static_range(split):
        places = places_of_sums(tile_id * split + part, tile_rows, tile_tokens)
        acc += tl.load(partials + places, cache_modifier=".cg")
    return acc


@triton.jit
def prepare(
    ids, table, gain, x, scaled, squares,
    vocab: tl.constexpr, hidden: tl.constexpr, block: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """`ids` [T] int64, `table` [vocab, hidden], `gain` [hidden] -> `x` and `scaled` [T, hidden], `squares` [T, 1].

        x = table[id];  scaled = x * gain, rounded;  squares = sum(x^2)

    One program per token. An id outside of the table is a bug of the caller: it reads the nearest row rather than other
    memory. A row's bits depend on its own id alone. This is the only kernel of a step that starts after all earlier
    work is complete, so that the following kernels may read weights early.
    """
    begin_early(pdl)
    token = tl.program_id(0)
    place = tl.arange(0, block)
    is_inside = place < hidden
    row = tl.minimum(tl.maximum(tl.load(ids + token), 0), vocab - 1).to(tl.int64)
    values = tl.load(table + row * hidden + place, mask=is_inside, other=0.0)
    gains = tl.load(gain + place, mask=is_inside, other=0.0)
    start = token.to(tl.int64) * hidden
    tl.store(x + start + place, values, mask=is_inside)
    wide = values.to(tl.float32)
    tl.store(scaled + start + place, (wide * gains.to(tl.float32)).to(scaled.dtype.element_ty), mask=is_inside)
    tl.store(squares + token, tl.sum(wide * wide))
