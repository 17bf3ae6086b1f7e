"""A step's inputs in buffers of fixed addresses: one copy from the CPU and two launches, whatever the batch."""

from __future__ import annotations

import numpy as np
import torch

from penstock.attention.metadata import AttentionMetadata
from penstock.config.engine import SchedulerConfig
from penstock.kernels.prepare_inputs import TokenInputs
from penstock.kernels.triton.prepare_inputs import SamplingInputs, StepInputs, prepare_inputs, prepare_sampling
from penstock.messages.scheduler_output import SchedulerOutput
from penstock.runner.block_tables import BlockTables
from penstock.runner.gpu.buffers import PinnedRing
from penstock.runner.input_batch import HostBatch, InputBatch, read_plan
from penstock.runner.request_states import RequestStates
from penstock.utils.math import round_up

_ALIGNMENT = 16
_WIDE = ("idx_mapping", "sampling", "sampling_rows")  # [max_num_reqs] int64
_NARROW = ("query_start_loc", "windows")  # [max_num_reqs + 1] int32


class Snapshot:
    """What the CPU tells the device of a step: arrays in one piece of memory, named as in `InputBatch`."""

    def __init__(self, max_num_reqs: int, depth: int, device: torch.device) -> None:
        wide, narrow = round_up(8 * max_num_reqs, _ALIGNMENT), round_up(4 * (max_num_reqs + 1), _ALIGNMENT)
        self._places = {name: slice(i * wide, (i + 1) * wide) for i, name in enumerate(_WIDE)}
        first = len(_WIDE) * wide
        self._places |= {name: slice(first + i * narrow, first + (i + 1) * narrow) for i, name in enumerate(_NARROW)}
        self._num_bytes = first + len(_NARROW) * narrow
        self._ring = PinnedRing(self._num_bytes, depth + 1, device)
        self._memory = torch.zeros(self._num_bytes, dtype=torch.uint8, device=device)
        self._tensors = {
            name: self._memory[place].view(torch.int64 if name in _WIDE else torch.int32)
            for name, place in self._places.items()
        }

    def publish(self, arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
        """The arrays on the device, until the next call."""
        memory = self._ring.open(self._num_bytes)
        for name, array in arrays.items():
            memory[self._places[name]].view(np.int64 if name in _WIDE else np.int32)[: len(array)] = array
        self._ring.copy(self._num_bytes, self._memory)
        return {name: self._tensors[name][: len(array)] for name, array in arrays.items()}


class GpuInputBuilder:
    """By Triton, into views of buffers that are as large as any step (`InputBuilder`)."""

    def __init__(self, config: SchedulerConfig, states: RequestStates, blocks: BlockTables) -> None:
        device = states.token_ids.device
        num_reqs, num_tokens = config.max_num_seqs, config.max_num_batched_tokens
        num_logits = num_reqs * (1 + config.max_num_drafts)
        self._states = states
        self._blocks = blocks
        self._snapshot = Snapshot(num_reqs, config.max_num_in_flight, device)

        def empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        num_groups = len(blocks.tables)
        self._step = StepInputs(
            rows=empty(num_tokens),
            positions=empty(num_tokens),
            input_ids=empty(num_tokens),
            seq_lens=empty(num_reqs, dtype=torch.int32),
            block_tables=torch.zeros_like(blocks.tables),
            slot_mapping=empty(num_groups, num_tokens),
        )
        self._sampling = SamplingInputs(rows=empty(num_logits), positions=empty(num_logits), indices=empty(num_logits))

    def build(self, plan: SchedulerOutput) -> InputBatch:
        states, host = self._states, read_plan(plan, self._states)
        windows = host.windows
        known = self._snapshot.publish(
            {
                "idx_mapping": host.rows,
                "sampling": host.sampling,
                "sampling_rows": host.rows[host.sampling],
                "query_start_loc": host.query_start_loc,
                "windows": windows,
            }
        )
        step, sampling = self._views(len(host.rows), host.num_tokens, int(windows[-1]))
        idx_mapping, query_start_loc = known["idx_mapping"], known["query_start_loc"]
        prepare_inputs(
            idx_mapping,
            query_start_loc,
            states.num_computed_exact,
            states.token_ids,
            self._blocks.tables,
            self._blocks.block_size,
            step,
        )
        prepare_sampling(idx_mapping, query_start_loc, known["windows"], step.seq_lens, sampling)
        return InputBatch(
            host=host,
            seq_lens=step.seq_lens,
            tokens=TokenInputs(step.rows, step.positions, step.input_ids),
            logits_indices=sampling.indices,
            logits_rows=sampling.rows,
            logits_positions=sampling.positions,
            attention=_attention(host, query_start_loc, step),
            **known,
        )

    def _views(self, num_reqs: int, num_tokens: int, num_logits: int) -> tuple[StepInputs, SamplingInputs]:
        whole, sampling = self._step, self._sampling
        assert num_tokens <= len(whole.rows), f"{num_tokens} tokens in buffers for {len(whole.rows)}"
        assert num_logits <= len(sampling.rows), f"{num_logits} rows of logits in buffers for {len(sampling.rows)}"
        step = StepInputs(
            rows=whole.rows[:num_tokens],
            positions=whole.positions[:num_tokens],
            input_ids=whole.input_ids[:num_tokens],
            seq_lens=whole.seq_lens[:num_reqs],
            block_tables=whole.block_tables[:, :num_reqs],
            slot_mapping=whole.slot_mapping[:, :num_tokens],
        )
        return step, SamplingInputs(
            rows=sampling.rows[:num_logits],
            positions=sampling.positions[:num_logits],
            indices=sampling.indices[:num_logits],
        )


def _attention(host: HostBatch, query_start_loc: torch.Tensor, step: StepInputs) -> tuple[AttentionMetadata, ...]:
    max_query_len, max_seq_len = int(host.query_lens.max()), host.max_seq_len
    return tuple(
        AttentionMetadata(query_start_loc, step.seq_lens, table, slots, max_query_len, max_seq_len)
        for table, slots in zip(step.block_tables, step.slot_mapping, strict=True)
    )
