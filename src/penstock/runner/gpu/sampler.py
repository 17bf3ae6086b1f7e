"""The end of a step without a word from the device: tokens are drawn, judged and stored by Triton's kernels, and copied
back while the CPU goes on.

That covers requests that need a temperature, a seed, top_k, top_p and min_p, which is most of them. A step with a
request that needs more, or with a grammar, takes the general path, which waits for the device.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import torch

from penstock.config.engine import SchedulerConfig
from penstock.kernels.triton.prepare_inputs import finish_step
from penstock.kernels.triton.sampling.draw import sample
from penstock.kernels.triton.sampling.tiles import SamplingTables, Workspace
from penstock.kernels.triton.sampling.verify import verify
from penstock.messages.requests import EngineRequest
from penstock.messages.runner_output import ModelRunnerOutput
from penstock.messages.scheduler_output import GrammarOutput
from penstock.runner.buffers import TableWriter
from penstock.runner.gpu.buffers import Fence
from penstock.runner.input_batch import HostBatch, InputBatch
from penstock.runner.outputs import PendingOutput, SampledArrays, make_empty_output, make_output
from penstock.runner.request_states import RequestStates
from penstock.runner.sampling.noise import Purpose
from penstock.runner.sampling.sampler import changes_logits
from penstock.runner.speculation.verify import Verifier
from penstock.runner.step_sampler import TorchStepSampler

_SMALLEST_TEMPERATURE = 1e-6  # of requests that are not greedy


class SamplingRows:
    """Sampling parameters by state row, and which rows need what."""

    def __init__(self, max_num_reqs: int, vocab_size: int, device: torch.device, writer: TableWriter) -> None:
        self._vocab_size = vocab_size
        self._writer = writer

        def table(dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros((max_num_reqs, 1), dtype=dtype, device=device)

        self.tables = SamplingTables(
            temperature=table(torch.float32),
            top_k=table(torch.int32),
            top_p=table(torch.float32),
            log_min_p=table(torch.float32),
            seed=table(torch.int64),
        )
        self._is_plain = np.zeros(max_num_reqs, dtype=bool)
        self._truncates = np.zeros(max_num_reqs, dtype=bool)

    def add(self, row: int, request: EngineRequest) -> None:
        params, tables, write = request.sampling_params, self.tables, self._writer.write
        top_k = params.top_k if 0 < params.top_k < self._vocab_size else 0
        log_min_p = math.log(params.min_p) if params.min_p > 0 else -math.inf
        self._is_plain[row] = params.logprobs is None and not changes_logits(request)
        self._truncates[row] = not params.is_greedy and (top_k > 0 or params.top_p < 1 or params.min_p > 0)
        write(
            tables.temperature, row, 0, (0.0 if params.is_greedy else max(params.temperature, _SMALLEST_TEMPERATURE),)
        )
        write(tables.top_k, row, 0, (top_k,))
        write(tables.top_p, row, 0, (params.top_p,))
        write(tables.log_min_p, row, 0, (log_min_p,))
        write(tables.seed, row, 0, ((request.seed + 2**63) % 2**64 - 2**63,))

    def are_plain(self, rows: np.ndarray) -> bool:
        """Whether these rows' requests need nothing but the tables."""
        return bool(self._is_plain[rows].all())

    def truncate(self, rows: np.ndarray) -> bool:
        """Whether any of these rows' requests has top_k, top_p or min_p."""
        return bool(self._truncates[rows].any())


class _Packed:
    """What comes back of a step, in one piece of memory: `SampledArrays` with room, and counts by request."""

    def __init__(self, num_logits: int, num_reqs: int, memory: torch.Tensor) -> None:
        """`memory` [num_bytes(...)] uint8."""
        ends = np.cumsum((0, 8 * num_logits, 8 * num_reqs, 8 * num_reqs, num_logits)).tolist()
        parts = [memory[start:end] for start, end in itertools.pairwise(ends)]
        self.token_ids = parts[0].view(torch.int64)  # [num_logits]
        self.num_accepted = parts[1].view(torch.int64)  # [num_reqs]
        self.num_real_drafts = parts[2].view(torch.int64)  # [num_reqs]
        self.is_valid = parts[3].view(torch.bool)  # [num_logits]

    @staticmethod
    def num_bytes(num_logits: int, num_reqs: int) -> int:
        return 9 * num_logits + 16 * num_reqs


