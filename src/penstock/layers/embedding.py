"""Token embeddings."""

from __future__ import annotations

import torch
import torch.nn.functional as F


class Embedding:
    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight  # [vocab_size, hidden_size]

    def __call__(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[num_tokens] int64 -> [num_tokens, hidden_size]."""
        return F.embedding(input_ids, self.weight)
