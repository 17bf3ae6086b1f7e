"""The state space of `penstock.kernels.mamba2`: a program has a few features of one head, and their state.

Roundings are the same; sums over keys have their own order, which is the same for every token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from penstock.kernels.mamba2 import Mamba2
from penstock.kernels.recurrent import StateRequests
from penstock.kernels.triton.recurrent import (
    REQUESTS,
    convolve,
    keep_drafts,
    requests_of,
    sigmoid,
    softplus,
    span_of,
    state_after,
    state_before,
)

_FEATURES = 8  # of a program: with 128 keys, a warp has 32 numbers of the state in each thread's registers


def mamba2(layer: Mamba2, given: torch.Tensor, states: torch.Tensor, requests: StateRequests) -> torch.Tensor:
    """[T, H P + C + H] -> [T, H P] float32. See `Mamba2`, which has checked the arguments."""
    sizes = layer.sizes
    mixed = convolve(given[:, sizes.inner :], layer.channels, layer.conv, layer.bias, states, requests)
    out = given.new_zeros((len(given), sizes.inner), dtype=torch.float32)
    _mamba2[(len(requests.seq_lens), sizes.heads, triton.cdiv(sizes.size, _FEATURES))](
        mixed, given, layer.decay, layer.dt_bias, layer.skip, out, states, *requests_of(requests), given.shape[1],
        sizes.heads, sizes.size, sizes.keys, sizes.head_size, sizes.channels, triton.next_power_of_2(sizes.keys),
        _FEATURES,
        num_warps=1,
    )  # fmt: skip
    keep_drafts(given, sizes.inner, sizes.channels + sizes.heads, requests)
    return out


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=REQUESTS)
def _mamba2(
    mixed_ptr, given_ptr, decay_ptr, bias_ptr, skip_ptr, out_ptr, states_ptr, table_ptr, starts_ptr, lengths_ptr,
    rows_ptr, pending_ptr, drafts_ptr, kept_ptr, table_stride,
    kept_width: tl.constexpr, block_size: tl.constexpr, most_drafts: tl.constexpr, given_stride: tl.constexpr,
    heads: tl.constexpr, size: tl.constexpr, keys: tl.constexpr, head_size: tl.constexpr, channels: tl.constexpr,
    keys_tile: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    head = tl.program_id(1)
    unit: tl.constexpr = size + 2 * keys
    key = tl.arange(0, keys_tile)
    feature = tl.program_id(2) * tile + tl.arange(0, tile)
    is_key, is_feature = key < keys, feature < size
    first, count, start, pending, drafts = span_of(
        request, starts_ptr, lengths_ptr, pending_ptr, drafts_ptr, most_drafts
    )
    if count > 0:
        table = table_ptr + request.to(tl.int64) * table_stride
        in_state = is_key[:, None] & is_feature[None, :]
        of_head = states_ptr + head.to(tl.int64) * head_size + key[:, None] * size + feature[None, :]
        before = state_before(table, start, block_size)
        state = tl.load(of_head + before * (heads * head_size), mask=in_state & (before >= 0), other=0.0)
        rate = tl.load(decay_ptr + head)
        bias = tl.load(bias_ptr + head)
        skip = tl.load(skip_ptr + head)
        mixed = mixed_ptr + (first + (request + 1) * most_drafts - pending).to(tl.int64) * (heads * unit) + head * unit
        token = tl.zeros_like(count)
        while token < count:
            row = mixed + token.to(tl.int64) * (heads * unit)
            x = tl.load(row + feature, mask=is_feature, other=0.0).to(tl.float32)
            stored = tl.load(row + size + key, mask=is_key, other=0.0).to(tl.float32)
            query = tl.load(row + size + keys + key, mask=is_key, other=0.0).to(tl.float32)
            own = given_ptr + (first + token - pending).to(tl.int64) * given_stride
            is_own = token >= pending
            dt = tl.load(own + heads * size + channels + head, mask=is_own, other=0.0)
            if most_drafts > 0:
                kept = kept_ptr + (tl.load(rows_ptr + request) * most_drafts + token) * kept_width + channels + head
                dt += tl.load(kept, mask=token < pending, other=0.0)
            step = softplus(dt.to(tl.float32) + bias)
            state = state * tl.exp(-rate * step) + stored[:, None] * (x * step)[None, :]
            read = tl.sum(state * query[:, None], 0) + x * skip
            gate = tl.load(own + head * size + feature, mask=is_feature & is_own, other=0.0).to(tl.float32)
            found = read.to(given_ptr.dtype.element_ty).to(tl.float32) * (gate * sigmoid(gate))
            target = out_ptr + (first + token - pending).to(tl.int64) * (heads * size) + head * size + feature
            tl.store(target, found, mask=is_feature & is_own)
            after = state_after(table, start, token, count - drafts - 1, block_size)
            if after >= 0:
                tl.store(of_head + after * (heads * head_size), state, mask=in_state)
            token += 1
