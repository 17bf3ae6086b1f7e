"""Picks drafts from a drafter's logits.

A drafter calls `of_step` once a step and then picks one draft after the other. Lifecycle: a picker is built with the
runner. Threading: the runner's thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from penstock.runner.loaded_model import LoadedModel
from penstock.runner.memory import DeviceMemory
from penstock.runner.speculation.speculator import StepResult
from penstock.utils.errors import ConfigError

Pick = Callable[[torch.Tensor, int], torch.Tensor]
"""(logits [num_sampling, vocab_size], place of the draft after the last known token) -> [num_sampling] int64."""


class Picker(Protocol):
    is_capturable: bool
    """See `Speculator.is_capturable`."""

    def of_step(self, step: StepResult) -> Pick:
        """Returns the function that picks the drafts of the step's sampling requests."""
        ...


class BestPicker:
    """Picks the likeliest token."""

    is_capturable = True

    def of_step(self, step: StepResult) -> Pick:
        return lambda logits, place: logits.argmax(-1)


def allocate_draft_logits(
    loaded: LoadedModel, max_num_reqs: int, max_num_drafts: int, memory: DeviceMemory
) -> torch.Tensor:
    """Allocates [max_num_reqs, max_num_drafts, vocab_size] in the model's dtype. ConfigError if it does not fit."""
    device, dtype, vocab_size = loaded.device, loaded.model.logits_dtype, loaded.config.vocab_size
    needed = max_num_reqs * max_num_drafts * vocab_size * dtype.itemsize
    available = memory.available()
    if needed > available:
        raise ConfigError(
            f"draft_sample_method=probabilistic keeps {vocab_size} logits for each of {max_num_drafts} drafts of "
            f"max_num_seqs={max_num_reqs} requests, which take {needed / 2**30:.1f} GiB, and {device} has "
            f"{available / 2**30:.1f} GiB free: lower max_num_seqs or num_speculative_tokens, or sample the drafts "
            "greedily"
        )
    return torch.empty((max_num_reqs, max_num_drafts, vocab_size), dtype=dtype, device=device)
