"""Log probabilities by GPU kernels, and the decoding of their records."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from penstock.kernels.triton.sampling.logprobs import RECORD, LogprobsWorkspace, score_tokens
from penstock.messages.runner_output import TokenLogprobs
from penstock.messages.sampling_params import MAX_LOGPROBS
from penstock.runner.gpu.buffers import FencedCopy
from penstock.runner.sampling.logprobs import PendingLogprobs


def score(logits: torch.Tensor, chosen: torch.Tensor, num_top: int) -> PendingLogprobs:
    """See `Score`."""
    num_rows, vocab_size = logits.shape
    num_top = min(num_top, vocab_size)
    # Every row uses the single row of the table.
    rows, wanted = torch.zeros_like(chosen), torch.full((1, 1), num_top, dtype=torch.int32, device=logits.device)
    workspace = LogprobsWorkspace.allocate(num_rows, vocab_size, logits.device)
    records = torch.empty((num_rows, RECORD), dtype=torch.int32, device=logits.device)
    score_tokens(logits, rows, wanted, chosen, workspace, num_top > 0, records)
    copied = FencedCopy.of(records)
    return lambda: read_records(copied.wait(), [num_top] * num_rows)


def read_records(records: np.ndarray, num_top: Sequence[int]) -> list[TokenLogprobs]:
    """Decodes `records` [n, RECORD] int32, as written by `score_tokens`, with `num_top` [n] likeliest tokens each."""
    numbers = records.view(np.float32)
    first, last = 3, 3 + MAX_LOGPROBS
    rows = zip(
        num_top,
        numbers[:, 0].tolist(),
        records[:, 1:3].tolist(),
        records[:, first:last].tolist(),
        numbers[:, last:].tolist(),
        strict=True,
    )
    return [
        TokenLogprobs((token, *ids[:count]), (logprob, *logprobs[:count]), rank)
        for count, logprob, (rank, token), ids, logprobs in rows
    ]
