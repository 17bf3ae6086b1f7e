"""Drafts drawn and verified by torch (`penstock.runner.speculation.verifier` defines the verifiers)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from penstock.runner.buffers import to_device
from penstock.runner.cpu.sampler import Distributions, draw
from penstock.runner.sampling.batch import SamplingBatch
from penstock.runner.sampling.noise import Purpose, uniform
from penstock.runner.sampling.states import SamplingStates
from penstock.runner.sampling.token_rules import allows
from penstock.runner.speculation.draft import BestPicker, Pick
from penstock.runner.speculation.speculator import StepResult
from penstock.runner.speculation.verifier import SampledStep

_REJECTED = -2  # neither a token nor a gap


class DraftDistributions:
    """The drafts' distributions: for each state row and place the drafter's logits, in their dtype.

    A row's logits are written and overwritten together with the draft that was drawn from them, so the verifier of a
    draft finds its own. The distribution is computed from the logits twice, by the same operations.
    """

    def __init__(self, logits: torch.Tensor) -> None:
        """`logits` [max_num_reqs, max_num_drafts, vocab_size], uninitialised."""
        self._logits = logits

    def write(self, rows: torch.Tensor, place: int, logits: torch.Tensor) -> None:
        """`rows` [n] int64 are state rows, `logits` [n, vocab_size]."""
        self._logits[rows, place] = logits

    def read(self, rows: torch.Tensor, places: torch.Tensor | int, temperatures: torch.Tensor) -> torch.Tensor:
        """[n, vocab_size] float32 probabilities. `rows` and `places` [n] int64, `temperatures` [n, 1] float32."""
        return (self._logits[rows, places].float() / temperatures).softmax(-1)


class SamplingPicker:
    """Picks the likeliest token for greedy requests, and draws one at the request's temperature for others."""

    is_capturable = False

    def __init__(self, states: SamplingStates, distributions: DraftDistributions) -> None:
        self._states = states
        self._distributions = distributions

    def of_step(self, step: StepResult) -> Pick:
        requests = self._states.at(step.batch.host.rows[step.batch.host.sampling])
        # Exact positions are known only on the device, but noise is made on the CPU.
        first = step.num_computed_exact.cpu().numpy() + 1
        batch = SamplingBatch(requests, first, step.rows, step.num_computed_exact + 1, step.token_ids, {})
        random_rows = batch.where(lambda request: not request.sampling_params.is_greedy)
        if not random_rows:
            return BestPicker().of_step(step)
        index = batch.indices(random_rows)
        temperatures = batch.temperatures(random_rows)

        def pick(logits: torch.Tensor, place: int) -> torch.Tensor:
            drafts = logits.argmax(-1)
            self._distributions.write(step.rows[index], place, logits[index])
            probs = self._distributions.read(step.rows[index], place, temperatures)
            drafts[index] = draw(probs, batch.noise(random_rows, Purpose.DRAFT, ahead=place))
            return drafts

        return pick


@dataclass(frozen=True, slots=True)
class TorchSampledStep(SampledStep):
    """Includes the distributions that the tokens were drawn from."""

    sampling: SamplingBatch
    distributions: Distributions


class ExactVerifier:
    """`drafts` [max_num_reqs, max_num_drafts] int64, -1 a gap."""

    def __init__(self, drafts: torch.Tensor) -> None:
        self._drafts = drafts

    def verify(self, step: TorchSampledStep) -> None:
        _count(step, step.token_ids, self._drafts)


class RejectionVerifier:
    """`drafts` [max_num_reqs, max_num_drafts] int64 without gaps, drawn from `draft_distributions`."""

    def __init__(self, drafts: torch.Tensor, draft_distributions: DraftDistributions) -> None:
        self._drafts = drafts
        self._draft_distributions = draft_distributions

    def verify(self, step: TorchSampledStep) -> None:
        sampling, random_rows = step.sampling, np.array(step.distributions.random_rows, dtype=np.int64)
        places_np = draft_places(step.batch.host.num_drafts)
        is_drafted = places_np[random_rows] >= 0
        drafted = random_rows[is_drafted]
        if len(drafted):
            index, places = sampling.indices(drafted), sampling.indices(places_np[drafted])
            rows = sampling.rows[index]
            step.token_ids[index] = accept_or_resample(
                step.distributions.probs[sampling.indices(np.nonzero(is_drafted)[0])],
                self._draft_distributions.read(rows, places, sampling.temperatures(drafted)),
                self._drafts[rows, places],
                sampling.noise(drafted, Purpose.ACCEPT),
                sampling.noise(drafted, Purpose.RESAMPLE),
            )
        # The token at a draft's place has its distribution however it was obtained, so a draft counts as accepted if it
        # is that token.
        _count(step, step.token_ids, self._drafts)


