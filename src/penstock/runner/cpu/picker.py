"""Drafts drawn by torch."""

from __future__ import annotations

import torch

from penstock.runner.cpu.sampler import draw
from penstock.runner.sampling.batch import SamplingBatch
from penstock.runner.sampling.noise import Purpose
from penstock.runner.sampling.states import SamplingStates
from penstock.runner.speculation.pick import BestPicker, Pick
from penstock.runner.speculation.speculator import StepResult


class DraftDistributions:
    """What the drafts were drawn from: for each state row and place the drafter's logits, in its dtype.

    A row's logits are written together with the draft that was drawn from them and overwritten together with it, so
    the verifier of a draft finds its own. The distribution is made from the logits twice, by the same operations.
    """

    def __init__(self, logits: torch.Tensor) -> None:
        """`logits` [max_num_reqs, max_num_drafts, vocab_size], of any content."""
        self._logits = logits

    def write(self, rows: torch.Tensor, place: int, logits: torch.Tensor) -> None:
        """`rows` [n] int64 are state rows, `logits` [n, vocab_size]."""
        self._logits[rows, place] = logits

    def read(self, rows: torch.Tensor, places: torch.Tensor | int, temperatures: torch.Tensor) -> torch.Tensor:
        """[n, vocab_size] float32 probabilities. `rows` and `places` [n] int64, `temperatures` [n, 1] float32."""
        return (self._logits[rows, places].float() / temperatures).softmax(-1)


class SamplingPicker:
    """The likeliest token for a greedy request, and for others one drawn at the request's temperature."""

    is_capturable = False

    def __init__(self, states: SamplingStates, distributions: DraftDistributions) -> None:
        self._states = states
        self._distributions = distributions

    def of_step(self, step: StepResult) -> Pick:
        requests = self._states.at(step.batch.host.rows[step.batch.host.sampling])
        # Exact positions are known on the device alone, and noise is made on the CPU.
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
