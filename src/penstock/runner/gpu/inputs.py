"""A step's inputs in buffers of fixed addresses: one copy from the CPU and two launches for every batch."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from penstock.attention.backend import AttentionMetadata
from penstock.config.engine import SchedulerConfig
from penstock.kernels.prepare_inputs import TokenInputs
from penstock.kernels.recurrent import StateRows
from penstock.kernels.triton.prepare_inputs import (
    SamplingInputs,
    StepInputs,
    prepare_inputs,
    prepare_sampling,
    prepare_states,
)
from penstock.messages.scheduler_output import SchedulerOutput
from penstock.runner.batch_shapes import BatchDescriptor, BatchShapes
from penstock.runner.block_tables import BlockTables
from penstock.runner.gpu.buffers import PinnedRing
from penstock.runner.host_batch import HostBatch, blank_batch, read_plan
from penstock.runner.input_batch import InputBatch, NextTokens, StepTensors
from penstock.runner.request_states import RequestStates
from penstock.utils.math import round_up

_ALIGNMENT = 16
_WIDE = ("idx_mapping", "sampling", "sampling_rows")  # [max_num_reqs] int64
_PADDING = {"idx_mapping": -1, "sampling_rows": -1}
_NARROW = ("query_start_loc", "sampling_start_loc", "windows")  # [max_num_reqs + 1] int32


class Snapshot:
    """The CPU's data of a step for the device: arrays in one piece of memory, named as in `StepTensors`."""

    def __init__(self, max_num_reqs: int, depth: int, device: torch.device) -> None:
        wide, narrow = round_up(8 * max_num_reqs, _ALIGNMENT), round_up(4 * (max_num_reqs + 1), _ALIGNMENT)
        places = {name: slice(i * wide, (i + 1) * wide) for i, name in enumerate(_WIDE)}
        first = len(_WIDE) * wide
        places |= {name: slice(first + i * narrow, first + (i + 1) * narrow) for i, name in enumerate(_NARROW)}
        num_bytes = first + len(_NARROW) * narrow
        self._ring = PinnedRing(num_bytes, depth + 1, device)
        self._memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._staged = np.zeros(num_bytes, dtype=np.uint8)
        self._arrays = {
            name: self._staged[place].view(np.int64 if name in _WIDE else np.int32) for name, place in places.items()
        }
        self.tensors = {
            name: self._memory[place].view(torch.int64 if name in _WIDE else torch.int32)
            for name, place in places.items()
        }

    def publish(self, arrays: Mapping[str, np.ndarray], paddings: Mapping[str, int]) -> None:
        """Copies the arrays to the beginnings of `tensors`, until the next call, each followed by its padding."""
        for name, padding in paddings.items():
            target, array = self._arrays[name], arrays.get(name, ())
            target[: len(array)] = array
            target[len(array) :] = padding
        num_bytes = len(self._staged)
        self._ring.open(num_bytes)[:] = self._staged
        self._ring.copy(num_bytes, self._memory)


