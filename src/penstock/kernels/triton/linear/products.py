"""The two products of a decode step, y = x @ W.T: one token by one thread's arithmetic, more by tensor cores.

W is [N, K], row-major, in bfloat16, float16 or float32; x is [T, K] of the same dtype; sums are float32. Where x is
`scaled` of a stream (PARTS > 0), sums are divided by the stream's rms. The weight stands on the long side of the tensor
core's tile ("swapped"), so that few tokens waste little of it.

A program reads its first tile of the weight before it waits for the kernels before it. Tensor cores add that tile last:
its input cannot be there before those of the tiles behind it are on their way.

A row's bits depend on its own numbers and on the tile alone, so on the bucket of T, not on T or the neighbours.
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
    x, weight, squares, bias, old_residual, gain, residual, out, side, side_ids, eps,
    N: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
    STAGES: tl.constexpr, EPILOGUE: tl.constexpr, STORES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token; grid [tiles of N]. N counts the outputs: a silu weight has 2 N rows, the gate's first."""
    begin_early(PDL)
    first_row = tl.program_id(0) * ROWS
    if EPILOGUE == "silu":
        # Gate and up of an output stand side by side in the tile, to be told apart by a reshape.
        place = tl.arange(0, 2 * ROWS)
        rows = tl.minimum(first_row + place // 2, N - 1) + (place % 2) * N
    else:
        rows = tl.minimum(first_row + tl.arange(0, ROWS), N - 1)
    tile = load_rows(weight, rows.to(tl.int64), 0, K, DEPTH)
    outputs = first_row + tl.arange(0, ROWS)
    gains = tl.load(gain + outputs, mask=outputs < N, other=0.0) if EPILOGUE == "residual" else 0.0
    wait_for_inputs(PDL)
    old = 0.0
    if EPILOGUE == "residual":
        old = tl.load(old_residual + outputs[None, :], mask=outputs[None, :] < N, other=0.0)
    token = tl.arange(0, 1)
    sums_of_squares = load_squares(squares, token, PARTS) if PARTS > 0 else 0.0
    inputs = load_rows(x, token.to(tl.int64), 0, K, DEPTH)
    products = tl.zeros(tile.shape, tl.float32)
    for column in tl.range(DEPTH, K, DEPTH):
        if STAGES > 1:
            next_tile = load_rows(weight, rows.to(tl.int64), column, K, DEPTH)
            next_inputs = load_rows(x, token.to(tl.int64), column, K, DEPTH)
            products += tile.to(tl.float32) * inputs.to(tl.float32)
            tile = next_tile
            inputs = next_inputs
        else:
            products += tile.to(tl.float32) * inputs.to(tl.float32)
            tile = load_rows(weight, rows.to(tl.int64), column, K, DEPTH)
            inputs = load_rows(x, token.to(tl.int64), column, K, DEPTH)
    products += tile.to(tl.float32) * inputs.to(tl.float32)
    acc = tl.sum(products, axis=1)
    if PARTS > 0:
        acc *= tl.sum(inverse_rms(sums_of_squares, eps, K))
    up = 0.0
    if EPILOGUE == "silu":
        acc, up = tl.split(tl.reshape(acc, [ROWS, 2]))
        up = up[None, :]
    finish(acc[None, :], up, old, gains, bias, residual, out, side, side_ids, first_row, 0, 1,
           N, ROWS, 1, EPILOGUE, STORES)  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens"])
def gemm(
    x, weight, squares, bias, old_residual, gain, residual, out, side, side_ids, eps, partials, counters, num_tokens,
    N: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    DEPTH: tl.constexpr, SPLIT: tl.constexpr, EPILOGUE: tl.constexpr, STORES: tl.constexpr, TMA: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Any number of tokens; grid [tiles of tokens, tiles of N, SPLIT], SPLIT dividing the steps of K. N as above."""
    begin_early(PDL)
    first_token = tl.program_id(0) * TOKENS
    first_row = tl.program_id(1) * ROWS
    tl.static_assert(SPLIT == 1 or EPILOGUE == "residual", "only what ends in the stream is added up across programs")
    steps: tl.constexpr = (K + DEPTH - 1) // DEPTH // SPLIT
    begin = tl.program_id(2) * (steps * DEPTH)
    pair: tl.constexpr = EPILOGUE == "silu"
    height: tl.constexpr = 2 * N if pair else N
    first_tile = load_weight(weight, first_row, begin, height, K, ROWS, DEPTH, TMA)
    second_tile = load_weight(weight, N + first_row, begin, height, K, ROWS, DEPTH, TMA) if pair else first_tile
    outputs = first_row + tl.arange(0, ROWS)
    gains = tl.load(gain + outputs, mask=outputs < N, other=0.0) if EPILOGUE == "residual" else 0.0
    wait_for_inputs(PDL)
    tokens = first_token + tl.arange(0, TOKENS)
    # Beyond the last token it is computed once more: what stands for it is as harmless as any.
    token_rows = tl.minimum(tokens, num_tokens - 1).to(tl.int64)
    first_inputs = load_rows(x, token_rows, begin, K, DEPTH)
    sums_of_squares = load_squares(squares, token_rows, PARTS) if PARTS > 0 else 0.0
    old = 0.0
    if EPILOGUE == "residual":
        places = token_rows[:, None] * N + outputs[None, :]
        old = tl.load(old_residual + places, mask=outputs[None, :] < N, other=0.0)
    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    up = acc
    for step in tl.range(1, steps):
        column = begin + step * DEPTH
        inputs = tl.trans(load_rows(x, token_rows, column, K, DEPTH))
        tile = load_weight(weight, first_row, column, height, K, ROWS, DEPTH, TMA)
        acc = tl.dot(tile, inputs, acc, input_precision="ieee")
        if pair:
            tile = load_weight(weight, N + first_row, column, height, K, ROWS, DEPTH, TMA)
            up = tl.dot(tile, inputs, up, input_precision="ieee")
    acc = tl.trans(tl.dot(first_tile, tl.trans(first_inputs), acc, input_precision="ieee"))
    if pair:
        up = tl.trans(tl.dot(second_tile, tl.trans(first_inputs), up, input_precision="ieee"))
    if SPLIT > 1:
        tile_id = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        is_last = share_sums(acc, partials, counters, tile_id, ROWS, TOKENS, SPLIT)
        if is_last:
            acc = gather_sums(partials, tile_id, ROWS, TOKENS, SPLIT)
            finish(acc, up, old, gains, bias, residual, out, side, side_ids, first_row, first_token, num_tokens,
                   N, ROWS, TOKENS, EPILOGUE, STORES)  # fmt: skip
    else:
        if PARTS > 0:
            scale = inverse_rms(sums_of_squares, eps, K)[:, None]
            acc *= scale
            if pair:
                up *= scale
        finish(acc, up, old, gains, bias, residual, out, side, side_ids, first_row, first_token, num_tokens,
               N, ROWS, TOKENS, EPILOGUE, STORES)  # fmt: skip


@triton.jit
def places_of_sums(tile_id, ROWS: tl.constexpr, TOKENS: tl.constexpr):
    return (tile_id * TOKENS + tl.arange(0, TOKENS))[:, None] * ROWS + tl.arange(0, ROWS)[None, :]


@triton.jit
def share_sums(acc, partials, counters, tile_id, ROWS: tl.constexpr, TOKENS: tl.constexpr, SPLIT: tl.constexpr):
    """Leaves this part's sums where others find them, and tells whether all the other parts have done so already."""
    part = tl.program_id(2)
    tl.store(partials + places_of_sums(tile_id * SPLIT + part, ROWS, TOKENS), acc)
    # All threads have stored before one of them says so.
    tl.debug_barrier()
    is_last = tl.atomic_add(counters + tile_id, 1, sem="acq_rel", scope="gpu") == SPLIT - 1
    if is_last:
        # For the next launch: nobody else looks at it any more.
        tl.store(counters + tile_id, 0)
    return is_last


@triton.jit
def gather_sums(partials, tile_id, ROWS: tl.constexpr, TOKENS: tl.constexpr, SPLIT: tl.constexpr):
    """[TOKENS, ROWS]: all parts' sums, in the order of the parts whoever came last."""
    acc = tl.zeros([TOKENS, ROWS], tl.float32)
    for part in tl.static_range(SPLIT):
        places = places_of_sums(tile_id * SPLIT + part, ROWS, TOKENS)
        acc += tl.load(partials + places, cache_modifier=".cg")
    return acc
