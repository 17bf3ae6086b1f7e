"""Builds the flat inputs of a step from state rows and writes the results back, without the CPU.

`prepare_inputs` does in one launch what `penstock.kernels.prepare_inputs` and the gathering of block tables do, into
buffers that the caller owns, `prepare_sampling` determines which of the tokens sample, `finish_step` stores a step's
tokens and counts where the next one reads them, and `store_drafts` the proposed tokens after them. Their grids follow
from shapes alone, so all can be part of a CUDA graph that is replayed with other requests in the buffers.

Padding, in the step's snapshot: `idx_mapping` -1, the tails of `query_start_loc` and `logits_start_loc` are the numbers
of tokens and of logits. It becomes:

    of requests   seq_lens 0, block row 0 (the null block throughout)
    of tokens     row -1, position 0, input id 0, slot -1
    of logits     row -1, position 0, index 0

A program handles one request (one more handles the padding tokens) and either its tokens or one KV group's blocks and
slots. All results are integers and exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

_FAR = 1 << 30
_BLOCK = 1024  # tokens, or entries of a block table, at a time
_WARPS = 4
_WINDOW_BLOCK = 16  # rows of logits of a request at a time: a token and its drafts
_WINDOW_WARPS = 1


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The inputs of a step's forward pass, with one row per padded request and token. May be views of larger
    buffers.
    """

    rows: torch.Tensor  # [T] int64: the state row of each token
    positions: torch.Tensor  # [T] int64
    input_ids: torch.Tensor  # [T] int64
    seq_lens: torch.Tensor  # [R] int32
    block_tables: torch.Tensor  # [G, R, max_blocks] int32, the last dimension contiguous; a row is as long as it needs
    slot_mapping: torch.Tensor  # [G, T] int64, the last dimension contiguous


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """The data of each row of logits known before they are computed, including padding."""

    rows: torch.Tensor  # [L] int64: state rows
    positions: torch.Tensor  # [L] int64: the sampled token's position
    indices: torch.Tensor  # [L] int64: the step's token whose hidden state gives the logits


def prepare_inputs(
    idx_mapping: torch.Tensor,  # [R] int64
    query_start_loc: torch.Tensor,  # [R + 1] int32
    num_computed: torch.Tensor,  # [max_num_reqs + 1, 1] int64
    token_ids: torch.Tensor,  # [max_num_reqs + 1, width] int32
    block_tables: torch.Tensor,  # [G, max_num_reqs + 1, max_blocks] int32
    block_size: int,
    out: StepInputs,
    ahead: int = 0,
    last_position: int = _FAR,
) -> None:
    """Writes all of `out`, except the entries of block rows after the blocks of their request.

    `ahead` tokens after the computed ones are skipped, and no position exceeds `last_position`.
    """
    num_reqs, num_tokens = len(idx_mapping), len(out.positions)
    num_groups, _, max_blocks = block_tables.shape
    assert query_start_loc.shape == (num_reqs + 1,), f"{tuple(query_start_loc.shape)} for {num_reqs} requests"
    assert out.rows.shape == out.input_ids.shape == (num_tokens,), f"{out.rows.shape} {out.input_ids.shape}"
    assert out.slot_mapping.shape == (num_groups, num_tokens), f"{out.slot_mapping.shape} {num_groups} {num_tokens}"
    assert out.block_tables.shape == (num_groups, num_reqs, max_blocks), f"{out.block_tables.shape} {num_reqs}"
    assert out.seq_lens.shape == (num_reqs,), f"{out.seq_lens.shape} {num_reqs}"
    assert out.block_tables.stride(2) == out.slot_mapping.stride(1) == 1, f"{out.block_tables.stride()}"
    assert num_computed.is_contiguous() and token_ids.stride(1) == 1 and block_tables.is_contiguous(), "strides"
    _prepare_inputs[(num_reqs + 1, num_groups + 1)](
        idx_mapping, query_start_loc, num_computed, token_ids, block_tables, out.rows, out.positions, out.input_ids,
        out.seq_lens, out.block_tables, out.slot_mapping, num_reqs, num_tokens, token_ids.stride(0),
        block_tables.stride(0), out.block_tables.stride(0), out.block_tables.stride(1), out.slot_mapping.stride(0),
        max_blocks, ahead, last_position, block_size, _BLOCK,
        num_warps=_WARPS,
    )  # fmt: skip


