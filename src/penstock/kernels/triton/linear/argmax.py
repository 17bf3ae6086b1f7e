"""The greedy token of each row: the highest of what the vocabulary's tiles leave. One program per row.

As torch.max does: the first of equals wins, and the value is NaN where any logit is. Exact, whatever the batch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.kernels.triton.linear.device import begin_early, wait_for_inputs

_BEYOND = tl.constexpr(2**31 - 1)


@triton.jit
def argmax(best, best_ids, value, token_id, num_parts: tl.constexpr, block: tl.constexpr, pdl: tl.constexpr):
    """`best` float32 and `best_ids` int32, both [T, num_parts], -> `value` [T] float32, `token_id` [T] int64."""
    begin_early(pdl)
    wait_for_inputs(pdl)
    row = tl.program_id(0).to(tl.int64)
    high = tl.full([block], float("-inf"), tl.float32)
    first = tl.full([block], _BEYOND, tl.int32)
    nans = tl.zeros([block], tl.int32)
    for start in tl.range(0, num_parts, block):
        place = start + tl.arange(0, block)
        values = tl.load(best + row * num_parts + place, mask=place < num_parts, other=float("-inf"))
        ids = tl.load(best_ids + row * num_parts + place, mask=place < num_parts, other=_BEYOND)
        is_nan = values != values
        nans |= is_nan.to(tl.int32)
        values = tl.where(is_nan, float("inf"), values)
        # A later part stands further back in the vocabulary, so only a higher value displaces what was found.
        is_better = (values > high) | (first == _BEYOND)
        high = tl.where(is_better, values, high)
        first = tl.where(is_better, ids, first)
    highest = tl.max(high)
    tl.store(token_id + row, tl.min(tl.where(high == highest, first, _BEYOND)).to(tl.int64))
    tl.store(value + row, tl.where(tl.max(nans) > 0, float("nan"), highest))
