"""Which attention backend an engine gets."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from penstock.attention.backend import AttentionBackend
from penstock.attention.native import NativeAttention
from penstock.kernels.dispatch import has_gpu_kernels


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What bounds every step: requests, positions of a request, and queries of a request that decodes."""

    max_num_reqs: int
    max_model_len: int
    max_decode_query_len: int


def make_attention(device: torch.device, limits: EngineLimits) -> AttentionBackend:
    """Triton's on a GPU (or where its interpreter stands in for one), else the native one."""
    if not has_gpu_kernels(device):
        return NativeAttention()
    # Only now: a CPU needs no Triton.
    from penstock.attention.triton import TritonAttention
    from penstock.kernels.triton.attention.plan import MAX_DECODE_QUERY_LEN, AttentionLimits

    # Longer windows of drafts are verified as a prefill is computed.
    max_query_len = min(limits.max_decode_query_len, MAX_DECODE_QUERY_LEN)
    bounds = AttentionLimits(limits.max_num_reqs, limits.max_model_len, max_query_len)
    return TritonAttention(bounds, device)
