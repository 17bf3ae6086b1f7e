"""What the runner needs of a model.

A model is finished once constructed, holds no per-request state and reads the KV cache only through the
`ForwardContext` that it is given. `forward` and `compute_logits` treat every row independently: a row's result
depends on its own token, position and cached KV, never on its neighbours.
"""

from __future__ import annotations

from typing import Protocol

import torch

from penstock.attention.metadata import ForwardContext
from penstock.messages.kv_cache_spec import KVCacheSpec


class Model(Protocol):
    kv_cache_specs: dict[str, KVCacheSpec]
    """Layer name -> how it stores its keys and values, in the order of the layers."""

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """[num_tokens] int64 token ids and positions -> [num_tokens, hidden_size] after the final norm."""
        ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[num_rows, hidden_size] -> [num_rows, vocab_size] in the model's dtype."""
        ...
