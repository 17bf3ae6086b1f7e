"""Builds the flat inputs of a step from state rows, without a copy to the CPU.

request r of the batch, state row s = idx_mapping[r], n = query_len[r] tokens:

    positions   num_computed[s] .. num_computed[s] + n - 1
    input_ids   token_ids[s, positions]          known and sampled tokens alike
    slots       block_table[s, position // block_size] * block_size + position % block_size
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from penstock.kernels.dispatch import triton_module, uses_triton


@dataclass(frozen=True, slots=True)
class TokenInputs:
    rows: torch.Tensor  # [num_tokens] int64: the state row of each token
    positions: torch.Tensor  # [num_tokens] int64
    input_ids: torch.Tensor  # [num_tokens] int64


def expand_tokens(
    idx_mapping: torch.Tensor,  # [num_reqs] int64
    query_start_loc: torch.Tensor,  # [num_reqs + 1] int32
    num_computed: torch.Tensor,  # [max_num_reqs + 1, 1] int64
    token_ids: torch.Tensor,  # [max_num_reqs + 1, width] int32
    num_tokens: int,
) -> TokenInputs:
    """One entry per token of the step, request by request."""
    query_lens = query_start_loc.diff()
    request = torch.repeat_interleave(query_lens, output_size=num_tokens)
    rows = idx_mapping[request]
    offset = torch.arange(num_tokens, device=rows.device) - query_start_loc[request]
    positions = num_computed[rows, 0] + offset
    return TokenInputs(rows, positions, token_ids[rows, positions].long())


def slot_mapping(block_table: torch.Tensor, inputs: TokenInputs, block_size: int) -> torch.Tensor:
    """[num_tokens] int64: where each token's keys and values are stored."""
    block_ids = block_table[inputs.rows, inputs.positions // block_size]
    return block_ids.long() * block_size + inputs.positions % block_size


def store_sampled(
    sampled: torch.Tensor,  # [num_sampling] int64
    rows: torch.Tensor,  # [num_sampling] int64: state rows
    positions: torch.Tensor,  # [num_sampling] int64: the positions of the sampled tokens
    token_ids: torch.Tensor,  # [max_num_reqs + 1, width] int32, written
) -> None:
    """Appends the sampled tokens to their rows for the next step."""
    token_ids[rows, positions] = sampled.to(token_ids.dtype)


def store_drafts(
    proposed: torch.Tensor,  # [num_sampling, K] int64, -1 a gap
    rows: torch.Tensor,  # [num_sampling] int64: state rows
    num_computed: torch.Tensor,  # [max_num_reqs + 1, 1] int64; one more token is known
    drafts: torch.Tensor,  # [max_num_reqs + 1, at least K] int64, written
    token_ids: torch.Tensor,  # [max_num_reqs + 1, width] int32, written
) -> None:
    """Stores drafts for verification, and after the last known tokens, where a gap becomes token 0."""
    if uses_triton(proposed):
        triton_module("prepare_inputs").store_drafts(proposed, rows, num_computed, drafts, token_ids)
        return
    count = proposed.shape[1]
    drafts[rows, :count] = proposed
    places = num_computed[rows] + 1 + torch.arange(count, device=rows.device)
    token_ids[rows[:, None], places] = proposed.clamp(min=0).to(token_ids.dtype)
