"""One step's inputs on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

from penstock.attention.metadata import AttentionMetadata
from penstock.kernels.prepare_inputs import TokenInputs
from penstock.messages.scheduler_output import SchedulerOutput
from penstock.runner.batch_shapes import BatchDescriptor
from penstock.runner.host_batch import HostBatch


@dataclass(frozen=True, slots=True)
class StepTensors:
    """A step on the device. Another step may write them anew."""

    idx_mapping: torch.Tensor  # [num_reqs] int64: state rows
    query_start_loc: torch.Tensor  # [num_reqs + 1] int32
    seq_lens: torch.Tensor  # [num_reqs] int32: exact
    tokens: TokenInputs
    sampling: torch.Tensor  # [num_sampling] int64: batch rows
    sampling_rows: torch.Tensor  # [num_sampling] int64: their state rows
    windows: torch.Tensor  # [num_reqs + 1] int32: as HostBatch.windows
    logits_indices: torch.Tensor  # [num_logits] int64: each sampling request's last known token, then its drafts
    logits_rows: torch.Tensor  # [num_logits] int64: their state rows
    logits_positions: torch.Tensor  # [num_logits] int64: where what they sample will stand, exact
    attention: tuple[AttentionMetadata, ...]  # per KV group


class InputBatch:
    """A step: what the CPU knows of it, and its inputs on the device."""

    def __init__(self, host: HostBatch, shape: BatchDescriptor, make_tensors: Callable[[], StepTensors]) -> None:
        self.host = host
        self.shape = shape
        self._make_tensors = make_tensors

    @cached_property
    def tensors(self) -> StepTensors:
        """Made when they are first asked for: a graph knows where its own are."""
        return self._make_tensors()


@dataclass(frozen=True, slots=True)
class NextTokens:
    """One token for each request that sampled in a step, behind those that the step computed."""

    positions: torch.Tensor  # [num_sampling] int64
    attention: tuple[AttentionMetadata, ...]  # per KV group


class InputBuilder(Protocol):
    """Lifecycle: one is chosen and built with the runner. Threading: the runner's thread. It waits for nothing."""

    def build(self, plan: SchedulerOutput) -> InputBatch:
        """Takes the plan's counts over to the device, until the next call."""
        ...

    def prepare(self, batch: InputBatch) -> None:
        """Lets the batch's tensors be written, from the rows' state as it is when this is reached on the device.

        A CUDA graph may hold it.
        """
        ...

    def follow(self, batch: InputBatch, ahead: int) -> NextTokens:
        """The tokens `ahead` behind the first that is not computed, in the exact counts that the step has left.

        Positions are held inside the longest request, behind which no draft is ever used. Valid until the next call.
        """
        ...
