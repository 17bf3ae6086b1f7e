"""The runner's interface to a model.

A model is finished once constructed, holds no per-request state and reads the KV cache only through the given
`ForwardContext`. `forward` and `compute_logits` treat every row independently: a row's result depends on its own token,
position and cached KV, never on its neighbours. A `DraftHead` reads a model's hidden states in addition to tokens; the
rules for a model's rows apply to its rows too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from penstock.attention.forward_context import ForwardContext
from penstock.messages.kv_cache_spec import KVCacheSpec


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """The results of a forward pass; only the replay of a CUDA graph overwrites its own."""

    hidden: torch.Tensor  # [num_tokens, hidden_size] after the final norm
    aux_hidden: torch.Tensor  # [num_tokens, num_aux_layers * hidden_size]: the residual stream at their inputs


class Model(Protocol):
    kv_cache_specs: dict[str, KVCacheSpec]
    """Layer name -> how it stores its keys and values, in the order of the layers."""

    @property
    def logits_dtype(self) -> torch.dtype:
        """The model's own dtype, or float32."""
        ...

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> ModelOutput:
        """`input_ids` and `positions` are [num_tokens] int64."""
        ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[num_rows, hidden_size] -> [num_rows, vocab_size] in `logits_dtype`."""
        ...


class DraftHead(Protocol):
    """Predicts one token further than the model whose hidden states it reads, and more from its own states."""

    kv_cache_specs: dict[str, KVCacheSpec]

    def enter(self, output: ModelOutput) -> torch.Tensor:
        """Returns [num_tokens, hidden_size]: the states that the head starts from."""
        ...

    def forward(
        self, hidden: torch.Tensor, next_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """States at `positions` and the tokens after them -> [num_tokens, hidden_size]: the states one token later."""
        ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[num_rows, hidden_size] from `forward` -> [num_rows, vocab_size] of the model's vocabulary."""
        ...
