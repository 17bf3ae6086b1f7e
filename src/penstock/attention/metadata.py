"""The data of a step that attention needs, besides the queries themselves."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """One KV group's view of the batch. Padding: query length 0, `seq_lens` 0, block row 0, slot -1.

    Every step has a new one, even if it is written into the tensors of the last: a backend may cache what it derives
    from one until it gets another.
    """

    query_start_loc: torch.Tensor  # [num_reqs + 1] int32: request r owns rows query_start_loc[r] .. [r + 1]
    seq_lens: torch.Tensor  # [num_reqs] int32: tokens in the cache once this step's are stored
    block_table: torch.Tensor  # [num_reqs, max_blocks] int32
    slot_mapping: torch.Tensor  # [num_tokens] int64: block_id * block_size + offset, where a token's KV is stored
    max_query_len: int  # of a request, an upper bound
    max_seq_len: int  # an upper bound
