"""Token embeddings."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from penstock.parallel.groups import ALONE, TensorGroup
from penstock.parallel.topology import Share


class Embedding:
    """Every rank of a group holds the vectors of a share of the vocabulary."""

    def __init__(self, weight: torch.Tensor, group: TensorGroup = ALONE, vocab_size: int | None = None) -> None:
        """`vocab_size` is that of the whole group, by default that of one rank."""
        self.weight = weight  # [own vocabulary, hidden_size]
        self._group = group
        share = Share(group.index, group.count)
        self._own = share.part(vocab_size or len(weight))
        # The next rank's ids start at each bound.
        bounds = [each.part(vocab_size or len(weight)).stop for each in share.all[:-1]]
        self._bounds = torch.tensor(bounds, device=weight.device)

    def __call__(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[num_tokens] int64 -> [num_tokens, hidden_size]."""
        count = self._group.count
        if count == 1:
            return F.embedding(input_ids, self.weight)
        held = (input_ids - self._own.start).clamp(0, len(self.weight) - 1)
        vectors = F.embedding(held, self.weight)
        all_vectors = self._group.gather_columns(vectors, [self.weight.shape[1]] * count)
        owners = torch.bucketize(input_ids, self._bounds, right=True)
        # Selected, not added, so that no bit changes.
        return all_vectors.unflatten(1, (count, -1))[torch.arange(len(owners), device=owners.device), owners]
