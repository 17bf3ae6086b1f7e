"""What recurrent layers have in common: their convolution, and the inputs that are kept of drafts.

The tokens of a request's span are those that are pending, then the step's; drafts are the last of these. A program
takes all tokens of a request, one after another: a token's bits depend on its sequence alone, however that is divided
into steps. The states are where `penstock.kernels.recurrent` says, and padding stores nothing.

The convolved inputs have a row for every token that a span can have: with K drafts at most, the step's token t of
request r is in row t + (r + 1) K, and the pending ones before.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from penstock.kernels.recurrent import StateRequests

REQUESTS = ["table_ptr", "starts_ptr", "lengths_ptr", "rows_ptr", "pending_ptr", "drafts_ptr"]
"""Kernel arguments from `requests_of` that may have any alignment; kernels are not specialised on it."""
_CHANNELS, _TOKENS = 128, 8  # of a tile of the convolution
_WARPS = 4
_KEPT = 1024  # inputs of a draft at a time


def requests_of(requests: StateRequests) -> tuple[Any, ...]:
    """Returns a kernel's arguments from `table_ptr` to `most_drafts`."""
    given, drafts = requests.state_rows, requests.draft_inputs
    rows = (given.rows, given.num_pending, given.num_drafts)
    nothing = requests.seq_lens  # is not read
    return (
        requests.block_table,
        requests.query_start_loc,
        requests.seq_lens,
        *(nothing if drafts is None or each is None else each for each in rows),
        nothing if drafts is None else drafts,
        requests.block_table.stride(0),
        0 if drafts is None else drafts.shape[2],
        given.block_size,
        0 if drafts is None else drafts.shape[1],
    )


def convolve(
    inputs: torch.Tensor,  # [T, channels and others], which a row has from its first number on
    channels: torch.Tensor,  # [heads, unit] int32: which channels are a head's
    weight: torch.Tensor,  # [taps, channels] float32
    bias: torch.Tensor | None,  # [channels] float32
    states: torch.Tensor,  # [blocks, heads, numbers of a head's state] float32, the last inputs at their ends
    requests: StateRequests,
) -> torch.Tensor:
    """Returns [T + R K, heads, unit]: silu of the convolution. The last inputs of the states are stored."""
    heads, unit = channels.shape
    num_drafts = 0 if requests.draft_inputs is None else requests.draft_inputs.shape[1]
    num_rows = len(inputs) + len(requests.seq_lens) * num_drafts
    out = inputs.new_empty((num_rows, heads, unit))
    _launch(inputs, channels, weight, bias, states, requests, out, is_gated=False)
    return out


def convolve_gated(
    bcx: torch.Tensor,  # [T, 3 channels]
    channels: torch.Tensor,
    weight: torch.Tensor,
    states: torch.Tensor,
    requests: StateRequests,
) -> torch.Tensor:
    """Returns [T, channels]: c times the convolution of b times x. The last products of the states are stored."""
    out = bcx.new_zeros((len(bcx), channels.numel()))
    _launch(bcx, channels, weight, None, states, requests, out, is_gated=True)
    return out


def _launch(
    inputs: torch.Tensor,
    channels: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    requests: StateRequests,
    out: torch.Tensor,
    is_gated: bool,
) -> None:
    (heads, unit), taps = channels.shape, len(weight)
    tile = min(_CHANNELS, triton.next_power_of_2(unit))
    _convolve[(len(requests.seq_lens), heads, triton.cdiv(unit, tile))](
        inputs, channels, weight, weight if bias is None else bias, out, states, *requests_of(requests),
        inputs.stride(0), heads, unit, states.shape[2], weight.shape[1], taps, bias is not None, is_gated, tile,
        _TOKENS,
        num_warps=_WARPS,
    )  # fmt: skip


def keep_drafts(source: torch.Tensor, first: int, width: int, requests: StateRequests, to: int = 0) -> None:
    """Keeps the columns `first` .. `first + width` of the drafts' rows of `source` [T, ...], from column `to` on."""
    _keep(source[:, first : first + width], width, 0, requests, to)


def keep_gated_drafts(bcx: torch.Tensor, requests: StateRequests) -> None:
    """Keeps the products b x of the drafts' rows."""
    width = bcx.shape[1] // 3
    _keep(bcx, width, 2 * width, requests, 0)


