"""The model's pass in an engine with an encoder: it computes whole prompts, and keeps no KV of them.

The keys and values of a step's prompts are written to consecutive blocks of a workspace. Every layer overwrites them
and reads them back in the same call, so that the scheduler allocates no blocks.
"""

from __future__ import annotations

import numpy as np
import torch

from penstock.attention.backend import AttentionBackend, AttentionMetadata
from penstock.attention.forward_context import ForwardContext
from penstock.config.engine import SchedulerConfig
from penstock.layers.attention import WORKSPACE
from penstock.models.encoder import Encoder
from penstock.models.interface import ModelOutput
from penstock.runner.buffers import to_device
from penstock.runner.host_batch import HostBatch
from penstock.runner.input_batch import InputBatch, InputBuilder
from penstock.runner.rows import Rows
from penstock.utils.errors import ConfigError

_BLOCK_SIZE = 16


class EncoderPass:
    """The part of `Passes` that every stage has. Raises ConfigError if the attention backend has no encoders."""

    def __init__(
        self, model: Encoder, attention: AttentionBackend, inputs: InputBuilder, rows: Rows, limits: SchedulerConfig
    ) -> None:
        if not attention.runs_encoders:
            raise ConfigError("an encoder runs on a CPU with its native attention only: set device=cpu")
        self._model = model
        self._attention = attention
        self._inputs = inputs
        self._rows = rows
        plane, *_ = model.workspace_spec.planes
        words = model.words
        # The last block of every prompt may hold a single token.
        num_blocks = limits.max_num_batched_tokens // _BLOCK_SIZE + limits.max_num_seqs
        shape = (num_blocks, len(model.workspace_spec.planes), plane.num_heads, _BLOCK_SIZE, plane.head_size)
        self._workspace = torch.empty(shape, dtype=words.dtype, device=words.weight.device)

    def forward(self, batch: InputBatch) -> ModelOutput:
        """See `Passes.forward`."""
        self._inputs.prepare(batch)
        tokens, host = batch.tensors.tokens, batch.host
        assert not host.num_computed_upper_bound.any(), "an encoder's prompt was divided into steps"
        context = ForwardContext({WORKSPACE: self._lay_out(batch)}, {WORKSPACE: self._workspace}, self._attention)
        types = self._token_types(host, tokens.positions)
        return self._model.encode(tokens.input_ids, types, tokens.positions, context)

    def _lay_out(self, batch: InputBatch) -> AttentionMetadata:
        """Assigns each prompt the blocks after those of the previous prompt."""
        host, tensors = batch.host, batch.tensors
        num_blocks = -(-host.query_lens // _BLOCK_SIZE)
        firsts = num_blocks.cumsum() - num_blocks
        first_of_token = np.repeat(firsts, host.query_lens)
        device = tensors.query_start_loc.device
        table = firsts[:, None] + np.arange(num_blocks.max())
        return AttentionMetadata(
            query_start_loc=tensors.query_start_loc,
            seq_lens=tensors.seq_lens,
            # Entries after a prompt's own blocks are never used.
            block_table=to_device(table.astype(np.int32), device),
            slot_mapping=to_device(first_of_token, device) * _BLOCK_SIZE + tensors.tokens.positions,
            max_query_len=host.max_query_len,
            max_seq_len=host.max_seq_len,
        )

    def _token_types(self, host: HostBatch, positions: torch.Tensor) -> torch.Tensor:
        """Returns [num_tokens] int64: 1 in the second text of a pair."""
        starts = self._rows.second_text_start[host.rows]
        if not starts.any():
            return torch.zeros_like(positions)
        of_token = np.repeat(np.where(starts > 0, starts, np.iinfo(np.int64).max), host.query_lens)
        return (positions >= to_device(of_token, positions.device)).long()
