"""How the KV cache stores the vector of a token and a head: its numbers, or int8 integers and then their scale.

A scale is a 127th of the vector's largest finite magnitude, a float32 in the last four bytes of the row. It depends on
the vector alone, so that a row has the same bytes whichever tokens are stored with it. Vectors without a magnitude of
2^-100 are stored as zeros, an infinity as the largest finite magnitude, and a vector with a NaN as a scale that is one.
"""

from __future__ import annotations

import torch

from penstock.messages.kv_cache_spec import SCALE_BYTES

_LEAST = 2.0**-100


def head_size_of(kv_cache: torch.Tensor) -> int:
    """Returns how many numbers a row stores; the last dimension of the cache is a row."""
    return kv_cache.shape[-1] - (SCALE_BYTES if kv_cache.dtype == torch.int8 else 0)


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
