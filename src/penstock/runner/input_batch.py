"""One step's inputs on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

from penstock.attention.backend import AttentionMetadata
from penstock.kernels.prepare_inputs import TokenInputs
from penstock.messages.scheduler_output import SchedulerOutput
from penstock.runner.batch_shapes import BatchDescriptor
from penstock.runner.host_batch import HostBatch


@dataclass(frozen=True, slots=True)
class StepTensors:
    """A step's tensors on the device. Another step may overwrite them."""

    idx_mapping: torch.Tensor  # [num_reqs] int64: state rows
    query_start_loc: torch.Tensor  # [num_reqs + 1] int32
    seq_lens: torch.Tensor  # [num_reqs] int32: exact
    tokens: TokenInputs
    sampling: torch.Tensor  # [num_sampling] int64: batch rows
    sampling_rows: torch.Tensor  # [num_sampling] int64: their state rows
    windows: torch.Tensor  # [num_reqs + 1] int32: as HostBatch.windows
    logits_indices: torch.Tensor  # [num_logits] int64: each sampling request's last known token, then its drafts
    logits_rows: torch.Tensor  # [num_logits] int64: their state rows
    logits_positions: torch.Tensor  # [num_logits] int64: positions of the tokens to be sampled, exact
    attention: tuple[AttentionMetadata, ...]  # per KV group


class InputBatch:
    """A step: the CPU's data, and its inputs on the device."""

    def __init__(self, host: HostBatch, shape: BatchDescriptor, make_tensors: Callable[[], StepTensors]) -> None:
        self.host = host
        self.shape = shape
        self._make_tensors = make_tensors

    @cached_property
    def tensors(self) -> StepTensors:
        """Built on first use: a graph has its own."""
        return self._make_tensors()


@dataclass(frozen=True, slots=True)
class NextTokens:
    """One token for each request that sampled in a step, after those that the step computed."""

    positions: torch.Tensor  # [num_sampling] int64
    attention: tuple[AttentionMetadata, ...]  # per KV group


class InputBuilder(Protocol):
    """Lifecycle: one is chosen and built with the runner. Threading: the runner's thread. It never waits."""

    def build(self, plan: SchedulerOutput) -> InputBatch:
        """Copies the plan's counts to the device, valid until the next call."""
        ...

    def prepare(self, batch: InputBatch) -> None:
        """Launches the writing of the batch's tensors, from the rows' state at this point of the stream.

        A CUDA graph may contain it.
        """
        ...

    def follow(self, batch: InputBatch, ahead: int) -> NextTokens:
        """Returns the tokens `ahead` positions after the first uncomputed one, by the exact counts after the step.

        Positions are clamped to the longest request, after which no draft is ever used. Valid until the next call.
        """
        ...
