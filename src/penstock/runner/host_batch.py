"""What the CPU knows of a step: which rows run, how many tokens each, and which of them sample."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.messages.scheduler_output import SchedulerOutput
from penstock.runner.request_states import RequestStates


@dataclass(frozen=True, slots=True)
class HostBatch:
    """Requests stand in the scheduler's order."""

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
    def max_query_len(self) -> int:
        """Of any request."""
        return int(self.query_lens.max())

    @property
    def num_logits(self) -> int:
        """Tokens that are sampled from."""
        return len(self.sampling) + int(self.num_drafts.sum())

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


def blank_batch(num_reqs: int, query_len: int) -> HostBatch:
    """Requests that are nobody's, each of which verifies drafts in all of its tokens but the first."""
    requests = np.arange(num_reqs)
    drafts = np.full(num_reqs, query_len - 1)
    nothing = np.zeros(num_reqs, dtype=np.int64)
    return HostBatch(("",) * num_reqs, nothing - 1, drafts + 1, nothing, requests, drafts, num_reqs * query_len)
