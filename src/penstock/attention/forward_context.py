"""What the model passes to its attention layers in a forward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from penstock.attention.backend import AttentionBackend, AttentionMetadata
from penstock.kernels.recurrent import StateRequests
from penstock.utils.layer_hooks import NO_HOOKS, LayerHooks


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """Passed through the model to its layers; keyed by layer name.

    `per_layer` [num_tokens, layers * size] are the inputs of a model's layers besides the stream, if it has such.
    `draft_inputs` [rows, most drafts, inputs of a token] are what recurrent layers keep of drafts.
    """

    metadata: dict[str, AttentionMetadata]
    kv_caches: dict[str, torch.Tensor]  # each [num_blocks, planes, num_kv_heads, block_size, head_size]
    attention: AttentionBackend
    hooks: LayerHooks = NO_HOOKS
    draft_inputs: Mapping[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    per_layer: torch.Tensor | None = None

    def state_requests(self, name: str) -> StateRequests:
        """Returns the requests of the recurrent layer `name`."""
        metadata = self.metadata[name]
        assert metadata.states is not None, f"the group of {name} has no states"
        table, starts, lengths = metadata.block_table, metadata.query_start_loc, metadata.seq_lens
        return StateRequests(table, starts, lengths, metadata.states, self.draft_inputs.get(name))


@dataclass(frozen=True, slots=True)
class LayerCaches:
    """A model's layers by name, and their caches and backend. `hooks` returns a step's hooks."""

    kv_caches: dict[str, torch.Tensor]
    group_of: Mapping[str, int]
    attention: AttentionBackend
    hooks: Callable[[], LayerHooks] = lambda: NO_HOOKS
    draft_inputs: Mapping[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])

    def context(self, metadata: Sequence[AttentionMetadata]) -> ForwardContext:
        """`metadata` by KV group."""
        by_layer = {name: metadata[group] for name, group in self.group_of.items()}
        return ForwardContext(by_layer, self.kv_caches, self.attention, self.hooks(), self.draft_inputs)
