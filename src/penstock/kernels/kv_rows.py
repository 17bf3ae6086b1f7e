"""How the KV cache stores the vector of a token and a head: its numbers, or int8 integers and then their scale; or in
pairs.

A scale is a 127th of the vector's largest finite magnitude, a float32 in the last four bytes of the row. It depends on
the vector alone, so that a row has the same bytes whichever tokens are stored with it. Vectors without a magnitude of
2^-100 are stored as zeros, an infinity as the largest finite magnitude, and a vector with a NaN as a scale that is one.

Processors that multiply pairs of bfloat16 read keys as pairs of dimensions and values as pairs of tokens. There a cache
of bfloat16 stores them as they are read: 16 adjacent tokens of a head have keys [head_dim / 2, 16 tokens, 2] and values
[8 pairs of tokens, head_dim, 2]. So a block, and any 16 adjacent tokens of it, has its bytes in the same places as a
block of rows, and can be moved like one.
"""

from __future__ import annotations

import torch

from penstock.kernels.native import NativeLibrary, library
from penstock.messages.kv_cache_spec import SCALE_BYTES
from penstock.messages.kv_layout import PAIR_TOKENS

_LEAST = 2.0**-100
_PAIR_DIMS = 32  # of a product


def head_size_of(kv_cache: torch.Tensor) -> int:
    """Returns how many numbers a row stores; the last dimension of the cache is a row."""
    return kv_cache.shape[-1] - (SCALE_BYTES if kv_cache.dtype == torch.int8 else 0)


def is_in_pairs(kv_cache: torch.Tensor, native: NativeLibrary | None) -> bool:
    """Whether a cache of this shape and dtype is in pairs where these kernels use it; None is torch."""
    if native is None or not native.has_pairs or kv_cache.dtype != torch.bfloat16:
        return False
    _, planes, _, block_size, head_dim = kv_cache.shape
    return planes == 2 and block_size % PAIR_TOKENS == 0 and head_dim % _PAIR_DIMS == 0


def is_layer_in_pairs(kv_cache: torch.Tensor) -> bool:
    """Whether this process stores keys and values in pairs in a layer's cache."""
    return kv_cache.is_cpu and is_in_pairs(kv_cache, library())


def rows_to_pairs(kv_cache: torch.Tensor) -> torch.Tensor:
    """Returns a cache [num_blocks, 2, Hkv, block_size, D] of rows as one in pairs."""
    keys, values = kv_cache.unflatten(3, (-1, PAIR_TOKENS)).unbind(1)
    keys = keys.unflatten(4, (-1, 2)).transpose(3, 4)
    values = values.unflatten(3, (-1, 2)).transpose(4, 5)
    return torch.stack([keys.reshape(values.shape), values], 1).reshape(kv_cache.shape)


def pairs_to_rows(kv_cache: torch.Tensor) -> torch.Tensor:
    """Does the reverse of `rows_to_pairs`."""
    shape = kv_cache.shape
    keys, values = kv_cache.view(*shape[:3], shape[3] // PAIR_TOKENS, -1).unbind(1)
    keys = keys.unflatten(3, (-1, PAIR_TOKENS, 2)).transpose(3, 4)
    values = values.unflatten(3, (-1, shape[4], 2)).transpose(4, 5)
    return torch.stack([each.reshape(shape[0], *shape[2:]) for each in (keys, values)], 1)


def quantize_rows(x: torch.Tensor) -> torch.Tensor:
    """[..., D] floats -> [..., D + 4] int8."""
    wide = x.float()
    has_nan = wide.isnan().any(-1, keepdim=True)
    largest = wide.abs().masked_fill(~wide.isfinite(), 0).amax(-1, keepdim=True)
    largest = largest.masked_fill(has_nan | (largest < _LEAST), 0)
    scale = largest / torch.full_like(largest, 127)
    integers = wide.nan_to_num(0, torch.inf, -torch.inf).clamp(-largest, largest) / scale.masked_fill(scale == 0, 1)
    scale = scale.masked_fill(has_nan, torch.nan)
    return torch.cat((integers.round().to(torch.int8), scale.view(torch.int8)), dim=-1)


def dequantize_rows(rows: torch.Tensor) -> torch.Tensor:
    """[..., D + 4] int8 -> [..., D] float32, each the product of an integer and the scale."""
    integers, scale = rows.split([rows.shape[-1] - SCALE_BYTES, SCALE_BYTES], dim=-1)
    return integers.float() * scale.contiguous().view(torch.float32)
