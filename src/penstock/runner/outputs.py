"""From what a step sampled to what the scheduler is told, at once or when somebody asks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from penstock.messages.runner_output import ModelRunnerOutput
from penstock.runner.host_batch import HostBatch

NOT_FINITE = "no token can be drawn: the logits are not finite"
NOTHING_ALLOWED = (
    "no token can be drawn: what the request allows (a grammar, allowed_token_ids, ...) excludes all of them"
)


class PendingOutput(Protocol):
    """A step that was launched. It needs nothing of the runner any more."""

    def result(self) -> ModelRunnerOutput:
        """Waits for the step. Whoever asks may be another thread, and asks once."""
        ...


@dataclass(frozen=True, slots=True)
class ReadyOutput:
    output: ModelRunnerOutput

    def result(self) -> ModelRunnerOutput:
        return self.output


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What was sampled, with what the CPU knows of the step beside it."""

    sampled: PendingOutput
    known: ModelRunnerOutput

    def result(self) -> ModelRunnerOutput:
        return replace(
            self.sampled.result(),
            num_proposed_tokens=self.known.num_proposed_tokens,
            draft_token_ids=self.known.draft_token_ids,
            prompt_logprobs=self.known.prompt_logprobs,
            kv_connector_output=self.known.kv_connector_output,
        )


@dataclass(frozen=True, slots=True)
class SampledArrays:
    """What was sampled, on the CPU. Of each window the tokens up to the one behind the accepted drafts are meant."""

    token_ids: np.ndarray  # [num_logits] int64
    is_valid: np.ndarray  # [num_logits] bool
    num_accepted: np.ndarray  # [num_sampling] int64
    num_real_drafts: np.ndarray  # [num_sampling] int64


def make_output(host: HostBatch, sampled: SampledArrays) -> ModelRunnerOutput:
    """Of each request's window, the accepted drafts and the token behind them; none where nothing was sampled."""
    tokens: dict[str, tuple[int, ...]] = dict.fromkeys(host.request_ids, ())
    num_draft_tokens: dict[str, int] = {}
    failed: list[str] = []
    token_ids, is_valid = sampled.token_ids.tolist(), sampled.is_valid.tolist()
    per_request = zip(
        host.sampling_request_ids,
        window_starts(host).tolist(),
        host.num_drafts.tolist(),
        sampled.num_accepted.tolist(),
        sampled.num_real_drafts.tolist(),
        strict=True,
    )
    for request_id, start, num_drafts, num_accepted, num_real_drafts in per_request:
        end = start + 1 + num_accepted
        tokens[request_id] = tuple(token_ids[start:end])
        if num_drafts:
            num_draft_tokens[request_id] = num_real_drafts
        if not all(is_valid[start:end]):
            failed.append(request_id)
    return ModelRunnerOutput(
        sampled_token_ids=tokens,
        num_draft_tokens=num_draft_tokens,
        failed_requests=dict.fromkeys(failed, NOT_FINITE),
    )


def make_empty_output(host: HostBatch) -> ModelRunnerOutput:
    """Of a step in which no request samples."""
    return ModelRunnerOutput(sampled_token_ids=dict.fromkeys(host.request_ids, ()))


def window_starts(host: HostBatch) -> np.ndarray:
    """[num_sampling] int64: the first logits row of each sampling request."""
    counts = host.num_drafts + 1
    return counts.cumsum() - counts
