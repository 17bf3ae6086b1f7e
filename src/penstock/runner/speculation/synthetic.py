"""Drafts accepted by the toss of a coin, to measure an engine whose weights nobody has trained."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from penstock.runner.buffers import to_device
from penstock.runner.sampling.bitmask import allows
from penstock.runner.sampling.noise import Purpose, uniform
from penstock.runner.sampling.sampler import SamplerOutput, sample
from penstock.runner.sampling.states import SamplingBatch
from penstock.runner.speculation.verify import Verified, draft_places, verify

_REJECTED = -2  # no draft, and no gap either


class SyntheticVerifier:
    """Accepts the draft at place j of a window with probability `rates[j]`, once those before it are accepted.

    What the target says decides nothing but the token behind the accepted drafts, so the output is not the model's.
    Only a grammar is heard: a draft that it forbids would end the request.
    """

    def __init__(self, drafts: torch.Tensor, rates: Sequence[float]) -> None:
        self._drafts = drafts
        self._rates = np.array(rates)

    def verify(
        self, logits: torch.Tensor, sampling: SamplingBatch, rows: torch.Tensor, num_drafts_np: np.ndarray
    ) -> tuple[SamplerOutput, Verified]:
        sampled = sample(logits, sampling)
        places = draft_places(num_drafts_np)
        drafted = np.nonzero(places >= 0)[0]
        if not len(drafted):
            return sampled, verify(sampled.token_ids, self._drafts, rows, num_drafts_np)
        device = logits.device
        index = to_device(drafted, device)
        drafts = self._drafts[sampling.rows[index], to_device(places[drafted], device)]
        coins = uniform([sampling.requests[i].seed for i in drafted], sampling.positions_np[drafted], Purpose.ACCEPT)
        is_accepted = coins < self._rates[places[drafted]]
        if sampling.bitmasks:
            masks = [sampling.bitmasks.get(i) for i in drafted.tolist()]
            is_accepted &= [mask is None or allows(mask, i) for mask, i in zip(masks, drafts.tolist(), strict=True)]
        # A rejected draft stays rejected even where the target happens to say the same.
        accepted = torch.full_like(sampled.token_ids, _REJECTED)
        accepted[index] = drafts.where(to_device(is_accepted, device), _REJECTED)
        token_ids = accepted.where(accepted >= 0, sampled.token_ids)
        return SamplerOutput(token_ids, sampled.is_valid), verify(accepted, self._drafts, rows, num_drafts_np)