def prepare_sampling(
    idx_mapping: torch.Tensor,  # [R] int64
    query_start_loc: torch.Tensor,  # [R + 1] int32
    logits_start_loc: torch.Tensor,  # [R + 1] int32: request r owns rows logits_start_loc[r] .. [r + 1] of the logits
    seq_lens: torch.Tensor,  # [R] int32
    out: SamplingInputs,
) -> None:
    """Writes all of `out`. A window of n rows (none for a request that does not sample) is its request's last n tokens:
    the last known one, then the drafts."""
    num_reqs, num_logits = len(idx_mapping), len(out.rows)
    assert query_start_loc.shape == logits_start_loc.shape == (num_reqs + 1,), f"{logits_start_loc.shape} {num_reqs}"
    assert seq_lens.shape == (num_reqs,), f"{tuple(seq_lens.shape)} for {num_reqs} requests"
    assert out.positions.shape == out.indices.shape == (num_logits,), f"{out.positions.shape} {out.indices.shape}"
    _prepare_sampling[(num_reqs + 1,)](
        idx_mapping, query_start_loc, logits_start_loc, seq_lens, out.rows, out.positions, out.indices, num_reqs,
        num_logits, _WINDOW_BLOCK,
        num_warps=_WINDOW_WARPS,
    )  # fmt: skip


def prepare_states(
    idx_mapping: torch.Tensor,  # [R] int64, -1 for padding
    query_start_loc: torch.Tensor,  # [R + 1] int32
    logits_start_loc: torch.Tensor,  # [R + 1] int32
    num_computed: torch.Tensor,  # [max_num_reqs + 1, 1] int64
    num_in_states: torch.Tensor,  # [max_num_reqs + 1, 1] int64, written
    num_pending: torch.Tensor,  # [R] int32, written
    num_drafts: torch.Tensor,  # [R] int32, written
) -> None:
    """Computes what recurrent layers must know of drafts (`StateRows`), and counts the tokens that their states will
    contain. The windows are those of `prepare_sampling`."""
    num_reqs = len(idx_mapping)
    assert query_start_loc.shape == logits_start_loc.shape == (num_reqs + 1,), f"{logits_start_loc.shape} {num_reqs}"
    assert num_pending.shape == num_drafts.shape == (num_reqs,), f"{num_pending.shape} {num_drafts.shape} {num_reqs}"
    _prepare_states[(num_reqs,)](
        idx_mapping, query_start_loc, logits_start_loc, num_computed, num_in_states, num_pending, num_drafts,
        num_warps=1,
    )  # fmt: skip


def finish_step(
    sampled: torch.Tensor,  # [num_logits] int64, window after window
    logits_start_loc: torch.Tensor,  # [R + 1] int32: request r owns rows logits_start_loc[r] .. [r + 1] of `sampled`
    num_accepted: torch.Tensor,  # [R] int64: accepted drafts; read where a window has drafts
    idx_mapping: torch.Tensor,  # [R] int64, -1 for padding
    seq_lens: torch.Tensor,  # [R] int32: computed with this step's tokens
    num_computed: torch.Tensor,  # [max_num_reqs + 1, 1] int64, written
    token_ids: torch.Tensor,  # [max_num_reqs + 1, width] int32, written
) -> None:
    """Counts each request's step as computed except its rejected drafts, and stores the sampled tokens of the windows
    that `prepare_sampling` defines."""
    num_reqs = len(idx_mapping)
    assert logits_start_loc.shape == (num_reqs + 1,), f"{tuple(logits_start_loc.shape)} for {num_reqs} requests"
    assert num_accepted.shape == seq_lens.shape == (num_reqs,), f"{num_accepted.shape} {seq_lens.shape} {num_reqs}"
    assert num_computed.is_contiguous() and token_ids.stride(1) == 1, "strides"
    _finish_step[(num_reqs,)](
        sampled, logits_start_loc, num_accepted, idx_mapping, seq_lens, num_computed, token_ids, token_ids.stride(0),
        _WINDOW_BLOCK,
        num_warps=_WINDOW_WARPS,
    )  # fmt: skip


def store_drafts(
    proposed: torch.Tensor,  # [N, K] int64, -1 a gap
    rows: torch.Tensor,  # [N] int64: state rows, -1 for padding
    num_computed: torch.Tensor,  # [max_num_reqs + 1, 1] int64
    drafts: torch.Tensor,  # [max_num_reqs + 1, at least K] int64, written
    token_ids: torch.Tensor,  # [max_num_reqs + 1, width] int32, written
) -> None:
    """Like `penstock.kernels.prepare_inputs.store_drafts`."""
    count, num_drafts = proposed.shape
    assert rows.shape == (count,) and num_drafts <= drafts.shape[1], f"{rows.shape} {proposed.shape} {drafts.shape}"
    assert proposed.stride(1) == drafts.stride(1) == token_ids.stride(1) == 1, "strides"
    assert num_computed.is_contiguous() and rows.is_contiguous(), "strides"
    if not count:
        return
    _store_drafts[(count,)](
        proposed, rows, num_computed, drafts, token_ids, num_drafts, proposed.stride(0), drafts.stride(0),
        token_ids.stride(0), _WINDOW_BLOCK,
        num_warps=_WINDOW_WARPS,
    )  # fmt: skip