class GpuInputBuilder:
    """Builds inputs with Triton, into views of buffers of the maximum step size (`InputBuilder`).

    The padding of a step of a captured shape is after its own inputs in the same buffers.
    """

    def __init__(
        self, config: SchedulerConfig, shapes: BatchShapes, states: RequestStates, blocks: BlockTables
    ) -> None:
        device = self.device = states.token_ids.device
        num_reqs = config.max_num_seqs
        self._last_position = config.max_model_len - 1
        self._shapes = shapes
        self._states = states
        self._blocks = blocks
        self._snapshot = Snapshot(num_reqs, config.max_num_in_flight, device)
        self._step = _allocate(shapes.max_num_tokens, num_reqs, blocks)
        self._next = _allocate(num_reqs, num_reqs, blocks)
        logits = [torch.zeros(num_reqs * (1 + config.max_num_drafts), dtype=torch.int64, device=device) for _ in "rpi"]
        self._sampling = SamplingInputs(*logits)
        # Pending and new drafts of each request [2, max_num_reqs] int32, for recurrent layers.
        self._drafts = torch.zeros((2, num_reqs), dtype=torch.int32, device=device)
        self._counts_drafts = bool(config.max_num_drafts) and True in blocks.is_recurrent

    def build(self, plan: SchedulerOutput) -> InputBatch:
        host = read_plan(plan, self._states.rows)
        num_sampling = len(host.sampling)
        arrays = {
            "idx_mapping": host.rows,
            "sampling": host.sampling,
            "sampling_rows": host.sampling_rows,
            "query_start_loc": host.query_start_loc,
            "sampling_start_loc": np.arange(num_sampling + 1),
            "windows": host.windows,
        }
        ends = {"query_start_loc": host.num_tokens, "sampling_start_loc": num_sampling, "windows": host.num_logits}
        # Padding samples too: as a request without tokens, after all others.
        self._snapshot.publish(arrays, {**ends, **_PADDING, "sampling": len(host.rows)})
        return self._batch(host, self._shapes.of(host))

    def blank(self, shape: BatchDescriptor) -> InputBatch:
        """Returns a step of this shape with only padding: it reads no row and writes none."""
        self._snapshot.publish({}, dict.fromkeys((*_WIDE, *_NARROW), 0) | _PADDING)
        # In a mixed step any tokens may be sampled from, and every request samples.
        query_len = 1 if self._shapes.is_mixed(shape) else shape.max_query_len
        return self._batch(blank_batch(shape.num_reqs, shape.num_tokens, query_len), shape)

    def prepare(self, batch: InputBatch) -> None:
        known, shape, step = self._snapshot.tensors, batch.shape, batch.tensors
        padded = _cut(self._step, shape.num_reqs, shape.num_tokens)
        self._prepare(known["idx_mapping"][: shape.num_reqs], known["query_start_loc"][: shape.num_reqs + 1], padded)
        sampling = SamplingInputs(step.logits_rows, step.logits_positions, step.logits_indices)
        prepare_sampling(step.idx_mapping, step.query_start_loc, step.windows, step.seq_lens, sampling)
        if self._counts_drafts:
            starts, windows = (known[name][: shape.num_reqs + 1] for name in ("query_start_loc", "windows"))
            self._prepare_states(known["idx_mapping"][: shape.num_reqs], starts, windows)

    def follow(self, batch: InputBatch, ahead: int) -> NextTokens:
        rows = batch.tensors.sampling_rows
        starts = self._snapshot.tensors["sampling_start_loc"][: len(rows) + 1]
        tokens = _cut(self._next, len(rows), len(rows))
        self._prepare(rows, starts, tokens, ahead)
        shape = BatchDescriptor(len(rows), len(rows), 1, batch.shape.max_seq_len)
        return NextTokens(tokens.positions, self._attention(starts, tokens, shape))

    def _batch(self, host: HostBatch, shape: BatchDescriptor) -> InputBatch:
        return InputBatch(host, shape, lambda: self._tensors(host, shape))

    def _tensors(self, host: HostBatch, shape: BatchDescriptor) -> StepTensors:
        """Returns the beginnings of the buffers; padding up to `shape` follows them."""
        known = self._snapshot.tensors
        num_reqs, num_sampling, num_logits = len(host.rows), len(host.sampling), host.num_logits
        step, query_start_loc = _cut(self._step, num_reqs, host.num_tokens), known["query_start_loc"][: num_reqs + 1]
        assert num_logits <= len(self._sampling.rows), f"{num_logits} logits in buffers for {len(self._sampling.rows)}"
        return StepTensors(
            idx_mapping=known["idx_mapping"][:num_reqs],
            query_start_loc=query_start_loc,
            seq_lens=step.seq_lens,
            tokens=TokenInputs(step.rows, step.positions, step.input_ids),
            sampling=known["sampling"][:num_sampling],
            sampling_rows=known["sampling_rows"][:num_sampling],
            windows=known["windows"][: num_reqs + 1],
            logits_indices=self._sampling.indices[:num_logits],
            logits_rows=self._sampling.rows[:num_logits],
            logits_positions=self._sampling.positions[:num_logits],
            attention=self._attention(query_start_loc, step, shape, self._state_rows(num_reqs)),
        )

    def _prepare_states(self, rows: torch.Tensor, starts: torch.Tensor, windows: torch.Tensor) -> None:
        states, (pending, drafts) = self._states, self._drafts[:, : len(rows)]
        prepare_states(rows, starts, windows, states.num_computed_exact, states.num_in_states, pending, drafts)

    def _state_rows(self, num_reqs: int) -> StateRows:
        if not self._counts_drafts:
            return StateRows(self._blocks.block_size)
        rows = self._snapshot.tensors["idx_mapping"][:num_reqs]
        return StateRows(self._blocks.block_size, rows, *self._drafts[:, :num_reqs])

    def _attention(
        self, query_start_loc: torch.Tensor, step: StepInputs, shape: BatchDescriptor, states: StateRows | None = None
    ) -> tuple[AttentionMetadata, ...]:
        lengths = (shape.max_query_len, shape.max_seq_len)
        return tuple(
            AttentionMetadata(query_start_loc, step.seq_lens, table, slots, *lengths, states if is_recurrent else None)
            for table, slots, is_recurrent in zip(
                step.block_tables, step.slot_mapping, self._blocks.is_recurrent, strict=True
            )
        )

    def _prepare(
        self, idx_mapping: torch.Tensor, query_start_loc: torch.Tensor, out: StepInputs, ahead: int = 0
    ) -> None:
        states, blocks = self._states, self._blocks
        tables = (states.num_computed_exact, states.token_ids, blocks.tables)
        prepare_inputs(idx_mapping, query_start_loc, *tables, blocks.block_size, out, ahead, self._last_position)


def _allocate(num_tokens: int, num_reqs: int, blocks: BlockTables) -> StepInputs:
    num_groups, _, width = blocks.tables.shape

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=blocks.tables.device)

    return StepInputs(
        rows=empty(num_tokens),
        positions=empty(num_tokens),
        input_ids=empty(num_tokens),
        seq_lens=empty(num_reqs, dtype=torch.int32),
        block_tables=empty(num_groups, num_reqs, width, dtype=torch.int32),
        slot_mapping=empty(num_groups, num_tokens),
    )


def _cut(whole: StepInputs, num_reqs: int, num_tokens: int) -> StepInputs:
    """Returns views of the beginnings."""
    assert num_tokens <= len(whole.rows), f"{num_tokens} tokens in buffers for {len(whole.rows)}"
    return StepInputs(
        rows=whole.rows[:num_tokens],
        positions=whole.positions[:num_tokens],
        input_ids=whole.input_ids[:num_tokens],
        seq_lens=whole.seq_lens[:num_reqs],
        block_tables=whole.block_tables[:, :num_reqs],
        slot_mapping=whole.slot_mapping[:, :num_tokens],
    )
