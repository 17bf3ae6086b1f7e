"""A step's results, in one piece of memory and one copy; and log probabilities, whose records it contains."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from msgspec.structs import replace

from penstock.kernels.triton.sampling.logprobs import RECORD, LogprobsWorkspace, score_tokens
from penstock.messages.runner_output import ModelRunnerOutput, TokenLogprobs
from penstock.messages.sampling_params import MAX_LOGPROBS
from penstock.runner.gpu.buffers import Fence, FencedCopy
from penstock.runner.host_batch import HostBatch
from penstock.runner.outputs import SampledArrays, make_empty_output, make_output
from penstock.runner.sampling.logprobs import PendingLogprobs
from penstock.utils.math import round_up


def score(logits: torch.Tensor, chosen: torch.Tensor, num_top: int) -> PendingLogprobs:
    """See `Score`."""
    num_rows, vocab_size = logits.shape
    num_top = min(num_top, vocab_size)
    # Every row uses the single row of the table.
    rows, wanted = torch.zeros_like(chosen), torch.full((1, 1), num_top, dtype=torch.int32, device=logits.device)
    workspace = LogprobsWorkspace.allocate(num_rows, vocab_size, logits.device)
    records = torch.empty((num_rows, RECORD), dtype=torch.int32, device=logits.device)
    score_tokens(logits, rows, wanted, chosen, workspace, num_top > 0, records)
    copied = FencedCopy.of(records)
    return lambda: read_records(copied.wait(), [num_top] * num_rows)


def read_records(records: np.ndarray, num_top: Sequence[int]) -> list[TokenLogprobs]:
    """Decodes `records` [n, RECORD] int32, as written by `score_tokens`, with `num_top` [n] likeliest tokens each."""
    numbers, first, last = records.view(np.float32), 3, 3 + MAX_LOGPROBS
    columns = (numbers[:, 0], records[:, 1:3], records[:, first:last], numbers[:, last:])
    rows = zip(num_top, *(column.tolist() for column in columns), strict=True)
    return [
        TokenLogprobs((token, *ids[:count]), (logprob, *logprobs[:count]), rank)
        for count, logprob, (rank, token), ids, logprobs in rows
    ]


_ALIGNMENT = 8


class Packed:
    """`SampledArrays` with space and counts by request, then the log probabilities' records, which few steps have."""

    def __init__(self, num_logits: int, num_reqs: int, device: torch.device) -> None:
        sizes = (8 * num_logits, 8 * num_reqs, 8 * num_reqs, round_up(num_logits, _ALIGNMENT), 4 * RECORD * num_logits)
        ends = np.cumsum((0, *sizes)).tolist()
        self.places = [slice(start, end) for start, end in itertools.pairwise(ends)]
        self.memory = torch.zeros(ends[-1], dtype=torch.uint8, device=device)
        parts = [self.memory[place] for place in self.places]
        self.token_ids = parts[0].view(torch.int64)  # [num_logits]
        self.num_accepted = parts[1].view(torch.int64)  # [num_reqs]
        self.num_real_drafts = parts[2].view(torch.int64)  # [num_reqs]
        self.verdicts = parts[3].view(torch.int8)  # [at least num_logits]
        self.records = parts[4].view(torch.int32).view(num_logits, RECORD)

    def num_bytes(self, num_records: int) -> int:
        """Returns the size with the first `num_records` records."""
        return self.places[-1].start + 4 * RECORD * num_records


@dataclass(frozen=True, slots=True)
class CopiedOutput:
    """A copy of sampled tokens to the CPU (`PendingOutput`)."""

    host: HostBatch
    num_top: np.ndarray  # [num_sampling] int64: number of likeliest tokens requested, -1: no logprobs at all
    copied: FencedCopy
    packed: Packed

    def result(self) -> ModelRunnerOutput:
        host, memory = self.host, self.copied.wait()
        token_ids, num_accepted, num_real_drafts, verdicts, records = (memory[place] for place in self.packed.places)
        counts = [host.num_drafts] * 2
        if host.has_drafts:
            counts = [each.view(np.int64)[host.sampling] for each in (num_accepted, num_real_drafts)]
        output = make_output(host, SampledArrays(token_ids.view(np.int64), verdicts.view(np.int8), *counts))
        if not len(records):
            return output
        return replace(output, logprobs=self._logprobs(output, records.view(np.int32).reshape(-1, RECORD)))

    def _logprobs(self, output: ModelRunnerOutput, records: np.ndarray) -> dict[str, tuple[TokenLogprobs, ...]]:
        found: dict[str, tuple[TokenLogprobs, ...]] = {}
        starts, names = self.host.window_starts, self.host.sampling_request_ids
        for index in np.nonzero(self.num_top >= 0)[0].tolist():
            count, start = len(output.sampled_token_ids[names[index]]), int(starts[index])
            wanted = [int(self.num_top[index])] * count
            found[names[index]] = tuple(read_records(records[start : start + count], wanted))
        return found


@dataclass(frozen=True, slots=True)
class EmptyOutput:
    """The output of a step without tokens to copy (`PendingOutput`): its KV is in place when its result is returned."""

    host: HostBatch
    fence: Fence

    def result(self) -> ModelRunnerOutput:
        self.fence.wait()
        return make_empty_output(self.host)
