"""A step's results, in one piece of memory and one copy."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch
from msgspec.structs import replace

from penstock.kernels.triton.sampling.logprobs import RECORD
from penstock.messages.runner_output import ModelRunnerOutput, TokenLogprobs
from penstock.runner.gpu.buffers import Fence, FencedCopy
from penstock.runner.gpu.sampling.logprobs import read_records
from penstock.runner.host_batch import HostBatch
from penstock.runner.outputs import SampledArrays, make_empty_output, make_output
from penstock.utils.math import round_up

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
