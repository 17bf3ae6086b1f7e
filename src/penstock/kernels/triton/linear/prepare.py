"""The first kernel of a decode step: embeds its tokens into a stream. One program per token.

    x = table[id];  scaled = x * gain, rounded;  squares = sum(x^2)

An id outside of the table is a bug of the caller: it reads the nearest row rather than other memory. A row's
bits depend on its own id alone.

This is the only kernel of a step that starts after all earlier work is complete, so that the following kernels may read
weights early.
"""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.kernels.triton.linear.device import begin_early


@triton.jit
def prepare(
    ids, table, gain, x, scaled, squares,
    vocab: tl.constexpr, hidden: tl.constexpr, block: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """`ids` [T] int64, `table` [vocab, hidden], `gain` [hidden] -> `x` and `scaled` [T, hidden], `squares` [T, 1]."""
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
