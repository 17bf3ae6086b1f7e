"""From a drafter's logits to drafts.

A drafter asks `of_step` once a step and then picks one draft after the other. Lifecycle: a picker is built with the
runner. Threading: the runner's thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from penstock.runner.load import TORCH_DTYPES, LoadedModel
from penstock.runner.memory import available_bytes
from penstock.runner.sampling.noise import Purpose
from penstock.runner.sampling.sampler import draw
from penstock.runner.sampling.states import SamplingBatch, SamplingStates
from penstock.runner.speculation.speculator import StepResult
from penstock.utils.errors import ConfigError

Pick = Callable[[torch.Tensor, int], torch.Tensor]
"""(logits [num_sampling, vocab_size], place of the draft behind the last known token) -> [num_sampling] int64."""


class Picker(Protocol):
    is_capturable: bool
    """As `Speculator.is_capturable`."""

    def of_step(self, step: StepResult) -> Pick:
        """What picks the drafts of the step's sampling requests."""
        ...


class BestPicker:
    """The likeliest token."""

    is_capturable = True

    def of_step(self, step: StepResult) -> Pick:
        return lambda logits, place: logits.argmax(-1)


def allocate_draft_logits(loaded: LoadedModel, max_num_reqs: int, max_num_drafts: int) -> torch.Tensor:
    """[max_num_reqs, max_num_drafts, vocab_size] in the model's dtype. Raises ConfigError when it does not fit."""
    device, dtype, vocab_size = loaded.device, TORCH_DTYPES[loaded.config.dtype], loaded.config.vocab_size
    needed = max_num_reqs * max_num_drafts * vocab_size * dtype.itemsize
    available = available_bytes(device)
    if needed > available:
        raise ConfigError(
            f"draft_sample_method=probabilistic keeps {vocab_size} logits for each of {max_num_drafts} drafts of "
            f"max_num_seqs={max_num_reqs} requests, which take {needed / 2**30:.1f} GiB, and {device} has "
            f"{available / 2**30:.1f} GiB free: lower max_num_seqs or num_speculative_tokens, or sample the drafts "
            "greedily"
        )
    return torch.empty((max_num_reqs, max_num_drafts, vocab_size), dtype=dtype, device=device)


class DraftDistributions:
    """What the drafts were drawn from: for each state row and place the drafter's logits, in its dtype.

    A row's logits are written together with the draft that was drawn from them and overwritten together with it, so
    whoever verifies a draft finds its own. The distribution is made from the logits twice, by the same operations.
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
