"""What changes logits in place before tokens are drawn: penalties and grammars' bitmasks.

Penalties are defined in `penstock.runner.sampling.penalties`. A program owns a tile of one row's vocabulary and counts
the request's tokens in it as it reads them, so nothing is kept between steps and no table of the vocabulary's size is
cleared. Rows without a penalty and programs of padding end at once. Every element is changed by one program, from
integer counts: bits depend on the row alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

_TILE = 1024  # of the vocabulary, and bins of a histogram: more of them take too many registers
_TOKENS = 512  # counted at a time
_WARPS = 4
_MASK_TILE = 4096
_BITS = 32  # of a word


@dataclass(frozen=True, slots=True)
class PenaltyTables:
    """Penalties by state row, each [max_num_reqs] or [max_num_reqs, 1]."""

    repetition: torch.Tensor  # float32; 1 is none
    presence: torch.Tensor  # float32; 0 is none
    frequency: torch.Tensor  # float32; 0 is none
    prompt_len: torch.Tensor  # int64: tokens of the prompt, behind which the output begins


def apply_penalties(
    logits: torch.Tensor,  # [n, vocab_size] float32, written
    rows: torch.Tensor,  # [n] int64: state rows, -1 for padding
    positions: torch.Tensor,  # [n] int64: the request's tokens below it count
    token_ids: torch.Tensor,  # [max_num_reqs, width] int32
    tables: PenaltyTables,
) -> None:
    """Repetition first, then frequency and presence."""
    num_rows, vocab_size = logits.shape
    assert logits.dtype == torch.float32 and logits.stride(1) == 1, f"logits are {logits.dtype} {logits.stride()}"
    assert rows.shape == positions.shape == (num_rows,), f"{rows.shape} {positions.shape} for {num_rows} rows"
    assert token_ids.dtype == torch.int32 and token_ids.stride(1) == 1, f"{token_ids.dtype} {token_ids.stride()}"
    _apply_penalties[(num_rows, triton.cdiv(vocab_size, _TILE))](
        logits,
        rows,
        positions,
        token_ids,
        tables.repetition,
        tables.presence,
        tables.frequency,
        tables.prompt_len,
        token_ids.stride(0),
        vocab_size,
        logits.stride(0),
        _TILE,
        _TOKENS,
        num_warps=_WARPS,
    )


def apply_bitmask(
    logits: torch.Tensor,  # [n, vocab_size] float32, written
    indices: torch.Tensor,  # [m] int64: rows of logits; -1 is padding
    bitmasks: torch.Tensor,  # [m, words] int32: bit t % 32 of word t // 32 allows token t
) -> None:
    """Forbids what the rows' grammars do not allow; no row may be named twice."""
    vocab_size = logits.shape[1]
    assert logits.dtype == torch.float32 and logits.stride(1) == 1, f"logits are {logits.dtype} {logits.stride()}"
    count, words = bitmasks.shape
    assert indices.shape == (count,) and words * _BITS >= vocab_size, f"{indices.shape} {bitmasks.shape} {vocab_size}"
    assert bitmasks.is_contiguous(), f"bitmasks have strides {bitmasks.stride()}"
    _apply_bitmask[(count, triton.cdiv(vocab_size, _MASK_TILE))](
        logits, indices, bitmasks, words, vocab_size, logits.stride(0), _MASK_TILE, num_warps=_WARPS
    )


@triton.jit(do_not_specialize=["token_stride"], do_not_specialize_on_alignment=["rows_ptr", "positions_ptr"])
def _apply_penalties(
    logits_ptr,
    rows_ptr,
    positions_ptr,
    token_ids_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    prompt_len_ptr,
    token_stride,
    vocab: tl.constexpr,
    stride: tl.constexpr,
    tile: tl.constexpr,
    tokens_tile: tl.constexpr,
):
    index, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * tile
    row = tl.load(rows_ptr + index)
    if row >= 0:
        repetition, presence = tl.load(repetition_ptr + row), tl.load(presence_ptr + row)
        frequency = tl.load(frequency_ptr + row)
        if (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0):
            known, prompt_len = tl.load(positions_ptr + index), tl.load(prompt_len_ptr + row)
            in_prompt = tl.zeros([tile], tl.int32)
            in_output = tl.zeros([tile], tl.int32)
            start = tl.zeros_like(known)
            while start < known:
                place = start + tl.arange(0, tokens_tile)
                token = tl.load(token_ids_ptr + row * token_stride + place, mask=place < known, other=-1) - first
                is_here = (token >= 0) & (token < tile)
                in_prompt += tl.histogram(token, tile, mask=is_here & (place < prompt_len))
                in_output += tl.histogram(token, tile, mask=is_here & (place >= prompt_len))
                start += tokens_tile
            place = first + tl.arange(0, tile)
            target = logits_ptr + index * stride + place
            is_concerned = (place < vocab) & (in_prompt + in_output > 0)
            logits = tl.load(target, mask=is_concerned, other=0.0)
            logits = tl.where(logits > 0, tl.div_rn(logits, repetition), logits * repetition)
            logits -= frequency * in_output.to(tl.float32)
            logits -= tl.where(in_output > 0, presence, 0.0)
            tl.store(target, logits, mask=is_concerned)


@triton.jit(do_not_specialize_on_alignment=["indices_ptr"])
def _apply_bitmask(
    logits_ptr,
    indices_ptr,
    bitmasks_ptr,
    words: tl.constexpr,
    vocab: tl.constexpr,
    stride: tl.constexpr,
    tile: tl.constexpr,
):
    number = tl.program_id(0).to(tl.int64)
    index = tl.load(indices_ptr + number)
    if index >= 0:
        place = tl.program_id(1) * tile + tl.arange(0, tile)
        word = tl.load(bitmasks_ptr + number * words + place // 32, mask=place < vocab, other=-1)
        is_forbidden = ((word >> (place % 32)) & 1) == 0
        tl.store(logits_ptr + index * stride + place, -float("inf"), mask=is_forbidden)