# Buffers are cut to a step's size and strides follow from configured limits: neither may cause a new compilation.
@triton.jit(
    do_not_specialize=[
        "num_reqs", "num_tokens", "token_stride", "table_group_stride", "out_group_stride", "out_row_stride",
        "slot_group_stride", "max_blocks", "ahead", "last_position",
    ],
    do_not_specialize_on_alignment=[
        "idx_mapping_ptr", "starts_ptr", "rows_ptr", "positions_ptr", "input_ids_ptr", "seq_lens_ptr", "out_tables_ptr",
        "slots_ptr",
    ],
)  # fmt: skip
def _prepare_inputs(
    idx_mapping_ptr, starts_ptr, num_computed_ptr, token_ids_ptr, tables_ptr, rows_ptr, positions_ptr, input_ids_ptr,
    seq_lens_ptr, out_tables_ptr, slots_ptr, num_reqs, num_tokens, token_stride, table_group_stride, out_group_stride,
    out_row_stride, slot_group_stride, max_blocks, ahead, last_position,
    block_size: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    group = tl.program_id(1).to(tl.int64) - 1  # -1 are the tokens themselves
    start = tl.load(starts_ptr + request)
    place = tl.arange(0, block)
    if request == num_reqs:
        slots = slots_ptr + group * slot_group_stride
        _pad_tokens(rows_ptr, positions_ptr, input_ids_ptr, slots, start, num_tokens, group < 0, block)
    else:
        row = tl.load(idx_mapping_ptr + request)
        length = tl.load(starts_ptr + request + 1) - start
        is_padding = row < 0
        first = tl.load(num_computed_ptr + row, mask=row >= 0, other=0) + ahead
        seq_len = tl.where(is_padding, 0, tl.minimum(first + length, last_position + 1))
        if group < 0:
            tl.store(seq_lens_ptr + request, seq_len.to(tl.int32))
            offset = tl.zeros_like(start)
            while offset < length:
                is_token = offset + place < length
                position = tl.minimum(first + offset + place, last_position)
                token = tl.load(token_ids_ptr + row * token_stride + position, mask=is_token, other=0)
                tl.store(rows_ptr + start + offset + place, tl.zeros_like(position) + row, mask=is_token)
                tl.store(positions_ptr + start + offset + place, position, mask=is_token)
                tl.store(input_ids_ptr + start + offset + place, token.to(tl.int64), mask=is_token)
                offset += block
        else:
            table = tables_ptr + group * table_group_stride + row * max_blocks
            offset = tl.zeros_like(start)
            while offset < length:
                is_token = offset + place < length
                position = tl.minimum(first + offset + place, last_position)
                block_id = tl.load(table + position // block_size, mask=is_token, other=0).to(tl.int64)
                slot = block_id * block_size + position % block_size
                tl.store(slots_ptr + group * slot_group_stride + start + offset + place, slot, mask=is_token)
                offset += block
            target = out_tables_ptr + group * out_group_stride + request.to(tl.int64) * out_row_stride
            num_blocks = tl.where(is_padding, max_blocks, (seq_len + block_size - 1) // block_size)
            offset = tl.zeros_like(start)
            while offset < num_blocks:
                is_entry = offset + place < num_blocks
                entry = tl.load(table + offset + place, mask=is_entry & (row >= 0), other=0)
                tl.store(target + offset + place, entry, mask=is_entry)
                offset += block


@triton.jit
def _pad_tokens(rows_ptr, positions_ptr, input_ids_ptr, slots_ptr, start, num_tokens, is_tokens, block: tl.constexpr):
    offset = start
    while offset < num_tokens:
        place = offset + tl.arange(0, block)
        is_token = place < num_tokens
        nothing = tl.zeros([block], tl.int64)
        if is_tokens:
            tl.store(rows_ptr + place, nothing - 1, mask=is_token)
            tl.store(positions_ptr + place, nothing, mask=is_token)
            tl.store(input_ids_ptr + place, nothing, mask=is_token)
        else:
            tl.store(slots_ptr + place, nothing - 1, mask=is_token)
        offset += block


@triton.jit(
    do_not_specialize=["num_reqs", "num_logits"],
    do_not_specialize_on_alignment=[
        "idx_mapping_ptr", "query_starts_ptr", "starts_ptr", "seq_lens_ptr", "rows_ptr", "positions_ptr", "indices_ptr",
    ],
)  # fmt: skip
def _prepare_sampling(
    idx_mapping_ptr, query_starts_ptr, starts_ptr, seq_lens_ptr, rows_ptr, positions_ptr, indices_ptr, num_reqs,
    num_logits,
    block: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    is_request = request < num_reqs
    start = tl.load(starts_ptr + request)
    end = tl.load(starts_ptr + request + 1, mask=is_request, other=0)
    end = tl.where(is_request, end, num_logits)
    row = tl.load(idx_mapping_ptr + request, mask=is_request, other=-1)
    # The last row of a window is the last token of its request, and samples the token after it.
    last_index = tl.load(query_starts_ptr + request + 1, mask=is_request, other=0).to(tl.int64) - 1
    last_position = tl.load(seq_lens_ptr + request, mask=is_request, other=0).to(tl.int64)
    offset = start
    while offset < end:
        place = offset + tl.arange(0, block)
        behind = (end - 1 - place).to(tl.int64)
        tl.store(rows_ptr + place, tl.zeros_like(behind) + row, mask=place < end)
        tl.store(positions_ptr + place, tl.where(is_request, last_position - behind, 0), mask=place < end)
        tl.store(indices_ptr + place, tl.where(is_request, last_index - behind, 0), mask=place < end)
        offset += block


@triton.jit(
    do_not_specialize_on_alignment=["idx_mapping_ptr", "query_starts_ptr", "starts_ptr", "pending_ptr", "drafts_ptr"]
)
def _prepare_states(
    idx_mapping_ptr, query_starts_ptr, starts_ptr, num_computed_ptr, num_in_states_ptr, pending_ptr, drafts_ptr,
):  # fmt: skip
    request = tl.program_id(0)
    row = tl.load(idx_mapping_ptr + request)
    is_row = row >= 0
    num_computed = tl.load(num_computed_ptr + row, mask=is_row, other=0)
    num_in_states = tl.load(num_in_states_ptr + row, mask=is_row, other=0)
    num_tokens = tl.load(query_starts_ptr + request + 1) - tl.load(query_starts_ptr + request)
    window = tl.load(starts_ptr + request + 1) - tl.load(starts_ptr + request)
    num_drafts = tl.where(is_row, tl.maximum(window - 1, 0), 0)
    tl.store(pending_ptr + request, (num_computed - num_in_states).to(tl.int32))
    tl.store(drafts_ptr + request, num_drafts.to(tl.int32))
    tl.store(num_in_states_ptr + row, num_computed + num_tokens - num_drafts, mask=is_row)


@triton.jit(
    do_not_specialize=["token_stride"],
    do_not_specialize_on_alignment=["sampled_ptr", "starts_ptr", "num_accepted_ptr", "idx_mapping_ptr", "seq_lens_ptr"],
)
def _finish_step(
    sampled_ptr, starts_ptr, num_accepted_ptr, idx_mapping_ptr, seq_lens_ptr, num_computed_ptr, token_ids_ptr,
    token_stride,
    block: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    row = tl.load(idx_mapping_ptr + request)
    if row >= 0:
        start = tl.load(starts_ptr + request)
        window = tl.load(starts_ptr + request + 1) - start
        seq_len = tl.load(seq_lens_ptr + request).to(tl.int64)
        num_drafts = tl.maximum(window - 1, 0)
        num_accepted = tl.load(num_accepted_ptr + request, mask=num_drafts > 0, other=0)
        tl.store(num_computed_ptr + row, seq_len - num_drafts + num_accepted)
        target = token_ids_ptr + row * token_stride + seq_len - window + 1
        offset = tl.zeros_like(start)
        while offset < window:
            place = offset + tl.arange(0, block)
            token = tl.load(sampled_ptr + start + place, mask=place < window, other=0)
            tl.store(target + place, token.to(tl.int32), mask=place < window)
            offset += block


@triton.jit(
    do_not_specialize=["num_drafts", "proposed_stride", "draft_stride", "token_stride"],
    do_not_specialize_on_alignment=["proposed_ptr", "rows_ptr"],
)
def _store_drafts(
    proposed_ptr, rows_ptr, num_computed_ptr, drafts_ptr, token_ids_ptr, num_drafts, proposed_stride, draft_stride,
    token_stride,
    block: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    row = tl.load(rows_ptr + request)
    if row >= 0:
        first = tl.load(num_computed_ptr + row) + 1
        offset = tl.zeros_like(num_drafts)
        while offset < num_drafts:
            place = offset + tl.arange(0, block)
            draft = tl.load(proposed_ptr + request * proposed_stride + place, mask=place < num_drafts, other=0)
            tl.store(drafts_ptr + row * draft_stride + place, draft, mask=place < num_drafts)
            token = tl.maximum(draft, 0).to(tl.int32)
            tl.store(token_ids_ptr + row * token_stride + first + place, token, mask=place < num_drafts)
            offset += block
