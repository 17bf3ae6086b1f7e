"""One step's batch: which rows run, how many tokens each, and which of them sample."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from penstock.attention.metadata import AttentionMetadata
from penstock.kernels.prepare_inputs import TokenInputs, expand_tokens, slot_mapping
from penstock.messages.scheduler_output import SchedulerOutput
from penstock.runner.block_tables import BlockTables
from penstock.runner.buffers import to_device
from penstock.runner.request_states import RequestStates


@dataclass(frozen=True, slots=True)
class InputBatch:
    """`*_np` arrays are what the CPU knows; tensors are on the device. Requests stand in the scheduler's order."""

    request_ids: tuple[str, ...]
    rows_np: np.ndarray  # [num_reqs] int64: state row of each request
    query_lens_np: np.ndarray  # [num_reqs] int64: tokens computed in this step
    num_computed_np: np.ndarray  # [num_reqs] int64: the scheduler's count before this step
    sampling_np: np.ndarray  # [num_sampling] int64: batch rows whose step reaches the last known token
    num_drafts_np: np.ndarray  # [num_sampling] int64: drafts verified behind it
    logits_request_np: np.ndarray  # [num_logits] int64: the sampling request (0 .. num_sampling - 1) of each logits row
    idx_mapping: torch.Tensor  # [num_reqs] int64: rows_np on the device
    query_start_loc: torch.Tensor  # [num_reqs + 1] int32
    seq_lens: torch.Tensor  # [num_reqs] int32: exact
    tokens: TokenInputs
    logits_indices: torch.Tensor  # [num_logits] int64: each sampling request's last known token, then its drafts
    num_blocks_np: tuple[np.ndarray, ...]  # per group [num_reqs] int64

    @property
    def max_seq_len(self) -> int:
        """Of any request, an upper bound."""
        return int((self.num_computed_np + self.query_lens_np).max())

    @property
    def has_drafts(self) -> bool:
        """Whether any request verifies drafts in this step."""
        return len(self.logits_request_np) > len(self.sampling_np)

    @property
    def sampling_request_ids(self) -> list[str]:
        return [self.request_ids[i] for i in self.sampling_np]


def make_input_batch(plan: SchedulerOutput, states: RequestStates, blocks: BlockTables) -> InputBatch:
    """Reads the rows' state on the device; waits for nothing."""
    request_ids = tuple(plan.num_scheduled_tokens)
    rows = np.fromiter((states.row(request_id) for request_id in request_ids), np.int64, len(request_ids))
    query_lens = np.fromiter(plan.num_scheduled_tokens.values(), np.int64, len(request_ids))
    query_start_loc_np = np.zeros(len(request_ids) + 1, dtype=np.int32)
    np.cumsum(query_lens, out=query_start_loc_np[1:])
    num_computed = states.num_computed_np[rows]
    # A row samples when it has computed all tokens known at its admission: a chunk in the middle of them does not.
    sampling = np.nonzero(num_computed + query_lens >= states.prefill_len_np[rows])[0]
    drafts = plan.num_draft_tokens
    num_drafts = np.fromiter((drafts.get(request_ids[i], 0) for i in sampling), np.int64, len(sampling))
    logits_request = np.repeat(np.arange(len(sampling)), num_drafts + 1)
    device = states.token_ids.device
    idx_mapping = to_device(rows, device)
    query_start_loc = to_device(query_start_loc_np, device)
    tokens = expand_tokens(
        idx_mapping, query_start_loc, states.num_computed_exact, states.token_ids, plan.total_num_scheduled_tokens
    )
    seq_lens = states.num_computed_exact[idx_mapping, 0] + query_start_loc.diff()
    return InputBatch(
        request_ids=request_ids,
        rows_np=rows,
        query_lens_np=query_lens,
        num_computed_np=num_computed,
        sampling_np=sampling,
        num_drafts_np=num_drafts,
        logits_request_np=logits_request,
        idx_mapping=idx_mapping,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens.to(torch.int32),
        tokens=tokens,
        logits_indices=to_device(_last_tokens(query_start_loc_np[sampling + 1], num_drafts), device),
        num_blocks_np=tuple(blocks.num_blocks(group, rows) for group in range(len(blocks.tables))),
    )


def _last_tokens(ends: np.ndarray, num_drafts: np.ndarray) -> np.ndarray:
    """[num_logits] int64: of each request whose tokens end at `ends`, the last `1 + num_drafts`."""
    if not num_drafts.any():
        return ends.astype(np.int64) - 1
    counts = num_drafts + 1
    offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(ends.astype(np.int64) - counts, counts) + offsets


def make_attention_metadata(batch: InputBatch, blocks: BlockTables) -> list[AttentionMetadata]:
    """One view of the batch per KV group; the tables are cut to the longest row."""
    return [
        AttentionMetadata(
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            block_table=table[batch.idx_mapping, : int(num_blocks.max())],
            slot_mapping=slot_mapping(table, batch.tokens, blocks.block_size),
            max_query_len=int(batch.query_lens_np.max()),
            max_seq_len=batch.max_seq_len,
        )
        for table, num_blocks in zip(blocks.tables, batch.num_blocks_np, strict=True)
    ]
