"""The definition of a sampling feature.

One module of this folder, which it may share with related features, contains all definitions of a feature: which
requests use it, so that a step without such a request spends no time on it; the columns that a device with tables by
state row keeps for it; and its computation, as a reference for every device and for use on the CPU. `features` lists
all of them in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from penstock.messages.requests import RowRequest

if TYPE_CHECKING:
    from penstock.runner.sampling.batch import SamplingBatch


@dataclass(frozen=True, slots=True)
class Column:
    """Numbers of each state row, written when a request gets the row."""

    name: str
    dtype: torch.dtype
    of: Callable[[RowRequest, int], Sequence[float]]  # [width] for a request and the vocabulary's size
    width: int = 1


def _changes_nothing(logits: torch.Tensor, batch: SamplingBatch, chosen: Sequence[int]) -> None: ...


def _no_lists(request: RowRequest) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, slots=True)
class Feature:
    concerns: Callable[[RowRequest, int], object]
    """Whether a request uses it, given the vocabulary's size."""

    columns: tuple[Column, ...] = ()

    token_lists: Callable[[RowRequest], dict[str, Any]] = _no_lists
    """Its rules for single tokens: arguments of `penstock.kernels.triton.sampling.adjust.pack_rules`."""

    apply: Callable[[torch.Tensor, SamplingBatch, Sequence[int]], None] = _changes_nothing
    """Changes the `chosen` rows of [num_sampling, vocab_size] float32 logits in place, those that use the feature."""
