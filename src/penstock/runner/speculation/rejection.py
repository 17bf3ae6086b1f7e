"""Rejection sampling (Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318).

A draft x, drawn from the drafter's distribution q, is accepted with probability min(1, p(x) / q(x)), p being the
target's distribution after all sampling features of the request; otherwise a token from max(0, p - q), normalised,
takes its place. Either way the token has the distribution p, and it is the draft as often as any rule can make it.
"""

from __future__ import annotations

import numpy as np
import torch

from penstock.runner.buffers import to_device
from penstock.runner.sampling.noise import Purpose
from penstock.runner.sampling.sampler import Distributions, SamplerOutput, distributions, draw
from penstock.runner.sampling.states import SamplingBatch
from penstock.runner.speculation.pick import DraftDistributions
from penstock.runner.speculation.verify import Verified, draft_places, verify


class RejectionVerifier:
    """Judges drafts of `SamplingPicker`; those of greedy requests must be the best token.

    `drafts` [max_num_reqs, max_num_drafts] int64 without gaps.
    """

    def __init__(self, drafts: torch.Tensor, draft_distributions: DraftDistributions) -> None:
        self._drafts = drafts
        self._draft_distributions = draft_distributions

    def verify(
        self, logits: torch.Tensor, sampling: SamplingBatch, rows: torch.Tensor, num_drafts_np: np.ndarray
    ) -> tuple[SamplerOutput, Verified]:
        found = distributions(logits, sampling)
        token_ids = found.best
        if found.random_rows:
            token_ids[sampling.indices(found.random_rows)] = self._draw(found, sampling, draft_places(num_drafts_np))
        # The token at a draft's place has its distribution however it came about, so that a draft counts as accepted
        # where it is that token.
        return SamplerOutput(token_ids, found.is_valid), verify(token_ids, self._drafts, rows, num_drafts_np)

    def _draw(self, found: Distributions, sampling: SamplingBatch, places_np: np.ndarray) -> torch.Tensor:
        """[len(found.random_rows)] int64. `places_np` [num_logits] as `draft_places` makes it."""
        device = found.probs.device
        random_np = np.array(found.random_rows)
        is_drafted = places_np[random_np] >= 0
        free, drafted = random_np[~is_drafted], random_np[is_drafted]
        of_free, of_drafted = (to_device(np.nonzero(chosen)[0], device) for chosen in (~is_drafted, is_drafted))
        token_ids = found.best.new_empty(len(random_np))
        token_ids[of_free] = draw(found.probs[of_free], sampling.noise(free, Purpose.SAMPLE))
        rows, places = sampling.rows[to_device(drafted, device)], to_device(places_np[drafted], device)
        token_ids[of_drafted] = accept_or_resample(
            found.probs[of_drafted],
            self._draft_distributions.read(rows, places, sampling.temperatures(drafted)),
            self._drafts[rows, places],
            sampling.noise(drafted, Purpose.ACCEPT),
            sampling.noise(drafted, Purpose.RESAMPLE),
        )
        return token_ids


def accept_or_resample(
    target: torch.Tensor, draft: torch.Tensor, drafts: torch.Tensor, accept: torch.Tensor, resample: torch.Tensor
) -> torch.Tensor:
    """[n] int64: each draft, or the token in its place.

    `target` and `draft` are [n, vocab_size] float32 probabilities, `drafts` [n] int64, `accept` and `resample` [n]
    float64 in [0, 1). A draft that its distribution cannot have given (NaN, or without mass) is never accepted.
    """
    of_target = target.gather(1, drafts[:, None])[:, 0].double()
    of_draft = draft.gather(1, drafts[:, None])[:, 0].double()
    is_accepted = (of_draft > 0) & (accept * of_draft < of_target)
    residual = (target - draft).clamp_(min=0)
    # Nothing may be left of equal distributions but for a rounding, or where the drafter's is NaN.
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, target)
    return torch.where(is_accepted, drafts, draw(residual, resample))
