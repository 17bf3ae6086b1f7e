"""Repetition, presence and frequency penalties, and bad words: features that look at the tokens so far.

The tokens are read on the device, where those of a step in flight already are; nothing is counted from step to step.
"""

from __future__ import annotations

import torch

from penstock.messages.requests import EngineRequest
from penstock.runner.sampling.batch import SamplingBatch


def has_penalty(request: EngineRequest) -> bool:
    """Whether any of the three penalties is on."""
    params = request.sampling_params
    return (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1.0, 0.0, 0.0)


def apply_penalties(logits: torch.Tensor, batch: SamplingBatch) -> None:
    """In place, on [num_sampling, vocab_size] float32.

    Repetition (Keskar et al. 2019, arXiv:1909.05858) divides positive and multiplies negative logits of tokens that
    the prompt or the output has; frequency and presence (the OpenAI API's definition) subtract per and for any
    occurrence in the output.
    """
    chosen = batch.where(has_penalty)
    if not chosen:
        return
    index = batch.indices(chosen)
    params = [batch.requests[i].sampling_params for i in chosen]
    prompt_lens = batch.indices(len(batch.requests[i].prompt_token_ids) for i in chosen)[:, None]
    longest = int(batch.positions_np[chosen].max())
    tokens = batch.token_ids[batch.rows[index], :longest].long()  # [num_chosen, longest]
    place = torch.arange(longest, device=tokens.device)[None]
    is_known = place < batch.positions[index][:, None]
    is_output = is_known & (place >= prompt_lens)
    counts = torch.zeros((len(chosen), logits.shape[1]), device=logits.device)
    output_counts = counts.scatter_add(1, tokens, is_output.float())
    all_counts = counts.scatter_add(1, tokens, is_known.float())
    values = logits[index]
    repetition = batch.column(p.repetition_penalty for p in params)
    penalised = torch.where(values > 0, values / repetition, values * repetition)
    values = torch.where(all_counts > 0, penalised, values)
    values -= batch.column(p.frequency_penalty for p in params) * output_counts
    values -= batch.column(p.presence_penalty for p in params) * (output_counts > 0)
    logits[index] = values


def apply_bad_words(logits: torch.Tensor, batch: SamplingBatch) -> None:
    """Forbids the last token of a bad word when the tokens before it are already there, in place."""
    for index in batch.where(lambda request: request.bad_words_token_ids):
        for word in batch.requests[index].bad_words_token_ids:
            *head, last = word
            if len(head) > batch.positions_np[index]:
                continue
            place = batch.positions[index] - len(head) + torch.arange(len(head), device=logits.device)
            is_there = (batch.token_ids[batch.rows[index], place] == batch.indices(head)).all()
            logits[index, last] = torch.where(is_there, -torch.inf, logits[index, last])
