"""Grammar bitmasks: which tokens may be sampled next, a bit per token."""

from __future__ import annotations

import numpy as np
import torch

from penstock.runner.buffers import to_device
from penstock.runner.sampling.batch import SamplingBatch


def apply_bitmask(logits: torch.Tensor, batch: SamplingBatch) -> None:
    """Forbids the tokens that the rows' grammars exclude, in place. `logits` is [num_sampling, vocab_size] float32."""
    if not batch.bitmasks:
        return
    rows = batch.indices(batch.bitmasks)
    words = to_device(np.stack(list(batch.bitmasks.values())), logits.device)  # [n, words] int32
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = ((words[:, :, None] >> bits) & 1).view(len(rows), -1)[:, : logits.shape[1]]
    logits[rows] = logits[rows].masked_fill(allowed == 0, -torch.inf)


def allows(bitmask: np.ndarray, token_id: int) -> bool:
    """Returns whether one row's grammar allows a token."""
    return bool(bitmask[token_id // 32] >> (token_id % 32) & 1)