def _keep(source: torch.Tensor, width: int, factor: int, requests: StateRequests, to: int) -> None:
    """`factor`: how far behind a number the one is that it is multiplied by; 0: none."""
    drafts, rows = requests.draft_inputs, requests.state_rows
    if drafts is None:
        return
    grid = (len(requests.seq_lens), drafts.shape[1], triton.cdiv(width, _KEPT))
    _keep_drafts[grid](
        source, drafts[..., to:], requests.query_start_loc, rows.rows, rows.num_drafts, source.stride(0), width,
        drafts.shape[2], drafts.shape[1], factor, _KEPT,
        num_warps=_WARPS,
    )  # fmt: skip


@triton.jit
def span_of(request, starts_ptr, lengths_ptr, pending_ptr, drafts_ptr, most_drafts: tl.constexpr):
    """Returns a request's first row, its tokens with the pending ones, the position of the first, and how many are
    pending and drafts."""
    first = tl.load(starts_ptr + request)
    count = tl.load(starts_ptr + request + 1) - first
    pending = tl.zeros_like(first)
    drafts = tl.zeros_like(first)
    if most_drafts > 0:
        pending = tl.load(pending_ptr + request)
        drafts = tl.load(drafts_ptr + request)
    start = tl.load(lengths_ptr + request) - count - pending
    return first, tl.where(count > 0, count + pending, 0), start, pending, drafts


