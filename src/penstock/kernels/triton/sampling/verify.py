"""Which drafts stand, and what takes the place of those that do not.

`verify` accepts, of each request's window, the run of drafts that are the tokens sampled in their places; a gap (-1) is
never accepted. `accept_or_resample` is the rejection sampling of `penstock.runner.speculation.rejection` (Leviathan et
al. 2023, arXiv:2211.17192): a draft x is accepted with probability min(1, p(x) / q(x)), and otherwise a token drawn
from max(0, p - q). One program per request or row; sums are taken over fixed tiles in their order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from penstock.kernels.triton.sampling.draw import first_above
from penstock.kernels.triton.sampling.tiles import padded_tiles

_DRAFTS_WARPS = 1
_TILE = 4096  # of the vocabulary, summed at a time
_WARPS = 8


def verify(
    sampled: torch.Tensor,  # [num_logits] int64, window after window
    drafts: torch.Tensor,  # [max_num_reqs, max_num_drafts] int64, by state row; -1 is a gap
    rows: torch.Tensor,  # [R] int64: state rows, -1 for padding
    logits_start_loc: torch.Tensor,  # [R + 1] int32: request r owns rows logits_start_loc[r] .. [r + 1] of `sampled`
    num_accepted: torch.Tensor,  # [R] int64, written
    num_real_drafts: torch.Tensor,  # [R] int64, written: drafts before the first gap
) -> None:
    """A window of n rows judges its request's first n - 1 drafts; where there is none, nothing is accepted."""
    num_reqs, max_num_drafts = len(rows), drafts.shape[1]
    assert logits_start_loc.shape == (num_reqs + 1,), f"{tuple(logits_start_loc.shape)} for {num_reqs} requests"
    assert num_accepted.shape == num_real_drafts.shape == (num_reqs,), f"{num_accepted.shape} {num_real_drafts.shape}"
    assert drafts.is_contiguous(), f"drafts have strides {drafts.stride()}"
    _verify[(num_reqs,)](
        sampled,
        drafts,
        rows,
        logits_start_loc,
        num_accepted,
        num_real_drafts,
        max_num_drafts,
        triton.next_power_of_2(max(max_num_drafts, 1)),
        num_warps=_DRAFTS_WARPS,
    )


def accept_or_resample(
    target: torch.Tensor,  # [n, vocab_size] float32 probabilities
    draft: torch.Tensor,  # [n, vocab_size] float32 probabilities
    drafts: torch.Tensor,  # [n] int64
    accept: torch.Tensor,  # [n] float64 in [0, 1)
    resample: torch.Tensor,  # [n] float64 in [0, 1)
    out: torch.Tensor | None = None,  # [n] int64
) -> torch.Tensor:
    """[n] int64: each draft, or the token in its place. A draft without mass, or of NaN, is never accepted."""
    num_rows, vocab_size = target.shape
    assert draft.shape == target.shape and target.dtype == draft.dtype == torch.float32, f"{target.shape} {draft.shape}"
    assert target.is_contiguous() and draft.is_contiguous(), f"strides are {target.stride()} and {draft.stride()}"
    assert drafts.shape == accept.shape == resample.shape == (num_rows,), f"{drafts.shape} for {num_rows} rows"
    out = torch.empty_like(drafts) if out is None else out
    _accept_or_resample[(num_rows,)](
        target,
        draft,
        drafts,
        accept,
        resample,
        out,
        vocab_size,
        _TILE,
        padded_tiles(triton.cdiv(vocab_size, _TILE)),
        num_warps=_WARPS,
    )
    return out


@triton.jit(
    do_not_specialize_on_alignment=[
        "sampled_ptr", "rows_ptr", "starts_ptr", "num_accepted_ptr", "num_real_drafts_ptr",
    ]
)  # fmt: skip
def _verify(
    sampled_ptr,
    drafts_ptr,
    rows_ptr,
    starts_ptr,
    num_accepted_ptr,
    num_real_drafts_ptr,
    max_num_drafts: tl.constexpr,
    tile: tl.constexpr,
):
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


@triton.jit(do_not_specialize_on_alignment=["drafts_ptr", "accept_ptr", "resample_ptr", "out_ptr"])
def _accept_or_resample(
    target_ptr,
    draft_ptr,
    drafts_ptr,
    accept_ptr,
    resample_ptr,
    out_ptr,
    vocab: tl.constexpr,
    tile: tl.constexpr,
    all_tiles: tl.constexpr,
):
    index = tl.program_id(0)
    start = index.to(tl.int64) * vocab
    token = tl.load(drafts_ptr + index)
    of_target = tl.load(target_ptr + start + token).to(tl.float64)
    of_draft = tl.load(draft_ptr + start + token).to(tl.float64)
    is_accepted = (of_draft > 0) & (tl.load(accept_ptr + index) * of_draft < of_target)
    if not is_accepted:
        sums = _sum_tiles(target_ptr, draft_ptr, start, True, vocab, tile, all_tiles)
        # Nothing may be left of equal distributions but for a rounding, or where the drafter's is NaN.
        has_residual = tl.sum(sums, 0) > 0
        if not has_residual:
            sums = _sum_tiles(target_ptr, draft_ptr, start, False, vocab, tile, all_tiles)
        cdf = tl.cumsum(sums, 0)
        total = tl.max(cdf, 0)
        goal = tl.minimum(tl.load(resample_ptr + index) * total, total * (1.0 - 1.0 / 9007199254740992.0))
        number = first_above(cdf, sums, goal, all_tiles)
        before = tl.max(tl.where(tl.arange(0, all_tiles) < number, cdf, 0.0), 0)
        masses = _load_residual(target_ptr, draft_ptr, start, number * tile, has_residual, vocab, tile)
        token = (number * tile + first_above(tl.cumsum(masses, 0), masses, goal - before, tile)).to(tl.int64)
    tl.store(out_ptr + index, token)


@triton.jit
def _load_residual(target_ptr, draft_ptr, start, offset, has_residual, vocab: tl.constexpr, tile: tl.constexpr):
    """[tile] float64: max(0, target - draft), or the target where nothing is left of it; NaN stays."""
    place = offset + tl.arange(0, tile)
    target = tl.load(target_ptr + start + place, mask=place < vocab, other=0.0)
    residual = target - tl.load(draft_ptr + start + place, mask=place < vocab, other=0.0)
    residual = tl.where(residual < 0, 0.0, residual)
    return tl.where(has_residual, residual, target).to(tl.float64)


@triton.jit
def _sum_tiles(
    target_ptr, draft_ptr, start, has_residual, vocab: tl.constexpr, tile: tl.constexpr, all_tiles: tl.constexpr
):
    """[all_tiles] float64: the mass of each tile, 0 behind the vocabulary."""
    sums = tl.zeros([all_tiles], tl.float64)
    for offset in range(0, vocab, tile):
        masses = _load_residual(target_ptr, draft_ptr, start, offset, has_residual, vocab, tile)
        sums = tl.where(tl.arange(0, all_tiles) == offset // tile, tl.sum(masses, 0), sums)
    return sums
