"""Features that name tokens: `logit_bias`, `allowed_token_ids`, `bad_words`, `min_tokens`; and grammars' bitmasks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from penstock.messages.requests import RowRequest
from penstock.runner.buffers import to_device
from penstock.runner.sampling.batch import SamplingBatch
from penstock.runner.sampling.feature import Feature


def _add_biases(logits: torch.Tensor, batch: SamplingBatch, chosen: Sequence[int]) -> None:
    for index in chosen:
        bias = batch.requests[index].sampling_params.logit_bias or {}
        logits[index, batch.indices(bias)] += batch.column(bias.values())[:, 0]


def _forbid_others(logits: torch.Tensor, batch: SamplingBatch, chosen: Sequence[int]) -> None:
    for index in chosen:
        allowed = batch.indices(batch.requests[index].sampling_params.allowed_token_ids or ())
        kept = logits[index, allowed]
        logits[index] = -torch.inf
        logits[index, allowed] = kept


def _forbid_bad_words(logits: torch.Tensor, batch: SamplingBatch, chosen: Sequence[int]) -> None:
    """Forbids the last token of a bad word when the tokens before it are already there."""
    for index in chosen:
        words, end = batch.requests[index].bad_words_token_ids, int(batch.positions_np[index])
        first = max(0, end - max(map(len, words)) + 1)
        known: list[int] = batch.token_ids[batch.rows[index], first:end].tolist()
        lasts = [last for *head, last in words if known[len(known) - len(head) :] == head]
        logits[index, batch.indices(lasts)] = -torch.inf


def _forbid_early_ends(logits: torch.Tensor, batch: SamplingBatch, chosen: Sequence[int]) -> None:
    """Forbids the tokens that would end a request before it has `min_tokens` output tokens."""
    for index in chosen:
        request = batch.requests[index]
        if batch.num_output_tokens(index) < request.sampling_params.min_tokens:
            logits[index, batch.indices(_ends(request))] = -torch.inf


def _ends(request: RowRequest) -> frozenset[int]:
    return request.eos_token_ids | request.stop_token_ids if request.sampling_params.min_tokens else frozenset()


LOGIT_BIAS = Feature(
    concerns=lambda request, _: request.sampling_params.logit_bias,
    token_lists=lambda request: {"bias": request.sampling_params.logit_bias or {}},
    apply=_add_biases,
)
ALLOWED_TOKEN_IDS = Feature(
    concerns=lambda request, _: request.sampling_params.allowed_token_ids,
    token_lists=lambda request: {"allowed": request.sampling_params.allowed_token_ids or ()},
    apply=_forbid_others,
)
BAD_WORDS = Feature(
    concerns=lambda request, _: request.bad_words_token_ids,
    token_lists=lambda request: {"bad_words": request.bad_words_token_ids},
    apply=_forbid_bad_words,
)
MIN_TOKENS = Feature(
    concerns=lambda request, _: request.sampling_params.min_tokens > 0,
    token_lists=lambda request: {
        "ends": _ends(request),
        "min_len": request.num_prompt_tokens + request.sampling_params.min_tokens,
    },
    apply=_forbid_early_ends,
)


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
