"""The CPU's data of a step: which rows run, how many tokens each, and which of them sample. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from penstock.messages.scheduler_output import SchedulerOutput
from penstock.runner.rows import Rows


@dataclass(frozen=True)
class HostBatch:
    """Requests are in the scheduler's order."""

    request_ids: tuple[str, ...]
    rows: np.ndarray  # [num_reqs] int64: state row of each request
    query_lens: np.ndarray  # [num_reqs] int64: tokens computed in this step
    num_computed_upper_bound: np.ndarray  # [num_reqs] int64: the scheduler's count before this step
    sampling: np.ndarray  # [num_sampling] int64: batch rows whose step reaches the last known token
    num_drafts: np.ndarray  # [num_sampling] int64: drafts verified after it
    num_tokens: int  # of all requests

    @cached_property
    def max_seq_len(self) -> int:
        """The maximum of all requests, an upper bound."""
        return int((self.num_computed_upper_bound + self.query_lens).max())

    @cached_property
    def max_query_len(self) -> int:
        """The maximum of all requests."""
        return 1 if self.num_tokens == len(self.rows) else int(self.query_lens.max())

    @cached_property
    def has_drafts(self) -> bool:
        """Whether any request verifies drafts in this step."""
        return self.max_query_len > 1 and bool(self.num_drafts.any())

    @cached_property
    def num_logits(self) -> int:
        """The number of tokens that are sampled from."""
        return len(self.sampling) + (int(self.num_drafts.sum()) if self.has_drafts else 0)

    @property
    def logits_request(self) -> np.ndarray:
        """[num_logits] int64: the sampling request (0 .. num_sampling - 1) of each logits row."""
        return np.repeat(np.arange(len(self.sampling)), self.num_drafts + 1)

    @cached_property
    def sampling_rows(self) -> np.ndarray:
        """[num_sampling] int64: state row of each request that samples."""
        return self.rows[self.sampling]

    @cached_property
    def sampling_request_ids(self) -> list[str]:
        if len(self.sampling) == len(self.request_ids):
            return list(self.request_ids)
        return [self.request_ids[i] for i in self.sampling]

    @cached_property
    def query_start_loc(self) -> np.ndarray:
        """[num_reqs + 1] int32: request r owns tokens query_start_loc[r] .. [r + 1]."""
        if self.max_query_len == 1:
            return np.arange(len(self.rows) + 1, dtype=np.int32)
        starts = np.zeros(len(self.rows) + 1, dtype=np.int32)
        np.cumsum(self.query_lens, out=starts[1:])
        return starts

    @cached_property
    def windows(self) -> np.ndarray:
        """[num_reqs + 1] int32: request r owns rows windows[r] .. [r + 1] of the logits."""
        if self.num_logits == self.num_tokens:
            return self.query_start_loc
        counts = np.zeros(len(self.rows) + 1, dtype=np.int32)
        counts[self.sampling + 1] = self.num_drafts + 1
        return counts.cumsum(dtype=np.int32)

    @cached_property
    def window_starts(self) -> np.ndarray:
        """[num_sampling] int32: the first row of the logits of each sampling request."""
        return self.windows[self.sampling]


def read_plan(plan: SchedulerOutput, state_rows: Rows) -> HostBatch:
    """Returns the plan's counts by batch row; `state_rows` must already reflect the plan."""
    request_ids, num_tokens = tuple(plan.num_scheduled_tokens), plan.total_num_scheduled_tokens
    count = len(request_ids)
    rows = state_rows.rows(request_ids)
    query_lens = np.fromiter(plan.num_scheduled_tokens.values(), np.int64, count)
    num_computed = np.fromiter(plan.num_computed_tokens, np.int64, count)
    # A row samples if it computes the last token known at its admission: an earlier chunk of a prompt does not.
    sampling = np.nonzero(num_computed + query_lens >= state_rows.prefill_len[rows])[0]
    num_drafts = np.zeros(len(sampling), dtype=np.int64)
    if plan.num_draft_tokens:
        num_drafts[:] = [plan.num_draft_tokens.get(request_ids[i], 0) for i in sampling]
    return HostBatch(request_ids, rows, query_lens, num_computed, sampling, num_drafts, num_tokens)


def blank_batch(num_reqs: int, num_tokens: int, query_len: int) -> HostBatch:
    """Returns padding only: requests without a state row, each of which verifies `query_len - 1` drafts."""
    nothing = np.zeros(num_reqs, dtype=np.int64)
    drafts = nothing + (query_len - 1)
    return HostBatch(("",) * num_reqs, nothing - 1, drafts + 1, nothing, np.arange(num_reqs), drafts, num_tokens)
