"""Builds a step's inputs with torch, in new tensors."""

from __future__ import annotations

import numpy as np
import torch

from penstock.attention.backend import AttentionMetadata
from penstock.config.engine import SchedulerConfig
from penstock.kernels.prepare_inputs import TokenInputs, expand_tokens, slot_mapping
from penstock.kernels.recurrent import StateRows
from penstock.messages.scheduler_output import SchedulerOutput
from penstock.runner.batch_shapes import BatchDescriptor, BatchShapes
from penstock.runner.block_tables import BlockTables
from penstock.runner.buffers import to_device
from penstock.runner.host_batch import HostBatch, read_plan
from penstock.runner.input_batch import InputBatch, NextTokens, StepTensors
from penstock.runner.request_states import RequestStates
from penstock.utils.math import cdiv

# Blocks of a block table.
_LEAST_WIDTH = 64


class TorchInputBuilder:
    """`InputBuilder`."""

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
            attention=self._attention(query_start_loc, seq_lens, idx_mapping, tokens, shape, self._state_rows(host)),
        )

    def _state_rows(self, host: HostBatch) -> StateRows:
        """Returns what recurrent layers must know of drafts, and counts the tokens that their states will contain."""
        block_size, counts = self._blocks.block_size, self._states.num_in_states
        if not self._states.drafts.shape[1] or True not in self._blocks.is_recurrent:
            return StateRows(block_size)
        rows, num_drafts = torch.from_numpy(host.rows), torch.zeros(len(host.rows), dtype=torch.int32)
        num_drafts[host.sampling] = torch.from_numpy(host.num_drafts).to(torch.int32)
        start = self._states.num_computed_exact[rows, 0]
        num_pending = (start - counts[rows, 0]).to(torch.int32)
        counts[rows, 0] = start + torch.from_numpy(host.query_lens) - num_drafts
        return StateRows(block_size, rows, num_pending, num_drafts)

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
        states: StateRows | None = None,
    ) -> tuple[AttentionMetadata, ...]:
        """Returns one view of the requests per KV group, for recurrent layers with `states`; the tables are cut to a
        power of two of blocks that holds the longest request, so that nearly every step has the width of the last one.
        """
        block_size = self._blocks.block_size
        width = max(_LEAST_WIDTH, 1 << (cdiv(shape.max_seq_len, block_size) - 1).bit_length())
        return tuple(
            AttentionMetadata(
                query_start_loc=query_start_loc,
                seq_lens=seq_lens,
                block_table=table[rows, :width],
                slot_mapping=slot_mapping(table, tokens, block_size),
                max_query_len=shape.max_query_len,
                max_seq_len=shape.max_seq_len,
                states=states if is_recurrent else None,
            )
            for table, is_recurrent in zip(self._blocks.tables, self._blocks.is_recurrent, strict=True)
        )


def _last_tokens(ends: np.ndarray, num_drafts: np.ndarray) -> np.ndarray:
    """Returns [num_logits] int64: the last `1 + num_drafts` tokens of each request, whose tokens end at `ends`."""
    if not num_drafts.any():
        return ends.astype(np.int64) - 1
    counts = num_drafts + 1
    offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(ends.astype(np.int64) - counts, counts) + offsets
