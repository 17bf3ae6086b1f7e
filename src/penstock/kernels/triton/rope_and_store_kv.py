"""Rotary position embedding of a step's queries and keys, and the store of keys and values into the paged cache.

The computation is described in `penstock.kernels.rope_and_store_kv`: norm of each head (optional), rotation of its
first `rotary_dim` dimensions in half-split pairs, q back in place, k and v to their slots of [num_blocks, planes, Hkv,
block_size, D]; with one plane there is no v.

A program takes one token and a few heads, q, k and v alike. A head is held as three tiles, the first and the second
half of the rotated part and the rest, so that each element is written by the thread that has read it, and D need not be
a power of two. Tiles are the same for every T, so a token's bits depend on that token alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from penstock.kernels.triton.rms_norm import weighted

_ELEMENTS = 2048  # of heads per program: at D = 128 in 16 bits, 4 warps read 16 bytes per thread and half
_WARPS = 4


def rope_and_store_kv(
    qkv: torch.Tensor,  # [T, (Hq + planes * Hkv) * D]: the q part is rotated in place, the k and v parts are only read
    num_heads: int,
    num_kv_heads: int,
    cos_sin: torch.Tensor,  # [max_pos, rotary_dim] float32: rotary_dim / 2 cosines, then as many sines
    positions: torch.Tensor,  # [T] int64
    kv_cache: torch.Tensor,  # [num_blocks, planes, Hkv, block_size, D]
    slot_mapping: torch.Tensor,  # [T] int64, -1 stores nothing
    q_norm: torch.Tensor | None = None,  # [D], of the dtype of `qkv` or float32
    k_norm: torch.Tensor | None = None,  # [D]
    eps: float = 1e-6,
) -> None:
    """Rotates q in `qkv`, and writes rotated k, and v, at their slots of `kv_cache`.

    The wrapper in `penstock.kernels` has checked the arguments.
    """
    block_size, head_dim = kv_cache.shape[3:]
    planes = kv_cache.shape[1]
    all_heads = num_heads + planes * num_kv_heads
    tokens = qkv.shape[0]
    half = cos_sin.shape[1] // 2
    rest = head_dim - 2 * half
    heads_tile = max(_ELEMENTS // triton.next_power_of_2(head_dim), 1)
    _rope_and_store_kv[(tokens, triton.cdiv(all_heads, heads_tile))](
        qkv, cos_sin, positions, kv_cache, slot_mapping, qkv if q_norm is None else q_norm,
        qkv if k_norm is None else k_norm, eps, num_heads, num_kv_heads, planes, head_dim, block_size, half,
        max(1, triton.next_power_of_2(half)), triton.next_power_of_2(rest) if rest else 0, q_norm is not None,
        k_norm is not None, heads_tile,
        num_warps=_WARPS,
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"])
def _rope_and_store_kv(
    qkv_ptr,
    cos_sin_ptr,
    positions_ptr,
    cache_ptr,
    slots_ptr,
    q_norm_ptr,
    k_norm_ptr,
    eps,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    planes: tl.constexpr,
    head_dim: tl.constexpr,
    block_size: tl.constexpr,
    half: tl.constexpr,
    half_tile: tl.constexpr,
    rest_tile: tl.constexpr,  # 0 if all dimensions are rotated
    has_q_norm: tl.constexpr,
    has_k_norm: tl.constexpr,
    heads_tile: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + token)
    slot = tl.load(slots_ptr + token)
    head = tl.program_id(1) * heads_tile + tl.arange(0, heads_tile)[:, None]
    is_q = head < num_heads
    is_rotated = head < num_heads + num_kv_heads
    is_normed = (is_q & has_q_norm) | (is_rotated & ~is_q & has_k_norm)
    is_head = head < num_heads + planes * num_kv_heads

    place = tl.arange(0, half_tile)[None, :]
    in_half = is_head & (place < half)
    source = qkv_ptr + (token * (num_heads + planes * num_kv_heads) + head) * head_dim
    first = tl.load(source + place, mask=in_half, other=0.0)
    second = tl.load(source + half + place, mask=in_half, other=0.0)
    cos = tl.load(cos_sin_ptr + position * (2 * half) + place, mask=place < half, other=0.0)
    sin = tl.load(cos_sin_ptr + position * (2 * half) + half + place, mask=place < half, other=0.0)
    if rest_tile > 0:
        rest_place = 2 * half + tl.arange(0, rest_tile)[None, :]
        in_rest = is_head & (rest_place < head_dim)
        rest = tl.load(source + rest_place, mask=in_rest, other=0.0)

    if has_q_norm or has_k_norm:
        squares = tl.sum(_square(first), 1, keep_dims=True) + tl.sum(_square(second), 1, keep_dims=True)
        if rest_tile > 0:
            squares += tl.sum(_square(rest), 1, keep_dims=True)
        scale = 1.0 / tl.sqrt_rn(squares / head_dim + eps)
        first = _normed(first, scale, q_norm_ptr, k_norm_ptr, place, place < half, is_q, is_normed)
        second = _normed(second, scale, q_norm_ptr, k_norm_ptr, half + place, place < half, is_q, is_normed)
        if rest_tile > 0:
            in_head = rest_place < head_dim
            rest = _normed(rest, scale, q_norm_ptr, k_norm_ptr, rest_place, in_head, is_q, is_normed)

    turned = first.to(tl.float32) * cos - second.to(tl.float32) * sin
    second = _where(is_rotated, second.to(tl.float32) * cos + first.to(tl.float32) * sin, second)
    first = _where(is_rotated, turned, first)

    is_v = head >= num_heads + num_kv_heads
    kv_head = head - num_heads - tl.where(is_v, num_kv_heads, 0)
    plane = (slot // block_size) * planes + is_v.to(tl.int64)
    target = cache_ptr + ((plane * num_kv_heads + kv_head) * block_size + slot % block_size) * head_dim
    is_stored = is_head & ~is_q & (slot >= 0)
    # q is rotated in place: all threads must have read before any thread writes.
    tl.debug_barrier()
    _store(first, source, target, place, in_half & is_q, in_half & is_stored)
    _store(second, source, target, half + place, in_half & is_q, in_half & is_stored)
    if rest_tile > 0:
        _store(rest, source, target, rest_place, in_rest & is_q, in_rest & is_stored)


@triton.jit
def _where(condition, wide, narrow):
    return tl.where(condition, wide.to(narrow.dtype), narrow)


@triton.jit
def _store(tile, source, target, place, to_source, to_target):
    tl.store(source + place, tile, mask=to_source)
    tl.store(target + place, tile, mask=to_target)


@triton.jit
def _square(x):
    return x.to(tl.float32) * x.to(tl.float32)


@triton.jit
def _normed(x, scale, q_norm_ptr, k_norm_ptr, place, is_inside, is_q, is_normed):
    """Returns x unchanged if a head has no norm."""
    q_weight = tl.load(q_norm_ptr + place, mask=is_inside, other=0.0)
    k_weight = tl.load(k_norm_ptr + place, mask=is_inside, other=0.0)
    return tl.where(is_normed, weighted(x.to(tl.float32) * scale, tl.where(is_q, q_weight, k_weight), x.dtype), x)
