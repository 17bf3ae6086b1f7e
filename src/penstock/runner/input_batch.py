"""One step's inputs on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch

from penstock.attention.metadata import AttentionMetadata
from penstock.config.engine import SchedulerConfig
from penstock.kernels.dispatch import has_gpu_kernels
from penstock.kernels.prepare_inputs import TokenInputs, expand_tokens, slot_mapping
from penstock.messages.scheduler_output import SchedulerOutput
from penstock.runner.batch_shapes import BatchDescriptor, BatchShapes
from penstock.runner.block_tables import BlockTables
from penstock.runner.buffers import to_device
from penstock.runner.host_batch import HostBatch, read_plan
from penstock.runner.request_states import RequestStates
from penstock.utils.math import cdiv


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


def make_input_builder(
    config: SchedulerConfig, shapes: BatchShapes, states: RequestStates, blocks: BlockTables
) -> InputBuilder:
    if not has_gpu_kernels(states.token_ids.device):
        return HostInputBuilder(config, shapes, states, blocks)
    # Only now: a CPU needs no Triton.
    from penstock.runner.gpu.inputs import GpuInputBuilder

    return GpuInputBuilder(config, shapes, states, blocks)


class HostInputBuilder:
    """By torch, into fresh tensors (`InputBuilder`)."""

    def __init__(
        self, config: SchedulerConfig, shapes: BatchShapes, states: RequestStates, blocks: BlockTables
    ) -> None:
        self._last_position = config.max_model_len - 1
        self._shapes = shapes
        self._states = states
        self._blocks = blocks

    def build(self, plan: SchedulerOutput) -> InputBatch:
        host = read_plan(plan, self._states.rows)
        shape = self._shapes.of(host)
        return InputBatch(host, shape, lambda: self._make_tensors(host, shape))

    def prepare(self, batch: InputBatch) -> None:
        _ = batch.tensors

    def _make_tensors(self, host: HostBatch, shape: BatchDescriptor) -> StepTensors:
        states = self._states
        device = states.token_ids.device
        starts = host.query_start_loc
        idx_mapping, query_start_loc = to_device(host.rows, device), to_device(starts, device)
        tokens = expand_tokens(
            idx_mapping, query_start_loc, states.num_computed_exact, states.token_ids, host.num_tokens
        )
        seq_lens = (states.num_computed_exact[idx_mapping, 0] + query_start_loc.diff()).to(torch.int32)
        sampling = to_device(host.sampling, device)
        logits_indices = to_device(_last_tokens(starts[host.sampling + 1], host.num_drafts), device)
        return StepTensors(
            idx_mapping=idx_mapping,
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            tokens=tokens,
            sampling=sampling,
            sampling_rows=idx_mapping[sampling],
            windows=to_device(host.windows, device),
            logits_indices=logits_indices,
            logits_rows=tokens.rows[logits_indices],
            logits_positions=tokens.positions[logits_indices] + 1,
            attention=self._attention(query_start_loc, seq_lens, idx_mapping, tokens, shape),
        )

    def follow(self, batch: InputBatch, ahead: int) -> NextTokens:
        rows = batch.tensors.sampling_rows
        positions = (self._states.num_computed_exact[rows, 0] + ahead).clamp(max=self._last_position)
        starts = torch.arange(len(rows) + 1, dtype=torch.int32, device=rows.device)
        shape = BatchDescriptor(len(rows), len(rows), 1, batch.shape.max_seq_len)
        tokens = TokenInputs(rows, positions, positions)
        seq_lens = (positions + 1).to(torch.int32)
        return NextTokens(positions, self._attention(starts, seq_lens, rows, tokens, shape))

    def _attention(
        self,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        rows: torch.Tensor,
        tokens: TokenInputs,
        shape: BatchDescriptor,
    ) -> tuple[AttentionMetadata, ...]:
        """One view of the requests per KV group; the tables are cut to the longest that may be."""
        block_size = self._blocks.block_size
        width = cdiv(shape.max_seq_len, block_size)
        return tuple(
            AttentionMetadata(
                query_start_loc=query_start_loc,
                seq_lens=seq_lens,
                block_table=table[rows, :width],
                slot_mapping=slot_mapping(table, tokens, block_size),
                max_query_len=shape.max_query_len,
                max_seq_len=shape.max_seq_len,
            )
            for table in self._blocks.tables
        )


def _last_tokens(ends: np.ndarray, num_drafts: np.ndarray) -> np.ndarray:
    """[num_logits] int64: of each request whose tokens end at `ends`, the last `1 + num_drafts`."""
    if not num_drafts.any():
        return ends.astype(np.int64) - 1
    counts = num_drafts + 1
    offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(ends.astype(np.int64) - counts, counts) + offsets
