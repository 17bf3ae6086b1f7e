"""Device functions shared by the products of a decode step: reads of weights and inputs, and epilogues.

Sums arrive as `acc` [tokens, rows] float32, rows being outputs of the weight. The next operation depends on `epilogue`:

    plain       y = acc (+ bias)
    residual    x = x + acc;  scaled = x * gain;  squares = sum over this tile's rows of x^2
    silu        y = silu(gate) * up, of two accumulators

x is rounded before it is multiplied or squared, as a model that stores it and reads it again does. Results beyond the
last token or the last row are computed and not stored.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def begin_early(pdl: tl.constexpr):
    """Lets the next kernel start while this one runs: it may read weights, and waits before it reads anything else."""
    if pdl:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_inputs(pdl: tl.constexpr):
    """After this, all writes of earlier kernels are visible. Every program must call it: later kernels consider a
    kernel complete when all its programs are, and rely on its own inputs having been complete.
    """
    if pdl:
        tl.extra.cuda.gdc_wait()


@triton.jit
def load_weight(
    weight, row, column,
    n: tl.constexpr, k: tl.constexpr, tile_rows: tl.constexpr, depth: tl.constexpr, tma: tl.constexpr,
):  # fmt: skip
    """[tile_rows, depth] of a weight [n, k], from (row, column) on; zeros past k."""
    if tma:
        tile = weight.load([row, column])
    else:
        rows = tl.minimum(row + tl.arange(0, tile_rows), n - 1).to(tl.int64)
        tile = load_rows(weight, rows, column, k, depth)
    return tile


@triton.jit
def load_rows(matrix, rows, column, k: tl.constexpr, depth: tl.constexpr):
    """[len(rows), depth] of a matrix with k columns, from `column` on, zeros past k; `rows` are int64."""
    columns = column + tl.arange(0, depth)
    places = matrix + rows[:, None] * k + columns[None, :]
    if k % depth == 0:
        tile = tl.load(places)
    else:
        tile = tl.load(places, mask=columns[None, :] < k, other=0.0)
    return tile


@triton.jit
def load_squares(squares, tokens, num_parts: tl.constexpr):
    """[len(tokens), at least num_parts] float32: the sums of squares of the parts of each token's row."""
    parts = tl.arange(0, triton.next_power_of_2(num_parts))
    return tl.load(squares + tokens[:, None] * num_parts + parts[None, :], mask=parts[None, :] < num_parts, other=0.0)


@triton.jit
def inverse_rms(squares, eps, width: tl.constexpr):
    """[tokens] float32: 1 / sqrt(mean(x^2) + eps) of rows of `width` elements."""
    return 1.0 / tl.sqrt_rn(tl.sum(squares, axis=1) / width + eps)


@triton.jit
def add_residual(
    acc, old, gain, residual, scaled, squares, places, is_there, tokens, num_tokens, part, num_parts: tl.constexpr
):
    """`old` [tokens, rows] of the stream and `gain` [rows] are loaded before the sums are complete."""
    stream = (old.to(tl.float32) + acc).to(residual.dtype.element_ty)
    tl.store(residual + places, stream, mask=is_there)
    wide = tl.where(is_there, stream.to(tl.float32), 0.0)
    tl.store(scaled + places, (wide * gain.to(tl.float32)[None, :]).to(scaled.dtype.element_ty), mask=is_there)
    tl.store(squares + tokens * num_parts + part, tl.sum(wide * wide, axis=1), mask=tokens < num_tokens)


@triton.jit
def store_silu(gate, up, out, places, is_there):
    tl.store(out + places, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=is_there)


@triton.jit
def finish(
    acc, up, old, gain, bias, residual, out, side, first_row, first_token, num_tokens,
    n: tl.constexpr, tile_rows: tl.constexpr, tile_tokens: tl.constexpr, epilogue: tl.constexpr,
):  # fmt: skip
    """Applies the epilogue to the sums `acc` (and `up`), [tile_tokens, tile_rows], of the outputs from `first_row` on.

    `side` takes the squares of a tile's part of the residual stream.
    """
    tokens = first_token + tl.arange(0, tile_tokens)
    rows = first_row + tl.arange(0, tile_rows)
    is_there = (tokens < num_tokens)[:, None] & (rows < n)[None, :]
    places = tokens.to(tl.int64)[:, None] * n + rows[None, :]
    parts: tl.constexpr = (n + tile_rows - 1) // tile_rows
    part = first_row // tile_rows
    if epilogue == "residual":
        add_residual(acc, old, gain, residual, out, side, places, is_there, tokens, num_tokens, part, parts)
    elif epilogue == "silu":
        store_silu(acc, up, out, places, is_there)
    else:
        if bias is not None:
            acc += tl.load(bias + rows, mask=rows < n, other=0.0).to(tl.float32)[None, :]
        tl.store(out + places, acc.to(out.dtype.element_ty), mask=is_there)
