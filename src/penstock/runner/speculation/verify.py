"""Which drafts were right.

A `Verifier` turns the logits of the windows (a request's last known token, then its drafts) into tokens and counts the
accepted drafts. Lifecycle: one is chosen and built with the runner. Threading: the runner's thread. It writes nothing.
Whatever it does, a row without a draft gets the token of the plain run, and so does every row of a greedy request that
is not measured synthetically.

`ExactVerifier` lets the target model sample at every position of the window as it would without drafts, with the noise
of that position. A draft is accepted when it is the token that was sampled, so the output is the same token for token,
greedy and seeded, and no distribution changes. For a drafter that proposes one token per position this accepts exactly
as often as the rejection sampling of Leviathan et al. (2023, arXiv:2211.17192): with the target's probability of that
token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from penstock.runner.buffers import to_device
from penstock.runner.sampling.sampler import SamplerOutput, sample
from penstock.runner.sampling.states import SamplingBatch


@dataclass(frozen=True, slots=True)
class Verified:
    num_accepted: torch.Tensor  # [num_sampling] int64
    num_real_drafts: torch.Tensor  # [num_sampling] int64: verified drafts before the first gap


class Verifier(Protocol):
    def verify(
        self, logits: torch.Tensor, sampling: SamplingBatch, rows: torch.Tensor, num_drafts_np: np.ndarray
    ) -> tuple[SamplerOutput, Verified]:
        """`logits` [num_logits, vocab_size] in the model's dtype, which are left as they are, and `sampling` of them.

        `rows` [num_sampling] int64 are the requests' state rows, `num_drafts_np` [num_sampling] how many drafts each
        verifies. Of each window's tokens those up to and with the one behind the accepted drafts are meant.
        """
        ...


class ExactVerifier:
    """Accepts what the plain run would have sampled. `drafts` [max_num_reqs, max_num_drafts] int64, -1 a gap."""

    def __init__(self, drafts: torch.Tensor) -> None:
        self._drafts = drafts

    def verify(
        self, logits: torch.Tensor, sampling: SamplingBatch, rows: torch.Tensor, num_drafts_np: np.ndarray
    ) -> tuple[SamplerOutput, Verified]:
        sampled = sample(logits, sampling)
        return sampled, verify(sampled.token_ids, self._drafts, rows, num_drafts_np)


def verify(sampled: torch.Tensor, all_drafts: torch.Tensor, rows: torch.Tensor, num_drafts_np: np.ndarray) -> Verified:
    """`sampled` [num_logits] int64, window after window; `all_drafts` [max_num_reqs, max_num_drafts] int64, -1 a gap.

    `rows` [num_sampling] int64 are the requests' rows of it, and `num_drafts_np` [num_sampling] the lengths of their
    drafts.
    """
    longest = int(num_drafts_np.max(initial=0))
    if longest == 0:
        nothing = rows.new_zeros(len(rows))
        return Verified(nothing, nothing)
    drafts = all_drafts[rows, :longest]
    num_drafts = to_device(num_drafts_np, sampled.device)
    starts = (num_drafts + 1).cumsum(0) - num_drafts - 1
    place = torch.arange(longest, device=sampled.device)
    # Beyond a request's own window the index is held inside the tensor and the comparison is masked.
    index = (starts[:, None] + place).clamp(max=len(sampled) - 1)
    is_real = (place < num_drafts[:, None]) & (drafts >= 0)
    is_right = is_real & (sampled[index] == drafts)
    return Verified(is_right.long().cumprod(1).sum(1), is_real.long().cumprod(1).sum(1))


def draft_places(num_drafts_np: np.ndarray) -> np.ndarray:
    """[num_logits] int64: which of its request's drafts each logits row judges, -1 for the row behind the last one."""
    counts = num_drafts_np + 1
    places = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
    return np.where(places < np.repeat(num_drafts_np, counts), places, -1)
