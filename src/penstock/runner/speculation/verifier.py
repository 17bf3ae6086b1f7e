"""Verifiers decide which drafts are accepted.

A `Verifier` is called in a step with drafts, once a token has been sampled for every row of the logits. The logits of a
request are those of its window: its last known token, then its drafts. Lifecycle: one is chosen and built with the
runner. Threading: the runner's thread. A row without a draft keeps its token of a run without speculation, and so does
every row of a greedy request, except with synthetic acceptance.

    exact       A draft is accepted if it is the token that the target sampled at its place, with the noise of that
                position. The output is the same token for token, greedy and seeded, and no distribution changes. For a
                drafter that proposes one token per position this accepts exactly as often as the rejection sampling of
                Leviathan et al. (2023, arXiv:2211.17192): with the target's probability of that token.
    rejection   Rejection sampling (Leviathan et al. 2023; Chen et al. 2023, arXiv:2302.01318). A draft x, drawn from
                the drafter's distribution q, is accepted with probability min(1, p(x) / q(x)), p being the target's
                distribution after all sampling features of the request; otherwise it is replaced by a token from the
                normalised max(0, p - q). Either way the token has the distribution p, and no rule can accept more
                drafts. Drafts of greedy requests must be the best token.
    synthetic   The draft at place j of a window is accepted with probability `rates[j]`, once those before it are
                accepted, to measure an engine whose weights are not trained. The output is not the model's. Only a
                grammar is respected: a draft that it forbids would end the request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from penstock.runner.input_batch import InputBatch


@dataclass(frozen=True, slots=True)
class SampledStep:
    """A step whose tokens have been sampled as if there were no drafts. Each device adds its verifiers' inputs."""

    batch: InputBatch
    token_ids: torch.Tensor  # [num_logits] int64
    num_accepted: torch.Tensor  # [num_reqs] int64: accepted drafts of each request, by batch row
    num_real_drafts: torch.Tensor  # [num_reqs] int64: verified drafts before the first gap


Step = TypeVar("Step", bound=SampledStep, contravariant=True)


class Verifier(Protocol[Step]):
    def verify(self, step: Step) -> None:
        """Writes both counts of the step, and replaces sampled tokens where a draft or its substitute is used instead.

        Tokens of a window after the one that follows its accepted drafts are not used.
        """
        ...
