"""The gated delta rule of `penstock.kernels.gated_delta`: a program has a few values of one head, and their state.

Roundings are the same; sums over keys have their own order, which is the same for every token.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from penstock.kernels.gated_delta import GatedDelta
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

_VALUES = 8  # of a program: with 128 keys, a warp has 32 numbers of the state in each thread's registers
_EPS = 1e-6


def gated_delta(
    layer: GatedDelta,
    qkv: torch.Tensor,  # [T, C]
    gates: torch.Tensor,  # [T, V E + 2 V]
    states: torch.Tensor,
    requests: StateRequests,
) -> torch.Tensor:
    """Returns [T, V E]. See `GatedDelta`, which has checked the arguments."""
    sizes = layer.sizes
    inner, rates = sizes.value_heads * sizes.value_size, 2 * sizes.value_heads
    mixed = convolve(qkv, layer.channels, layer.conv, None, states, requests)
    out = qkv.new_zeros((len(qkv), inner))
    grid = (len(requests.seq_lens), sizes.value_heads, triton.cdiv(sizes.value_size, _VALUES))
    _gated_delta[grid](
        mixed, gates, layer.decay, layer.dt_bias, out, states, *requests_of(requests), gates.shape[1], sizes.key_heads,
        sizes.group, sizes.key_size, sizes.value_size, sizes.head_size, sizes.channels, 1.0 / math.sqrt(sizes.key_size),
        _EPS, triton.next_power_of_2(sizes.key_size), _VALUES,
        num_warps=1,
    )  # fmt: skip
    keep_drafts(qkv, 0, sizes.channels, requests)
    keep_drafts(gates, inner, rates, requests, sizes.channels)
    tile = triton.next_power_of_2(sizes.value_size)
    _gate[(len(qkv), sizes.value_heads)](
        out, gates, layer.norm, layer.eps, gates.shape[1], sizes.value_heads, sizes.value_size, tile, num_warps=1
    )
    return out


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=REQUESTS)
def _gated_delta(
    mixed_ptr, gates_ptr, decay_ptr, bias_ptr, out_ptr, states_ptr, table_ptr, starts_ptr, lengths_ptr, rows_ptr,
    pending_ptr, drafts_ptr, kept_ptr, table_stride,
    kept_width: tl.constexpr, block_size: tl.constexpr, most_drafts: tl.constexpr, gate_stride: tl.constexpr,
    key_heads: tl.constexpr, group: tl.constexpr, keys: tl.constexpr, values: tl.constexpr, head_size: tl.constexpr,
    channels: tl.constexpr, scale: tl.constexpr, eps: tl.constexpr, keys_tile: tl.constexpr, values_tile: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    head = tl.program_id(1)
    heads: tl.constexpr = key_heads * group
    unit: tl.constexpr = 2 * keys + group * values
    key_head, member = head // group, head % group
    key = tl.arange(0, keys_tile)
    value = tl.program_id(2) * values_tile + tl.arange(0, values_tile)
    is_key, is_value = key < keys, value < values
    first, count, start, pending, drafts = span_of(
        request, starts_ptr, lengths_ptr, pending_ptr, drafts_ptr, most_drafts
    )
    if count > 0:
        table = table_ptr + request.to(tl.int64) * table_stride
        place = member * (keys * values) + key[:, None] * values + value[None, :]
        in_state = is_key[:, None] & is_value[None, :]
        of_head = states_ptr + key_head.to(tl.int64) * head_size + place
        before = state_before(table, start, block_size)
        state = tl.load(of_head + before * (key_heads * head_size), mask=in_state & (before >= 0), other=0.0)
        rate = tl.load(decay_ptr + head)
        bias = tl.load(bias_ptr + head)
        mixed = mixed_ptr + (first + (request + 1) * most_drafts - pending).to(tl.int64) * (key_heads * unit)
        mixed += key_head * unit
        token = tl.zeros_like(count)
        while token < count:
            row = mixed + token.to(tl.int64) * (key_heads * unit)
            query = _normalized(tl.load(row + key, mask=is_key, other=0.0), eps) * scale
            stored = _normalized(tl.load(row + keys + key, mask=is_key, other=0.0), eps)
            given = tl.load(row + 2 * keys + member * values + value, mask=is_value, other=0.0).to(tl.float32)
            own = (first + token - pending).to(tl.int64)
            rates = gates_ptr + own * gate_stride + heads * values + head
            is_own = token >= pending
            b = tl.load(rates, mask=is_own, other=0.0)
            dt = tl.load(rates + heads, mask=is_own, other=0.0)
            if most_drafts > 0:
                kept = kept_ptr + (tl.load(rows_ptr + request) * most_drafts + token) * kept_width + channels + head
                b += tl.load(kept, mask=token < pending, other=0.0)
                dt += tl.load(kept + heads, mask=token < pending, other=0.0)
            share = sigmoid(b.to(tl.float32)).to(b.dtype).to(tl.float32)
            state = state * tl.exp(-rate * softplus(dt.to(tl.float32) + bias))
            delta = (given - tl.sum(state * stored[:, None], 0)) * share
            state += stored[:, None] * delta[None, :]
            read = tl.sum(state * query[:, None], 0)
            target = out_ptr + own * (heads * values) + head * values + value
            tl.store(target, read.to(out_ptr.dtype.element_ty), mask=is_value & is_own)
            after = state_after(table, start, token, count - drafts - 1, block_size)
            if after >= 0:
                tl.store(of_head + after * (key_heads * head_size), state, mask=in_state)
            token += 1


@triton.jit
def _normalized(x, eps: tl.constexpr):
    x = x.to(tl.float32)
    return x / tl.sqrt_rn(tl.sum(x * x) + eps)


@triton.jit
def _gate(
    out_ptr, gates_ptr, norm_ptr, eps, gate_stride: tl.constexpr, heads: tl.constexpr, values: tl.constexpr,
    tile: tl.constexpr,
):  # fmt: skip
    """Overwrites a head's result with its norm, times silu(z)."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    value = tl.arange(0, tile)
    is_value = value < values
    place = out_ptr + (token * heads + head) * values + value
    x = tl.load(place, mask=is_value, other=0.0)
    z = tl.load(gates_ptr + token * gate_stride + head * values + value, mask=is_value, other=0.0).to(tl.float32)
    wide = x.to(tl.float32)
    normed = (wide / tl.sqrt_rn(tl.sum(wide * wide) / values + eps)).to(x.dtype).to(tl.float32)
    weight = tl.load(norm_ptr + value, mask=is_value, other=0.0)
    normed = (normed * weight).to(x.dtype).to(tl.float32)
    tl.store(place, (normed * (z * sigmoid(z))).to(x.dtype), mask=is_value)
