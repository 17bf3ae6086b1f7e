"""Which attention backend an engine gets."""

from __future__ import annotations

import torch

from penstock.attention.backend import AttentionBackend
from penstock.attention.native import NativeAttention
from penstock.config.engine import ExecutionConfig, SchedulerConfig
from penstock.kernels.dispatch import has_gpu_kernels


def make_attention(device: torch.device, config: SchedulerConfig, execution: ExecutionConfig) -> AttentionBackend:
    """Triton's on a GPU (or where its interpreter stands in for one), else the native one."""
    if not has_gpu_kernels(device):
        return NativeAttention()
    # Only now: a CPU needs no Triton.
    from penstock.attention.triton import TritonAttention
    from penstock.kernels.triton.attention.plan import MAX_DECODE_QUERY_LEN, AttentionLimits

    # Longer windows of drafts are verified as a prefill is computed.
    max_query_len = min(1 + config.max_num_drafts, MAX_DECODE_QUERY_LEN)
    limits = AttentionLimits(config.max_num_seqs, config.max_model_len, max_query_len)
    return TritonAttention(limits, device, execution.deterministic)
