"""Token embeddings."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from penstock.kernels.quantized import LayerWeight, QuantizedWeight
from penstock.parallel.groups import ALONE, TensorGroup
from penstock.parallel.topology import Share


class Embedding:
    """Each rank of a group has the vectors of a share of the vocabulary. Quantized ones are looked up as bfloat16."""

    def __init__(self, weight: LayerWeight, group: TensorGroup = ALONE, vocab_size: int | None = None) -> None:
        """`vocab_size` is that of the whole group, by default that of one rank."""
        self.weight = weight  # [own vocabulary, hidden_size]
        self.dtype = torch.bfloat16 if isinstance(weight, QuantizedWeight) else weight.dtype  # of the vectors
        self._group = group
        size, share = vocab_size or weight.shape[0], Share(group.index, group.count)
        self._own = share.part(size)
        # The next rank's ids start at each bound.
        self._bounds = torch.tensor([each.part(size).stop for each in share.all[:-1]], device=weight.device)

    def __call__(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[num_tokens] int64 -> [num_tokens, hidden_size]."""
        count, weight = self._group.count, self.weight
        rows = input_ids if count == 1 else (input_ids - self._own.start).clamp(0, weight.shape[0] - 1)
        vectors = weight.dequantize(rows) if isinstance(weight, QuantizedWeight) else F.embedding(rows, weight)
        if count == 1:
            return vectors
        all_vectors = self._group.gather_columns(vectors, [weight.shape[1]] * count)
        owners = torch.bucketize(input_ids, self._bounds, right=True)
        # Selected, not added, so that no bit changes.
        return all_vectors.unflatten(1, (count, -1))[torch.arange(len(owners), device=owners.device), owners]
