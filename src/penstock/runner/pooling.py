"""The work of a rank after the model's pass in a pooling engine: a vector for every prompt that the step completes.

    last stage       copy the hidden states that the vectors need; one of its ranks returns the vectors, or a
                     classifier's results for them
    earlier stages   nothing: no later step needs the last stage's results

Every rank answers every step with its connector's report. A vector is float32 and a function of its request's own
hidden states alone, in a fixed order on the CPU: neither the batch nor the device's order of additions changes a bit.
The state of a last token is the same however its prompt was divided into chunks. A mean over all tokens, and the state
of the first one, are taken only of prompts that one step computes whole (`PoolingConfig.needs_whole_prompts`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from msgspec.structs import replace

from penstock.messages.requests import RowRequest
from penstock.messages.runner_output import ModelRunnerOutput
from penstock.messages.scheduler_output import GrammarOutput, SchedulerOutput
from penstock.models.pooling_head import PoolingHead
from penstock.runner.buffers import HostCopy, to_device
from penstock.runner.host_batch import HostBatch
from penstock.runner.outputs import StepOutput, check_chunks, make_empty_output
from penstock.runner.request_states import RequestStates
from penstock.runner.step_end import ExecuteModelState

NOT_FINITE = "no vector can be made: the hidden states are not finite"


@dataclass(frozen=True, eq=False)
class PoolingEnd:
    """Used by every stage (`StepEnd`). `is_reported` is true on the single rank that reports the vectors."""

    method: str  # one of `METHODS` in `penstock.config.sentence_transformers`
    head: PoolingHead | None
    states: RequestStates
    copy_to_host: Callable[[torch.Tensor], HostCopy]
    is_reported: bool
    runs_ahead: bool

    def add(self, row: int, request: RowRequest) -> None:
        """No parameters are kept here: the front end applies the caller's options to the vector."""

    def remove(self, rows: Iterable[int]) -> None: ...

    def prepare(self, plan: SchedulerOutput) -> None:
        """Nothing to prepare: a step reads only prompts."""

    def finish(self, state: ExecuteModelState, grammars: GrammarOutput) -> StepOutput | None:
        tensors = state.batch.tensors
        self.states.num_computed_exact[tensors.idx_mapping, 0] = tensors.seq_lens.long()
        if not self.is_reported:
            return None
        parts = check_chunks(state.batch.host, state.output.hidden, self.copy_to_host, NOT_FINITE)
        return StepOutput(self.pool(state), parts)

    def pool(self, state: ExecuteModelState) -> PooledOutput:
        """Copies the hidden states that the vectors need; [0, hidden_size] in a step that completes no prompt."""
        host, hidden = state.batch.host, state.output.hidden
        if self.method == "last":
            places, lengths = state.batch.tensors.logits_indices, np.ones(len(host.sampling), np.int64)
        else:
            places, lengths = self._places(host)
        # Every narrower type converts to float32 exactly.
        return PooledOutput(host, lengths, self.copy_to_host(hidden[places].float()), self.head)

    def _places(self, host: HostBatch) -> tuple[torch.Tensor, np.ndarray]:
        """Returns which hidden states are needed of prompts that this step computes whole, and how many of each."""
        starts = host.query_start_loc.astype(np.int64)
        firsts, ends = starts[:-1][host.sampling], starts[1:][host.sampling]
        if self.method == "cls":
            ends = firsts + 1
        places = np.concatenate([firsts[:0], *map(np.arange, firsts, ends)])
        return to_device(places, self.states.token_ids.device), ends - firsts


@dataclass(frozen=True, slots=True)
class PooledOutput:
    """A copy of vectors to the CPU (`PendingOutput`). The step's KV is in place when it is complete."""

    host: HostBatch
    lengths: np.ndarray  # [num_sampling] int64: rows of `hidden` that belong to each request
    hidden: HostCopy  # [sum of lengths, hidden_size] float32
    head: PoolingHead | None

    def result(self) -> ModelRunnerOutput:
        hidden = self.hidden()
        pooled: dict[str, np.ndarray] = {}
        failed: dict[str, str] = {}
        end = 0
        for request_id, length in zip(self.host.sampling_request_ids, self.lengths.tolist(), strict=True):
            start, end = end, end + length
            vector = mean(hidden[start:end])
            if self.head is not None:
                vector = self.head(vector)
            if np.isfinite(vector).all():
                pooled[request_id] = vector
            else:
                failed[request_id] = NOT_FINITE
        return replace(make_empty_output(self.host), pooled=pooled, failed_requests=failed)


def mean(rows: np.ndarray) -> np.ndarray:
    """[n, width] float32 -> [width] float32, summed in float64: a function of these rows alone."""
    return rows[0].copy() if len(rows) == 1 else rows.mean(0, dtype=np.float64).astype(np.float32)
