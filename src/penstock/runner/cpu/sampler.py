"""Samples tokens from logits.

Greedy rows take the first token with the highest logit. Others draw by inversion: the token at which the cumulative
probability, in the order of the vocabulary, first exceeds a number determined by (seed, position). Every stage works
row by row, so a row's token depends on that row alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from penstock.runner.sampling.batch import SamplingBatch
from penstock.runner.sampling.feature import Feature
from penstock.runner.sampling.features import CHANGED_LOGITS, DISTRIBUTION, DRAWN, LOGITS, bits
from penstock.runner.sampling.noise import Purpose
from penstock.runner.sampling.token_rules import apply_bitmask

_LOGITS, _DISTRIBUTION = ([(feature, bits(feature)) for feature in group] for group in (LOGITS, DISTRIBUTION))

_CDF_BLOCK = 128


@dataclass(frozen=True, slots=True)
class Distributions:
    """The rows' distributions after all sampling features."""

    best: torch.Tensor  # [num_sampling] int64: the greedy token
    is_valid: torch.Tensor  # [num_sampling] bool: false if the model produced NaN, or no token may be drawn
    random_rows: list[int]  # the rows that draw
    probs: torch.Tensor  # [len(random_rows), vocab_size] float32: their distributions


@dataclass(frozen=True, slots=True)
class Sampled:
    token_ids: torch.Tensor  # [num_sampling] int64
    distributions: Distributions  # the distributions they were drawn from


def sample(logits: torch.Tensor, batch: SamplingBatch) -> Sampled:
    """Samples one token per row of `logits`, [num_sampling, vocab_size] in the model's dtype, which stay unchanged."""
    found = distributions(logits, batch)
    token_ids = found.best
    if found.random_rows:
        noise = batch.noise(found.random_rows, Purpose.SAMPLE)
        token_ids = token_ids.index_copy(0, batch.indices(found.random_rows), draw(found.probs, noise))
    return Sampled(token_ids, found)


def distributions(logits: torch.Tensor, batch: SamplingBatch) -> Distributions:
    """Applies the features to a copy of `logits`, [num_sampling, vocab_size] in the model's dtype."""
    if not batch.bitmasks and not batch.needs & (CHANGED_LOGITS | DRAWN):
        best = logits.max(-1)
        return Distributions(best.indices, best.values.isfinite(), [], logits[:0])
    logits = adjusted(logits, batch)
    best = logits.max(-1)
    scale_and_truncate(logits, batch)
    random_rows = batch.where(lambda request: not request.sampling_params.is_greedy)
    probs = logits[batch.indices(random_rows)].softmax(-1)
    return Distributions(best.indices, best.values.isfinite(), random_rows, probs)


def adjusted(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Returns a copy in float32 with all features that change the logits of greedy and random rows alike."""
    logits = logits.to(torch.float32, copy=True)
    _apply(_LOGITS, logits, batch)
    apply_bitmask(logits, batch)
    return logits


def scale_and_truncate(logits: torch.Tensor, batch: SamplingBatch) -> None:
    """Divides random rows by the temperature and forbids the tokens that top_k, top_p and min_p exclude, in place."""
    _apply(_DISTRIBUTION, logits, batch)


def _apply(features: Sequence[tuple[Feature, int]], logits: torch.Tensor, batch: SamplingBatch) -> None:
    for feature, bit in features:
        if batch.needs & bit:
            chosen = batch.where(lambda request: feature.concerns(request, logits.shape[1]))  # noqa: B023 - called now
            if chosen:
                feature.apply(logits, batch, chosen)


def draw(probs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """[n, vocab_size] float32 probabilities, not normalised, and [n] float64 numbers in [0, 1) -> [n] int64 tokens.

    Inversion in two levels, sums of blocks and then within a block, so that a long vocabulary costs one pass.
    """
    padded = torch.nn.functional.pad(probs, (0, -probs.shape[1] % _CDF_BLOCK)).unflatten(1, (-1, _CDF_BLOCK))
    block_cdf = padded.sum(-1).cumsum(-1, dtype=torch.float64)
    target = noise[:, None] * block_cdf[:, -1:]
    # Rounding must not raise the target to the total, after which there is no token.
    target = torch.minimum(target, block_cdf[:, -1:].nextafter(torch.zeros_like(target)))
    # A row without a total (NaN, or no mass) finds no block; it has been reported as not valid.
    block = torch.searchsorted(block_cdf, target, right=True).clamp_(max=block_cdf.shape[1] - 1)
    before = torch.where(block > 0, block_cdf.gather(1, (block - 1).clamp(min=0)), 0.0)
    inner = padded.gather(1, block[:, :, None].expand(-1, -1, _CDF_BLOCK))[:, 0]
    inner_cdf = inner.cumsum(-1, dtype=torch.float64)
    offset = torch.searchsorted(inner_cdf, target - before, right=True)
    # The block's sum may exceed that of its elements by a rounding error: then take the last token that has any mass.
    places = torch.arange(_CDF_BLOCK, device=probs.device)
    last = torch.where(inner > 0, places, 0).amax(-1, keepdim=True)
    return (block * _CDF_BLOCK + torch.minimum(offset, last))[:, 0]
