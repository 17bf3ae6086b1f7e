"""Attention on a GPU, by the kernels in Triton: few queries a request in one fused kernel, others in two."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from penstock.attention.backend import AttentionHeads
from penstock.attention.metadata import AttentionMetadata
from penstock.attention.native import queries_of, rotate_and_store
from penstock.kernels.triton.attention.launcher import decode_attention_fused, paged_attention
from penstock.kernels.triton.attention.plan import (
    AttentionLimits,
    AttentionPlan,
    AttentionPlanner,
    AttentionShape,
    DecodeTile,
)

# Contexts up to so many tokens share a plan, and then up to twice as many: a plan is a grid, and programs that find
# nothing to do end at once.
_SHORTEST_CONTEXT = 1024


@dataclass(slots=True)
class _Planned:
    planner: AttentionPlanner
    plans: dict[tuple[int, int, int], AttentionPlan] = field(default_factory=dict[tuple[int, int, int], AttentionPlan])


class TritonAttention:
    """`limits` are the engine's. Layers of one shape share a workspace, so all run on one stream."""

    graph_contexts: tuple[int, ...] = ()
    reads_unseen = False

    def __init__(self, limits: AttentionLimits, device: torch.device, deterministic: bool = False) -> None:
        self._limits = limits
        self._device = device
        self._deterministic = deterministic
        self._shapes: dict[AttentionShape, _Planned] = {}

    def attend(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        heads: AttentionHeads,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`. Raises ConfigError for a shape of heads that the kernels do not have."""
        plan = self._plan(heads, kv_cache, metadata)
        batch = (metadata.block_table, metadata.query_start_loc, metadata.seq_lens)
        if isinstance(plan.tile, DecodeTile) and not plan.deterministic:
            norms = None if heads.q_norm is None or heads.k_norm is None else (heads.q_norm, heads.k_norm)
            arguments = (qkv, heads.num_heads, heads.rotary, norms, heads.eps, kv_cache, *batch)
            return decode_attention_fused(*arguments, heads.scale, heads.spec.sliding_window, plan)
        rotate_and_store(qkv, positions, heads, kv_cache, metadata)
        queries = queries_of(qkv, heads)
        return paged_attention(queries, kv_cache, *batch, heads.scale, heads.spec.sliding_window, plan)

    def _plan(self, heads: AttentionHeads, kv_cache: torch.Tensor, metadata: AttentionMetadata) -> AttentionPlan:
        size = heads.spec.head_size
        shape = AttentionShape(heads.num_heads, heads.spec.num_kv_heads, size, kv_cache.shape[3], kv_cache.dtype)
        planned = self._shapes.get(shape)
        if planned is None:
            planner = AttentionPlanner(shape, self._limits, self._device, self._deterministic)
            planned = self._shapes[shape] = _Planned(planner)
        longest = min(max(_SHORTEST_CONTEXT, _power_of_2(metadata.max_seq_len)), self._limits.max_model_len)
        key = (metadata.seq_lens.shape[0], metadata.max_query_len, longest)
        plan = planned.plans.get(key)
        if plan is None:
            plan = planned.plans[key] = planned.planner.plan(*key)
        return plan


def _power_of_2(number: int) -> int:
    """The next one that is not smaller."""
    return 1 << (number - 1).bit_length()