class SyntheticVerifier:
    """`drafts` [max_num_reqs, max_num_drafts] int64, -1 a gap."""

    def __init__(self, drafts: torch.Tensor, rates: Sequence[float]) -> None:
        self._drafts = drafts
        self._rates = np.array(rates)

    def verify(self, step: TorchSampledStep) -> None:
        sampling, device = step.sampling, step.token_ids.device
        places = draft_places(step.batch.host.num_drafts)
        drafted = np.nonzero(places >= 0)[0]
        index = to_device(drafted, device)
        drafts = self._drafts[sampling.rows[index], to_device(places[drafted], device)]
        coins = uniform([sampling.requests[i].seed for i in drafted], sampling.positions_np[drafted], Purpose.ACCEPT)
        is_accepted = coins < self._rates[places[drafted]]
        if sampling.bitmasks:
            masks = [sampling.bitmasks.get(i) for i in drafted.tolist()]
            is_accepted &= [mask is None or allows(mask, i) for mask, i in zip(masks, drafts.tolist(), strict=True)]
        # A rejected draft stays rejected even if the target samples the same token.
        accepted = torch.full_like(step.token_ids, _REJECTED)
        accepted[index] = drafts.where(to_device(is_accepted, device), _REJECTED)
        step.token_ids.copy_(accepted.where(accepted >= 0, step.token_ids))
        _count(step, accepted, self._drafts)


def _count(step: TorchSampledStep, token_ids: torch.Tensor, drafts: torch.Tensor) -> None:
    tensors = step.batch.tensors
    counts = count_accepted(token_ids, drafts, tensors.sampling_rows, step.batch.host.num_drafts)
    step.num_accepted[tensors.sampling], step.num_real_drafts[tensors.sampling] = counts


def count_accepted(
    token_ids: torch.Tensor, all_drafts: torch.Tensor, rows: torch.Tensor, num_drafts_np: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ([num_sampling] int64 accepted drafts, [num_sampling] int64 drafts before the first gap).

    `token_ids` [num_logits] int64, window after window; `all_drafts` [max_num_reqs, max_num_drafts] int64, -1 a gap;
    `rows` [num_sampling] int64 are the requests' rows of it, and `num_drafts_np` [num_sampling] how many each verifies.
    """
    longest = int(num_drafts_np.max(initial=0))
    drafts = all_drafts[rows, :longest]
    num_drafts = to_device(num_drafts_np, token_ids.device)
    starts = (num_drafts + 1).cumsum(0) - num_drafts - 1
    place = torch.arange(longest, device=token_ids.device)
    # Beyond a request's own window the index is clamped to the tensor and the comparison is masked.
    index = (starts[:, None] + place).clamp(max=len(token_ids) - 1)
    is_real = (place < num_drafts[:, None]) & (drafts >= 0)
    is_right = is_real & (token_ids[index] == drafts)
    return is_right.long().cumprod(1).sum(1), is_real.long().cumprod(1).sum(1)


def draft_places(num_drafts_np: np.ndarray) -> np.ndarray:
    """Returns [num_logits] int64: which draft each logits row verifies, -1 for the row after the last."""
    counts = num_drafts_np + 1
    places = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
    return np.where(places < np.repeat(num_drafts_np, counts), places, -1)


def accept_or_resample(
    target: torch.Tensor, draft: torch.Tensor, drafts: torch.Tensor, accept: torch.Tensor, resample: torch.Tensor
) -> torch.Tensor:
    """Returns [n] int64: each draft, or the token in its place.

    `target` and `draft` are [n, vocab_size] float32 probabilities, `drafts` [n] int64, `accept` and `resample` [n]
    float64 in [0, 1). A draft that its distribution cannot have produced (NaN, or zero mass) is never accepted.
    """
    of_target = target.gather(1, drafts[:, None])[:, 0].double()
    of_draft = draft.gather(1, drafts[:, None])[:, 0].double()
    is_accepted = (of_draft > 0) & (accept * of_draft < of_target)
    residual = (target - draft).clamp_(min=0)
    # Equal distributions may leave only a rounding error, and so may a drafter's distribution that is NaN.
    is_empty = ~(residual.sum(-1) > 0)
    if bool(is_empty.any()):
        residual[is_empty] = target[is_empty]
    return torch.where(is_accepted, drafts, draw(residual, resample))