@triton.jit
def state_before(table, start, block_size: tl.constexpr):
    """Returns the number of the vector with the state before position `start`; negative for that of no tokens."""
    return tl.load(table + (start - 1) // block_size, mask=start > 0, other=0).to(tl.int64) - 1


@triton.jit
def state_after(table, start, token, last, block_size: tl.constexpr):
    """Returns the number of the vector for the state after the span's `token`; negative if it is not kept. `last` is
    the last token that is no draft."""
    position = start + token
    is_kept = (token == last) | ((token < last) & ((position + 1) % block_size == 0))
    return tl.load(table + position // block_size, mask=is_kept, other=0).to(tl.int64) - 1


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):
    """log(1 + exp(x)), exact also where exp(x) is less than the distance of 1 to the next number."""
    power = tl.exp(-tl.abs(x))
    sum = 1.0 + power
    rest = sum - 1.0
    log = tl.where(rest == 0.0, power, tl.log(sum) * (power / tl.where(rest == 0.0, 1.0, rest)))
    return tl.maximum(x, 0.0) + log


@triton.jit
def _raw(
    index, channel, is_channel, inputs, input_stride, kept, kept_width, history, unit, unit_place, pending, count,
    channels: tl.constexpr, taps: tl.constexpr, is_gated: tl.constexpr, most_drafts: tl.constexpr,
    has_history,
):  # fmt: skip
    """The inputs of the span's tokens `index`, float32; those before the first are in the state."""
    is_before = is_channel & (index < 0) & has_history
    found = tl.load(history + (index + taps - 1) * unit + unit_place, mask=is_before, other=0.0)
    own = inputs + (index - pending).to(tl.int64) * input_stride + channel
    is_own = is_channel & (index >= pending) & (index < count)
    given = tl.load(own, mask=is_own, other=0.0)
    if is_gated:
        factor = tl.load(own + 2 * channels, mask=is_own, other=0.0)
        given = (given.to(tl.float32) * factor.to(tl.float32)).to(given.dtype)
    found += given.to(tl.float32)
    if most_drafts > 0:
        is_pending = is_channel & (index >= 0) & (index < pending)
        found += tl.load(kept + index * kept_width + channel, mask=is_pending, other=0.0).to(tl.float32)
    return found


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=REQUESTS)
def _convolve(
    inputs_ptr, channels_ptr, weight_ptr, bias_ptr, out_ptr, states_ptr, table_ptr, starts_ptr, lengths_ptr, rows_ptr,
    pending_ptr, drafts_ptr, kept_ptr, table_stride,
    kept_width: tl.constexpr, block_size: tl.constexpr, most_drafts: tl.constexpr, input_stride: tl.constexpr,
    heads: tl.constexpr, unit: tl.constexpr, head_size: tl.constexpr, channels: tl.constexpr, taps: tl.constexpr,
    has_bias: tl.constexpr, is_gated: tl.constexpr, tile: tl.constexpr, tokens: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    head = tl.program_id(1)
    place = tl.program_id(2) * tile + tl.arange(0, tile)
    is_channel = place < unit
    channel = tl.load(channels_ptr + head * unit + place, mask=is_channel, other=0)
    first, count, start, pending, drafts = span_of(
        request, starts_ptr, lengths_ptr, pending_ptr, drafts_ptr, most_drafts
    )
    table = table_ptr + request.to(tl.int64) * table_stride
    inputs = inputs_ptr + first.to(tl.int64) * input_stride
    kept = kept_ptr
    if most_drafts > 0:
        kept += tl.load(rows_ptr + request) * (most_drafts * kept_width)
    if count > 0:
        before = state_before(table, start, block_size)
        of_head = states_ptr + head.to(tl.int64) * head_size + (head_size - (taps - 1) * unit)
        history = of_head + before * (heads * head_size)
        offset = tl.zeros_like(count)
        while offset < count:
            token = offset + tl.arange(0, tokens)[:, None]
            total = tl.zeros([tokens, tile], tl.float32)
            for tap in tl.static_range(taps):
                raw = _raw(
                    token + (tap - (taps - 1)), channel[None, :], is_channel[None, :], inputs, input_stride, kept,
                    kept_width, history, unit, place[None, :], pending, count, channels, taps, is_gated, most_drafts,
                    before >= 0,
                )  # fmt: skip
                factor = tl.load(weight_ptr + tap * channels + channel, mask=is_channel, other=0.0)
                total += raw * factor[None, :]
            if has_bias:
                total += tl.load(bias_ptr + channel, mask=is_channel, other=0.0)[None, :]
            mixed = total.to(out_ptr.dtype.element_ty).to(tl.float32)
            is_stored = (token < count) & is_channel[None, :]
            row = (first + token - pending).to(tl.int64)
            if is_gated:
                is_stored = is_stored & (token >= pending)
                gate = inputs_ptr + row * input_stride + channels + channel[None, :]
                mixed = mixed * tl.load(gate, mask=is_stored, other=0.0).to(tl.float32)
            else:
                mixed = mixed * sigmoid(mixed)
                row += (request + 1) * most_drafts
            target = out_ptr + row * (heads * unit) + head * unit + place[None, :]
            tl.store(target, mixed.to(out_ptr.dtype.element_ty), mask=is_stored)
            offset += tokens
        # The state before may be in the vector of the first one after: that is written last, its oldest inputs first.
        token = count - drafts - 1
        while token >= 0:
            vector = tl.load(table + (start + token) // block_size).to(tl.int64) - 1
            target = of_head + vector * (heads * head_size)
            for tap in tl.static_range(taps - 1):
                raw = _raw(
                    token + (tap + 2 - taps), channel, is_channel, inputs, input_stride, kept, kept_width, history,
                    unit, place, pending, count, channels, taps, is_gated, most_drafts, before >= 0,
                )  # fmt: skip
                tl.debug_barrier()
                tl.store(target + tap * unit + place, raw, mask=is_channel & (vector >= 0))
            token = (start + token) // block_size * block_size - 1 - start


@triton.jit(
    do_not_specialize=["width"],
    do_not_specialize_on_alignment=["source_ptr", "kept_ptr", "starts_ptr", "rows_ptr", "drafts_ptr"],
)
def _keep_drafts(
    source_ptr, kept_ptr, starts_ptr, rows_ptr, drafts_ptr,
    source_stride: tl.constexpr, width, kept_width: tl.constexpr, most_drafts: tl.constexpr, factor: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    draft = tl.program_id(1)
    drafts = tl.load(drafts_ptr + request)
    if draft < drafts:
        place = tl.program_id(2) * block + tl.arange(0, block)
        token = tl.load(starts_ptr + request + 1) - drafts + draft
        source = source_ptr + token.to(tl.int64) * source_stride + place
        value = tl.load(source, mask=place < width, other=0.0)
        if factor > 0:
            other = tl.load(source + factor, mask=place < width, other=0.0)
            value = (value.to(tl.float32) * other.to(tl.float32)).to(value.dtype)
        row = tl.load(rows_ptr + request) * most_drafts + draft
        tl.store(kept_ptr + row * kept_width + place, value, mask=place < width)
