"""Attention on a GPU by Triton kernels: few queries per request in one fused kernel, others in two."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

import torch
from torch import Tensor

from penstock.attention.backend import AttentionHeads, AttentionMetadata
from penstock.attention.native import queries_of, rotate_and_store
from penstock.kernels.triton.attention.launcher import decode_attention_fused, paged_attention
from penstock.kernels.triton.attention.plan import (
    AttentionLimits,
    AttentionPlan,
    AttentionPlanner,
    AttentionShape,
    DecodeTile,
)
from penstock.kernels.triton.capabilities import Capabilities

# Contexts up to the first number share a plan, and then up to each multiple by the factor: a plan is a grid, and
# programs without work end at once.
_SHORTEST_CONTEXT, _CONTEXT_FACTOR = 1024, 4


@dataclass(slots=True)
class _Planned:
    planner: AttentionPlanner
    plans: dict[tuple[int, int, int], AttentionPlan] = field(default_factory=dict[tuple[int, int, int], AttentionPlan])


class TritonAttention:
    """`limits` are the engine's. Layers of one shape share a workspace, so all run on one stream."""

    captures_ragged = True
    captures_mixed = True
    reads_unseen = False
    runs_encoders = False

    def __init__(self, limits: AttentionLimits, device: torch.device, deterministic: bool = False) -> None:
        self._limits = limits
        self._device = device
        self._deterministic = deterministic
        contexts = [_SHORTEST_CONTEXT]
        while contexts[-1] < limits.max_model_len:
            contexts.append(contexts[-1] * _CONTEXT_FACTOR)
        self.graph_contexts: tuple[int, ...] = (*contexts[:-1], limits.max_model_len)
        self._shapes: dict[AttentionShape, _Planned] = {}

    def attend(
        self, qkv: Tensor, positions: Tensor, heads: AttentionHeads, kv_cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """See `AttentionBackend.attend`. Raises ConfigError for a shape of heads that the kernels do not support."""
        plan = self._plan(heads, kv_cache, metadata)
        batch = (metadata.block_table, metadata.query_start_loc, metadata.seq_lens)
        latent_value_dim = _latent_value_dim(heads)
        if isinstance(plan.tile, DecodeTile) and not (plan.deterministic or latent_value_dim):
            norms = None if heads.q_norm is None or heads.k_norm is None else (heads.q_norm, heads.k_norm)
            arguments = (qkv, heads.num_heads, heads.rotary, norms, heads.eps, kv_cache, *batch)
            return decode_attention_fused(
                *arguments, heads.scale, heads.spec.sliding_window, plan, softcap=heads.softcap, sinks=heads.sinks
            )
        rotate_and_store(qkv, positions, heads, kv_cache, metadata)
        return paged_attention(
            queries_of(qkv, heads),
            kv_cache,
            *batch,
            heads.scale,
            heads.spec.sliding_window,
            plan,
            softcap=heads.softcap,
            sinks=heads.sinks,
            latent_value_dim=latent_value_dim,
        )

    def _plan(self, heads: AttentionHeads, kv_cache: Tensor, metadata: AttentionMetadata) -> AttentionPlan:
        _, _, num_kv_heads, block_size, head_size = kv_cache.shape
        latent = _latent_value_dim(heads)
        shape = AttentionShape(heads.num_heads, num_kv_heads, head_size, block_size, kv_cache.dtype, latent)
        planned = self._shapes.get(shape)
        if planned is None:
            planner = AttentionPlanner(
                shape, self._limits, self._device, self._deterministic, capabilities=Capabilities.of(self._device)
            )
            planned = self._shapes[shape] = _Planned(planner)
        longest = self.graph_contexts[bisect.bisect_left(self.graph_contexts, metadata.max_seq_len)]
        # Queries of a prefill share a plan whatever their number, so that plans do not accumulate.
        key = (len(metadata.seq_lens), min(metadata.max_query_len, self._limits.max_decode_query_len + 1), longest)
        plan = planned.plans.get(key)
        if plan is None:
            plan = planned.plans[key] = planned.planner.plan(*key)
        return plan


def _latent_value_dim(heads: AttentionHeads) -> int:
    """Returns the size of the values of latent attention, 0 for another kind."""
    return heads.value_size if len(heads.spec.planes) == 1 else 0
