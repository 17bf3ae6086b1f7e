"""Rotary position embedding of the queries and keys of a step, and the store of keys and values into the paged cache.

A head's first `rotary_dim` dimensions are rotated in half-split pairs (x[i], x[i + rotary_dim / 2]) by the angle of the
token's position; the rest pass unchanged. Where norm weights are given, each head is RMS-normalised before (Qwen3), as
`rms_norm` does it, a value too (Gemma 4). The rotation is float32 and rounded to the dtype once.

The cache is [num_blocks, 2 (K, V), num_kv_heads, block_size, head_dim], or of latents one plane of keys that contain
their values: one block of one layer is contiguous, as it is the unit that transfers move. Slot = block_id * block_size
+ offset in the block; slot -1 belongs to padding. A cache of int8 has rows of head_dim + 4 elements (`kv_rows`): keys
and values are quantized after they have been rounded to the dtype. Some caches of bfloat16 are in pairs (`kv_rows`).
"""

from __future__ import annotations

import torch

from penstock.kernels.dispatch import triton_module, uses_triton
from penstock.kernels.kv_rows import head_size_of, is_in_pairs, quantize_rows
from penstock.kernels.native import DTYPE_CODES, library, num_threads
from penstock.kernels.rms_norm import rms_norm_reference

MAX_HEAD_DIM = 512


def rope_and_store_kv(
    qkv: torch.Tensor,  # [T, (Hq + planes * Hkv) * D]: the q part is rotated in place, the k and v parts are only read
    num_heads: int,
    num_kv_heads: int,
    cos_sin: torch.Tensor,  # [max_pos, rotary_dim] float32: rotary_dim / 2 cosines, then as many sines
    positions: torch.Tensor,  # [T] int64
    kv_cache: torch.Tensor,  # [num_blocks, planes, Hkv, block_size, D], or D + 4 of int8
    slot_mapping: torch.Tensor,  # [T] int64, -1 stores nothing
    q_norm: torch.Tensor | None = None,  # [D], of the dtype of `qkv` or float32
    k_norm: torch.Tensor | None = None,  # [D], of the dtype of `q_norm`
    eps: float = 1e-6,
    v_norm: torch.Tensor | None = None,  # [D], of the dtype of `q_norm`; on a CPU only
) -> None:
    """Rotates q in `qkv`, and writes rotated k, and v, at their slots of `kv_cache`; nothing if Hkv is 0."""
    tokens, width = qkv.shape
    has_int8_cache = kv_cache.dtype == torch.int8 and not uses_triton(qkv)
    assert qkv.dtype in DTYPE_CODES and (kv_cache.dtype == qkv.dtype or has_int8_cache), (
        f"qkv {qkv.dtype}, cache {kv_cache.dtype}"
    )
    assert kv_cache.dim() == 5 and kv_cache.shape[1] in (1, 2) and kv_cache.shape[2] == num_kv_heads, (
        f"cache is {tuple(kv_cache.shape)}"
    )
    planes, head_dim = kv_cache.shape[1], head_size_of(kv_cache)
    assert width == (num_heads + planes * num_kv_heads) * head_dim, (
        f"qkv is {width} wide for {num_heads} + {planes} * {num_kv_heads} heads of {head_dim}"
    )
    assert cos_sin.dtype == torch.float32 and cos_sin.dim() == 2, f"cos_sin is {cos_sin.dtype} {tuple(cos_sin.shape)}"
    assert (planes == 1 and not has_int8_cache) or head_dim <= MAX_HEAD_DIM, f"heads of {head_dim} dimensions"
    assert cos_sin.shape[1] % 2 == 0 and cos_sin.shape[1] <= head_dim, (
        f"{cos_sin.shape[1]} rotated of {head_dim} dimensions"
    )
    assert positions.shape == slot_mapping.shape == (tokens,), (
        f"{tuple(positions.shape)} positions and {tuple(slot_mapping.shape)} slots for {tokens} tokens"
    )
    assert positions.dtype == slot_mapping.dtype == torch.int64, f"{positions.dtype} and {slot_mapping.dtype}"
    for tensor in (qkv, cos_sin, positions, kv_cache, slot_mapping):
        assert tensor.is_contiguous(), f"{tuple(tensor.shape)} has strides {tensor.stride()}"
    norms = [norm for norm in (q_norm, k_norm, v_norm) if norm is not None]
    has_float_norms = any(norm.dtype == torch.float32 for norm in norms)
    norm_dtype = torch.float32 if has_float_norms else qkv.dtype
    for norm in norms:
        assert norm.shape == (head_dim,) and norm.dtype == norm_dtype and norm.is_contiguous(), (
            f"norm weight is {tuple(norm.shape)} {norm.dtype} for {head_dim} {qkv.dtype}"
        )
    arguments = (qkv, num_heads, num_kv_heads, cos_sin, positions, kv_cache, slot_mapping, q_norm, k_norm, eps)
    if uses_triton(qkv):
        assert v_norm is None and num_kv_heads, "norms of values, and queries alone, are computed on a CPU only"
        triton_module("rope_and_store_kv").rope_and_store_kv(*arguments)
        return
    native = library()
    if native is None:
        rope_and_store_kv_reference(*arguments, v_norm)
        return
    native.function("rope_and_store_kv", "ppppppppnnnnnnnfiiiii")(
        qkv.data_ptr(), kv_cache.data_ptr(), cos_sin.data_ptr(), positions.data_ptr(), slot_mapping.data_ptr(),
        None if q_norm is None else q_norm.data_ptr(), None if k_norm is None else k_norm.data_ptr(),
        None if v_norm is None else v_norm.data_ptr(), qkv.shape[0], num_heads, num_kv_heads, head_dim,
        cos_sin.shape[1], kv_cache.shape[3], num_threads(), eps, DTYPE_CODES[qkv.dtype], kv_cache.shape[1] == 1,
        has_float_norms, has_int8_cache, is_in_pairs(kv_cache, native),
    )  # fmt: skip


def rope_and_store_kv_reference(
    qkv: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    v_norm: torch.Tensor | None = None,
) -> None:
    block_size, head_dim = kv_cache.shape[3], head_size_of(kv_cache)
    as_stored = quantize_rows if kv_cache.dtype == torch.int8 else torch.Tensor.contiguous
    q, k, *v = qkv.unflatten(1, (-1, head_dim)).split([num_heads] + [num_kv_heads] * kv_cache.shape[1], dim=1)
    cos_sin = cos_sin[positions]
    stored = slot_mapping >= 0
    blocks, offsets = slot_mapping[stored] // block_size, slot_mapping[stored] % block_size
    kv_cache[blocks, 0, :, offsets] = as_stored(_rotated(k, cos_sin, k_norm, eps)[stored])
    for values in v:
        values = values if v_norm is None else rms_norm_reference(values, v_norm, eps)
        kv_cache[blocks, 1, :, offsets] = as_stored(values[stored])
    q.copy_(_rotated(q, cos_sin, q_norm, eps))


def _rotated(
    x: torch.Tensor,  # [T, heads, D]
    cos_sin: torch.Tensor,  # [T, rotary_dim]
    norm: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    if norm is not None:
        x = rms_norm_reference(x, norm, eps)
    cos, sin = cos_sin[:, None].chunk(2, dim=-1)
    half = cos.shape[-1]
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    first, second = first.float(), second.float()
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((rotated.to(x.dtype), rest), dim=-1)