@dataclass(frozen=True, slots=True)
class CopiedOutput:
    """Tokens on their way to the CPU (`PendingOutput`)."""

    host: HostBatch
    sampled: _Packed  # in pinned memory that nobody else has
    fence: Fence  # behind the copy

    def result(self) -> ModelRunnerOutput:
        self.fence.wait()
        host, sampled = self.host, self.sampled
        if host.has_drafts:
            num_accepted = sampled.num_accepted.numpy()[host.sampling]
            num_real_drafts = sampled.num_real_drafts.numpy()[host.sampling]
        else:
            num_accepted = num_real_drafts = np.zeros(len(host.sampling), dtype=np.int64)
        arrays = SampledArrays(sampled.token_ids.numpy(), sampled.is_valid.numpy(), num_accepted, num_real_drafts)
        return make_output(host, arrays)


@dataclass(frozen=True, slots=True)
class EmptyOutput:
    """Of a step without tokens to copy (`PendingOutput`): its KV is in place when its result is there."""

    host: HostBatch
    fence: Fence

    def result(self) -> ModelRunnerOutput:
        self.fence.wait()
        return make_empty_output(self.host)


class GpuStepSampler:
    """See the module (`StepSampler`)."""

    runs_ahead = True

    def __init__(
        self,
        config: SchedulerConfig,
        vocab_size: int,
        states: RequestStates,
        writer: TableWriter,
        verifier: Verifier,
        general: TorchStepSampler,
    ) -> None:
        device = states.token_ids.device
        self._device = device
        self._states = states
        self._general = general
        self._samples_alone = verifier.samples_alone
        self._rows = SamplingRows(config.max_num_seqs, vocab_size, device, writer)
        self._shape = (config.max_num_seqs * (1 + config.max_num_drafts), config.max_num_seqs)
        self._workspace = Workspace.allocate(self._shape[0], vocab_size, device)
        self._memory = torch.zeros(_Packed.num_bytes(*self._shape), dtype=torch.uint8, device=device)
        self._sampled = _Packed(*self._shape, self._memory)

    def add(self, row: int, request: EngineRequest) -> None:
        self._general.add(row, request)
        self._rows.add(row, request)

    def skip(self, batch: InputBatch) -> PendingOutput:
        self._finish(batch)
        return EmptyOutput(batch.host, self._fence())

    def sample(self, logits: torch.Tensor, batch: InputBatch, grammars: GrammarOutput) -> PendingOutput:
        host, num_reqs = batch.host, len(batch.host.rows)
        rows = host.rows[host.sampling]
        if grammars.bitmasks or not self._samples_alone or not self._rows.are_plain(rows):
            return self._general.sample(logits, batch, grammars)
        sampled = self._sampled
        token_ids = sampled.token_ids[: len(logits)]
        sample(
            logits,
            batch.logits_rows,
            batch.logits_positions,
            self._rows.tables,
            self._workspace,
            int(Purpose.SAMPLE),
            self._rows.truncate(rows),
            token_ids,
            sampled.is_valid[: len(logits)],
        )
        if host.has_drafts:
            counts = (sampled.num_accepted[:num_reqs], sampled.num_real_drafts[:num_reqs])
            verify(token_ids, self._states.drafts, batch.idx_mapping, batch.windows, *counts)
        self._finish(batch)
        return self._copy(host)

    def _finish(self, batch: InputBatch) -> None:
        states, sampled = self._states, self._sampled
        finish_step(
            sampled.token_ids,
            batch.windows,
            sampled.num_accepted[: len(batch.host.rows)],
            batch.idx_mapping,
            batch.seq_lens,
            states.num_computed_exact,
            states.token_ids,
        )

    def _copy(self, host: HostBatch) -> CopiedOutput:
        # Torch's pool of pinned memory gives none away that a copy may still write to.
        memory = torch.empty(len(self._memory), dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        memory.copy_(self._memory, non_blocking=True)
        return CopiedOutput(host, _Packed(*self._shape, memory), self._fence())

    def _fence(self) -> Fence:
        fence = Fence(self._device)
        fence.record()
        return fence
