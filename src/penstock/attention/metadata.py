"""The data of a step that attention needs, besides the queries themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from penstock.utils.layer_hooks import NO_HOOKS, LayerHooks

if TYPE_CHECKING:
    from penstock.attention.backend import AttentionBackend


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """One KV group's view of the batch. Padding: query length 0, `seq_lens` 0, block row 0, slot -1.

    Every step has a new one, even if it is written into the tensors of the last: a backend may cache what it derives
    from one until it gets another.
    """

    query_start_loc: torch.Tensor  # [num_reqs + 1] int32: request r owns rows query_start_loc[r] .. [r + 1]
    seq_lens: torch.Tensor  # [num_reqs] int32: tokens in the cache once this step's are stored
    block_table: torch.Tensor  # [num_reqs, max_blocks] int32
    slot_mapping: torch.Tensor  # [num_tokens] int64: block_id * block_size + offset, where a token's KV is stored
    max_query_len: int  # of a request, an upper bound
    max_seq_len: int  # an upper bound


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """Passed through the model to its attention layers; keyed by layer name."""

    metadata: dict[str, AttentionMetadata]
    kv_caches: dict[str, torch.Tensor]  # each [num_blocks, 2, num_kv_heads, block_size, head_size]
    attention: AttentionBackend
    hooks: LayerHooks = NO_HOOKS


@dataclass(frozen=True, slots=True)
class LayerCaches:
    """A model's layers by name, and their caches and backend. `hooks` returns a step's hooks."""

    kv_caches: dict[str, torch.Tensor]
    group_of: Mapping[str, int]
    attention: AttentionBackend
    hooks: Callable[[], LayerHooks] = lambda: NO_HOOKS

    def context(self, metadata: Sequence[AttentionMetadata]) -> ForwardContext:
        """`metadata` by KV group."""
        by_layer = {name: metadata[group] for name, group in self.group_of.items()}
        return ForwardContext(by_layer, self.kv_caches, self.attention, self.hooks())
