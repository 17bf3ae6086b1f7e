"""Repetition, presence and frequency penalties.

The previous tokens are read on the device, where those of a step in flight already are; no counts are kept between
steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from penstock.messages.requests import RowRequest
from penstock.runner.sampling.batch import SamplingBatch
from penstock.runner.sampling.feature import Column, Feature


def _values(request: RowRequest, vocab_size: int) -> tuple[float, float, float]:
    params = request.sampling_params
    return params.repetition_penalty, params.presence_penalty, params.frequency_penalty


def _apply(logits: torch.Tensor, batch: SamplingBatch, chosen: Sequence[int]) -> None:
    """Repetition (Keskar et al. 2019, arXiv:1909.05858) divides positive and multiplies negative logits of tokens in
    the prompt or the output; frequency and presence (the OpenAI API's definition) subtract per occurrence and for any
    occurrence in the output.
    """
    index = batch.indices(chosen)
    params = [batch.requests[i].sampling_params for i in chosen]
    prompt_lens = batch.indices(batch.requests[i].num_prompt_tokens for i in chosen)[:, None]
    longest = int(batch.positions_np[list(chosen)].max())
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


PENALTIES = Feature(
    concerns=lambda request, vocab_size: _values(request, vocab_size) != (1.0, 0.0, 0.0),
    columns=(Column("penalties", torch.float32, _values, width=3),),
    apply=_apply,
)
