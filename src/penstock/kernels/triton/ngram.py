"""Prompt lookup (Saxena 2023) on the device: `penstock.runner.cpu.ngram`, one program per request.

For every earlier position of the request's tokens a program counts how many preceding tokens match those at the end, up
to the maximum match; among the longest matches it takes the latest. The tokens at that position are the drafts:

    score   int64: length of the match * 2^32 + its end; the largest one decides

All values are integers and exact.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 2048  # positions at a time
_WARPS = 8


def propose_ngrams(
    token_ids: torch.Tensor,  # [max_num_reqs, width] int32
    rows: torch.Tensor,  # [n] int64: state rows; padding, -1, gets gaps
    num_computed: torch.Tensor,  # [n] int64: one more token is known
    shortest: int,  # tokens that must match
    longest: int,
    drafts: torch.Tensor,  # [n, num_drafts] int64, written: -1 is a gap
) -> None:
    num_rows, num_drafts = drafts.shape
    assert rows.shape == num_computed.shape == (num_rows,), f"{rows.shape} {num_computed.shape} for {drafts.shape}"
    assert token_ids.stride(1) == 1 and drafts.is_contiguous(), f"{token_ids.stride()} {drafts.stride()}"
    assert 0 < shortest <= longest, f"{shortest} to {longest} tokens"
    _propose_ngrams[(num_rows,)](
        token_ids, rows, num_computed, drafts, token_ids.stride(0), num_drafts, shortest, longest, _BLOCK,
        triton.next_power_of_2(num_drafts),
        num_warps=_WARPS,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["token_stride"], do_not_specialize_on_alignment=["rows_ptr", "num_computed_ptr", "drafts_ptr"]
)
def _propose_ngrams(
    token_ids_ptr, rows_ptr, num_computed_ptr, drafts_ptr, token_stride,
    num_drafts: tl.constexpr, shortest: tl.constexpr, longest: tl.constexpr, block: tl.constexpr,
    drafts_tile: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + index)
    length = tl.where(row >= 0, tl.load(num_computed_ptr + index) + 1, 0)
    tokens = token_ids_ptr + row * token_stride
    best = tl.zeros_like(length)
    offset = tl.zeros_like(length) + 1
    while offset < length:
        # The end of a match, which is the position of the first draft.
        end = offset + tl.arange(0, block)
        count = tl.zeros([block], tl.int64)
        goes_on = end < length
        for number in range(longest):
            wanted = tl.load(tokens + length - 1 - number, mask=number < length, other=-1)
            goes_on = goes_on & (number < end)
            found = tl.load(tokens + end - 1 - number, mask=goes_on, other=-2)
            goes_on = goes_on & (found == wanted)
            count += goes_on.to(tl.int64)
        score = tl.where(count >= shortest, (count << 32) + end, 0)
        best = tl.maximum(best, tl.max(score, 0))
        offset += block
    place = tl.arange(0, drafts_tile)
    source = (best & 4294967295) + place
    draft = tl.load(tokens + source, mask=(best > 0) & (source < length), other=-1)
    tl.store(drafts_ptr + index * num_drafts + place, draft.to(tl.int64), mask=place < num_drafts)
