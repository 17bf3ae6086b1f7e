"""Steps with only the parts that a verifier needs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from penstock.runner.cpu.drafts import TorchSampledStep
from penstock.runner.cpu.sampler import sample
from penstock.runner.sampling.batch import SamplingBatch
from penstock.runner.speculation.verifier import Verifier


def verified_step(
    verifier: Verifier[TorchSampledStep],
    logits: torch.Tensor,
    sampling: SamplingBatch,
    rows: torch.Tensor,
    num_drafts: np.ndarray,
) -> TorchSampledStep:
    """Samples from `logits` [num_logits, vocab_size] and verifies the last `num_drafts` of each request's window."""
    sampled = sample(logits, sampling)
    inputs = SimpleNamespace(sampling=torch.arange(len(rows)), sampling_rows=rows)
    batch = cast(Any, SimpleNamespace(host=SimpleNamespace(num_drafts=num_drafts), tensors=inputs))
    counts = sampled.token_ids.new_full((2, len(rows)), -9)
    step = TorchSampledStep(batch, sampled.token_ids, counts[0], counts[1], sampling, sampled.distributions)
    verifier.verify(step)
    return step
