"""Features that name tokens: `allowed_token_ids`, `logit_bias` and `min_tokens`."""

from __future__ import annotations

import torch

from penstock.messages.requests import EngineRequest
from penstock.runner.sampling.batch import SamplingBatch


def apply_allowed_token_ids(logits: torch.Tensor, batch: SamplingBatch) -> None:
    """Forbids everything that is not allowed, in place. `logits` is [num_sampling, vocab_size] float32."""
    for index in batch.where(lambda request: request.sampling_params.allowed_token_ids):
        allowed = batch.indices(batch.requests[index].sampling_params.allowed_token_ids or ())
        kept = logits[index, allowed]
        logits[index] = -torch.inf
        logits[index, allowed] = kept


def apply_logit_bias(logits: torch.Tensor, batch: SamplingBatch) -> None:
    """Adds each request's biases, in place."""
    for index in batch.where(lambda request: request.sampling_params.logit_bias):
        bias = batch.requests[index].sampling_params.logit_bias or {}
        logits[index, batch.indices(bias)] += batch.column(bias.values())[:, 0]


def apply_min_tokens(logits: torch.Tensor, batch: SamplingBatch) -> None:
    """Forbids the tokens that would end a request before it has `min_tokens` output tokens, in place."""

    def is_constrained(request: EngineRequest) -> bool:
        return request.sampling_params.min_tokens > 0

    for index in batch.where(is_constrained):
        request = batch.requests[index]
        if batch.num_output_tokens(index) < request.sampling_params.min_tokens:
            logits[index, batch.indices(request.eos_token_ids | request.stop_token_ids)] = -torch.inf
