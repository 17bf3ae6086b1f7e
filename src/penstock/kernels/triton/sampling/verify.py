"""Determines which drafts are accepted. `verify` accepts, in each request's window, the leading drafts that equal the
sampled tokens; a gap (-1) is never accepted. `toss` accepts at random, like the synthetic rule of
`penstock.runner.speculation.verifier`: if the number of (seed, position) is below the position's rate and the request's
grammar allows the draft. One program per request.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from penstock.kernels.triton.sampling.noise import uniform_of

_WARPS = 1


def verify(
    sampled: torch.Tensor,  # [num_logits] int64, window after window
    drafts: torch.Tensor,  # [max_num_reqs, max_num_drafts] int64, by state row; -1 is a gap
    rows: torch.Tensor,  # [R] int64: state rows, -1 for padding
    logits_start_loc: torch.Tensor,  # [R + 1] int32: request r owns rows logits_start_loc[r] .. [r + 1] of `sampled`
    num_accepted: torch.Tensor,  # [R] int64, written
    num_real_drafts: torch.Tensor,  # [R] int64, written: drafts before the first gap
) -> None:
    """A window of n rows verifies its request's first n - 1 drafts; without a window nothing is accepted."""
    num_reqs, max_num_drafts = len(rows), drafts.shape[1]
    assert logits_start_loc.shape == (num_reqs + 1,), f"{tuple(logits_start_loc.shape)} for {num_reqs} requests"
    assert num_accepted.shape == num_real_drafts.shape == (num_reqs,), f"{num_accepted.shape} {num_real_drafts.shape}"
    assert drafts.is_contiguous(), f"drafts have strides {drafts.stride()}"
    _verify[(num_reqs,)](
        sampled, drafts, rows, logits_start_loc, num_accepted, num_real_drafts, max_num_drafts,
        triton.next_power_of_2(max(max_num_drafts, 1)),
        num_warps=_WARPS,
    )  # fmt: skip


def toss(
    token_ids: torch.Tensor,  # [num_logits] int64: sampled tokens, window after window; accepted drafts are written
    positions: torch.Tensor,  # [num_logits] int64
    drafts: torch.Tensor,  # [max_num_reqs, max_num_drafts] int64, by state row; -1 is a gap
    seed: torch.Tensor,  # [max_num_reqs] or [max_num_reqs, 1] int64, by state row
    rates: torch.Tensor,  # [max_num_drafts] float64: the probability of each place once those before it are accepted
    purpose: int,
    mask_of_row: torch.Tensor,  # [num_logits] int32: index of the bitmask, -1 for none; empty if none has one
    bitmasks: torch.Tensor,  # [m, words] int32: bit t % 32 of word t // 32 allows token t
    rows: torch.Tensor,  # as in `verify`, and so are the rest
    logits_start_loc: torch.Tensor,
    num_accepted: torch.Tensor,
    num_real_drafts: torch.Tensor,
) -> None:
    num_reqs, max_num_drafts = len(rows), drafts.shape[1]
    assert logits_start_loc.shape == (num_reqs + 1,), f"{tuple(logits_start_loc.shape)} for {num_reqs} requests"
    assert num_accepted.shape == num_real_drafts.shape == (num_reqs,), f"{num_accepted.shape} {num_real_drafts.shape}"
    assert drafts.is_contiguous() and bitmasks.is_contiguous(), f"{drafts.stride()} {bitmasks.stride()}"
    assert rates.shape == (max_num_drafts,) and rates.dtype == torch.float64, f"{rates.shape} {rates.dtype}"
    _toss[(num_reqs,)](
        token_ids, positions, drafts, seed, rates, mask_of_row, bitmasks, rows, logits_start_loc, num_accepted,
        num_real_drafts, len(mask_of_row), bitmasks.shape[1], purpose, max_num_drafts,
        triton.next_power_of_2(max(max_num_drafts, 1)),
        num_warps=_WARPS,
    )  # fmt: skip


@triton.jit(
    do_not_specialize_on_alignment=[
        "sampled_ptr", "rows_ptr", "starts_ptr", "num_accepted_ptr", "num_real_drafts_ptr",
    ]
)  # fmt: skip
def _verify(
    sampled_ptr, drafts_ptr, rows_ptr, starts_ptr, num_accepted_ptr, num_real_drafts_ptr,
    max_num_drafts: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    row = tl.load(rows_ptr + request)
    start = tl.load(starts_ptr + request)
    num_drafts = tl.where(row >= 0, tl.maximum(tl.load(starts_ptr + request + 1) - start - 1, 0), 0)
    place = tl.arange(0, tile)
    in_window = (place < num_drafts) & (place < max_num_drafts)
    draft = tl.load(drafts_ptr + row * max_num_drafts + place, mask=in_window, other=-1)
    sampled = tl.load(sampled_ptr + start + place, mask=in_window, other=-1)
    is_right = (draft >= 0) & (draft == sampled)
    tl.store(num_accepted_ptr + request, tl.min(tl.where(is_right, tile, place), 0).to(tl.int64))
    tl.store(num_real_drafts_ptr + request, tl.min(tl.where(draft >= 0, tile, place), 0).to(tl.int64))


@triton.jit(
    do_not_specialize=["has_bitmasks", "words"],
    do_not_specialize_on_alignment=[
        "token_ids_ptr", "positions_ptr", "mask_of_row_ptr", "bitmasks_ptr", "rows_ptr", "starts_ptr",
        "num_accepted_ptr", "num_real_drafts_ptr",
    ],
)  # fmt: skip
def _toss(
    token_ids_ptr, positions_ptr, drafts_ptr, seed_ptr, rates_ptr, mask_of_row_ptr, bitmasks_ptr, rows_ptr, starts_ptr,
    num_accepted_ptr, num_real_drafts_ptr, has_bitmasks, words,
    purpose: tl.constexpr, max_num_drafts: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    row = tl.load(rows_ptr + request)
    start = tl.load(starts_ptr + request)
    num_drafts = tl.where(row >= 0, tl.maximum(tl.load(starts_ptr + request + 1) - start - 1, 0), 0)
    place = tl.arange(0, tile)
    in_window = (place < num_drafts) & (place < max_num_drafts)
    draft = tl.load(drafts_ptr + row * max_num_drafts + place, mask=in_window, other=-1)
    is_real = draft >= 0
    seed = tl.load(seed_ptr + row, mask=row >= 0, other=0)
    position = tl.load(positions_ptr + start + place, mask=in_window, other=0)
    coin = uniform_of(seed, position, purpose)
    stands = is_real & (coin < tl.load(rates_ptr + place, mask=in_window, other=0.0))
    if has_bitmasks > 0:
        mask_index = tl.load(mask_of_row_ptr + start + place, mask=in_window, other=-1).to(tl.int64)
        word_place = mask_index * words + draft // 32
        word = tl.load(bitmasks_ptr + word_place, mask=stands & (mask_index >= 0), other=-1)
        stands = stands & (((word >> (draft % 32).to(tl.int32)) & 1) == 1)
    tl.store(token_ids_ptr + start + place, draft, mask=stands)
    tl.store(num_accepted_ptr + request, tl.min(tl.where(stands, tile, place), 0).to(tl.int64))
    tl.store(num_real_drafts_ptr + request, tl.min(tl.where(is_real, tile, place), 0).to(tl.int64))
