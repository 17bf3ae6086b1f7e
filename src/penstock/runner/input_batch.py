"""One step's batch: which rows run, how many tokens each, and which of them sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from penstock.attention.metadata import AttentionMetadata
from penstock.config.engine import SchedulerConfig
from penstock.kernels.dispatch import has_gpu_kernels
from penstock.kernels.prepare_inputs import TokenInputs, expand_tokens, slot_mapping
from penstock.messages.scheduler_output import SchedulerOutput
from penstock.runner.block_tables import BlockTables
from penstock.runner.buffers import to_device
from penstock.runner.request_states import RequestStates


@dataclass(frozen=True, slots=True)
class HostBatch:
    """What the CPU knows of a step. Requests stand in the scheduler's order."""

    request_ids: tuple[str, ...]
    rows: np.ndarray  # [num_reqs] int64: state row of each request
    query_lens: np.ndarray  # [num_reqs] int64: tokens computed in this step
    num_computed: np.ndarray  # [num_reqs] int64: the scheduler's count before this step
    sampling: np.ndarray  # [num_sampling] int64: batch rows whose step reaches the last known token
    num_drafts: np.ndarray  # [num_sampling] int64: drafts verified behind it
    num_tokens: int  # of all requests

    @property
    def max_seq_len(self) -> int:
        """Of any request, an upper bound."""
        return int((self.num_computed + self.query_lens).max())

    @property
    def has_drafts(self) -> bool:
        """Whether any request verifies drafts in this step."""
        return bool(self.num_drafts.any())

    @property
    def logits_request(self) -> np.ndarray:
        """[num_logits] int64: the sampling request (0 .. num_sampling - 1) of each logits row."""
        return np.repeat(np.arange(len(self.sampling)), self.num_drafts + 1)

    @property
    def sampling_request_ids(self) -> list[str]:
        return [self.request_ids[i] for i in self.sampling]

    @property
    def windows(self) -> np.ndarray:
        """[num_reqs + 1] int32: request r owns rows windows[r] .. [r + 1] of the logits."""
        counts = np.zeros(len(self.request_ids) + 1, dtype=np.int32)
        counts[self.sampling + 1] = self.num_drafts + 1
        return counts.cumsum(dtype=np.int32)

    @property
    def query_start_loc(self) -> np.ndarray:
        """[num_reqs + 1] int32: request r owns tokens query_start_loc[r] .. [r + 1]."""
        starts = np.zeros(len(self.request_ids) + 1, dtype=np.int32)
        np.cumsum(self.query_lens, out=starts[1:])
        return starts


@dataclass(frozen=True, slots=True)
class InputBatch:
    """A step on the device, and what the CPU knows of it. Another step may write the tensors anew."""

    host: HostBatch
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


class InputBuilder(Protocol):
    """Lifecycle: one is chosen and built with the runner. Threading: the runner's thread. It waits for nothing."""

    def build(self, plan: SchedulerOutput) -> InputBatch:
        """Reads the rows' state on the device, as it is when this is reached there."""
        ...


def make_input_builder(config: SchedulerConfig, states: RequestStates, blocks: BlockTables) -> InputBuilder:
    if not has_gpu_kernels(states.token_ids.device):
        return HostInputBuilder(states, blocks)
    # Only now: a CPU needs no Triton.
    from penstock.runner.gpu.inputs import GpuInputBuilder

    return GpuInputBuilder(config, states, blocks)


def read_plan(plan: SchedulerOutput, states: RequestStates) -> HostBatch:
    """The plan's counts, by batch row."""
    request_ids = tuple(plan.num_scheduled_tokens)
    rows = np.fromiter((states.row(request_id) for request_id in request_ids), np.int64, len(request_ids))
    query_lens = np.fromiter(plan.num_scheduled_tokens.values(), np.int64, len(request_ids))
    num_computed = states.num_computed_np[rows]
    # A row samples when it has computed all tokens known at its admission: a chunk in the middle of them does not.
    sampling = np.nonzero(num_computed + query_lens >= states.prefill_len_np[rows])[0]
    drafts = plan.num_draft_tokens
    num_drafts = np.fromiter((drafts.get(request_ids[i], 0) for i in sampling), np.int64, len(sampling))
    return HostBatch(request_ids, rows, query_lens, num_computed, sampling, num_drafts, plan.total_num_scheduled_tokens)


class HostInputBuilder:
    """By torch, into fresh tensors (`InputBuilder`)."""

    def __init__(self, states: RequestStates, blocks: BlockTables) -> None:
        self._states = states
        self._blocks = blocks

    def build(self, plan: SchedulerOutput) -> InputBatch:
        states, host = self._states, read_plan(plan, self._states)
        device = states.token_ids.device
        starts = host.query_start_loc
        idx_mapping, query_start_loc = to_device(host.rows, device), to_device(starts, device)
        tokens = expand_tokens(
            idx_mapping, query_start_loc, states.num_computed_exact, states.token_ids, host.num_tokens
        )
        seq_lens = (states.num_computed_exact[idx_mapping, 0] + query_start_loc.diff()).to(torch.int32)
        sampling = to_device(host.sampling, device)
        logits_indices = to_device(_last_tokens(starts[host.sampling + 1], host.num_drafts), device)
        return InputBatch(
            host=host,
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
            attention=self._attention(host, idx_mapping, query_start_loc, seq_lens, tokens),
        )

    def _attention(
        self,
        host: HostBatch,
        idx_mapping: torch.Tensor,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        tokens: TokenInputs,
    ) -> tuple[AttentionMetadata, ...]:
        """One view of the batch per KV group; the tables are cut to the longest row."""
        blocks = self._blocks
        return tuple(
            AttentionMetadata(
                query_start_loc=query_start_loc,
                seq_lens=seq_lens,
                block_table=table[idx_mapping, : int(blocks.num_blocks(group, host.rows).max())],
                slot_mapping=slot_mapping(table, tokens, blocks.block_size),
                max_query_len=int(host.query_lens.max()),
                max_seq_len=host.max_seq_len,
            )
            for group, table in enumerate(blocks.tables)
        )


def _last_tokens(ends: np.ndarray, num_drafts: np.ndarray) -> np.ndarray:
    """[num_logits] int64: of each request whose tokens end at `ends`, the last `1 + num_drafts`."""
    if not num_drafts.any():
        return ends.astype(np.int64) - 1
    counts = num_drafts + 1
    offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(ends.astype(np.int64) - counts, counts) + offsets
