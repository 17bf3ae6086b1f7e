"""Applies a step's result to one request: its counts and its next output. Counts proposed and accepted drafts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.core.request import Request
from penstock.messages.outputs import EngineOutput, FinishReason
from penstock.messages.runner_output import ModelRunnerOutput
from penstock.messages.stats import SpeculationStats


@dataclass(frozen=True, slots=True)
class Verified:
    """The number of a request's drafts that a step has verified, and how many of them were accepted."""

    num_drafts: int = 0
    num_accepted: int = 0


def apply_counts(request: Request, num_tokens: int, num_drafts: int, result: ModelRunnerOutput) -> Verified:
    """Applies the counts of a step that computed `num_tokens` of the request, the last `num_drafts` of them drafts."""
    request_id = request.request_id
    num_sampled = len(result.sampled_token_ids[request_id])
    if request_id in result.pooled:
        # The vector counts as the single token that the request may have.
        num_sampled, request.finish_reason = 1, FinishReason.STOP
    request.on_processed(num_tokens, num_drafts, num_sampled)
    if request.num_drafts and not request.num_in_flight_tokens:
        # No later step was scheduled on the assumption that all drafts exist, so gaps can be removed.
        request.num_drafts = min(request.num_drafts, result.num_proposed_tokens.get(request_id, request.num_drafts))
    if request_id in result.prompt_logprobs and not request.num_output_tokens:
        request.prompt_logprobs.extend(result.prompt_logprobs[request_id])
    return Verified(result.num_draft_tokens.get(request_id, 0), request.num_last_accepted) if num_drafts else Verified()


def make_output(
    request: Request,
    new_token_ids: tuple[int, ...],
    stop_reason: int | None,
    verified: Verified,
    result: ModelRunnerOutput,
    params: Mapping[str, Any] | None,
) -> EngineOutput:
    """Returns the output with the request's new tokens and their data, or its vector.

    If the request's constraints allow no further token, the output has the error too.
    """
    request_id, is_error = request.request_id, request.finish_reason is FinishReason.ERROR
    return EngineOutput(
        request_id=request_id,
        new_token_ids=new_token_ids,
        logprobs=result.logprobs[request_id][: len(new_token_ids)] if request_id in result.logprobs else (),
        prompt_logprobs=request.take_prompt_logprobs() if request.prompt_logprobs else (),
        finish_reason=request.finish_reason,
        stop_reason=stop_reason,
        num_cached_tokens=request.num_cached_tokens,
        num_draft_tokens=verified.num_drafts,
        num_accepted_tokens=verified.num_accepted,
        error=result.unsatisfiable_requests.get(request_id) if is_error else None,
        is_request_error=is_error,
        pooled=result.pooled.get(request_id),
        kv_transfer_params=params,
    )


class SpeculationCounter:
    """Counts verifications of at most `max_num_drafts` drafts each."""

    def __init__(self, max_num_drafts: int) -> None:
        self._num_drafts = 0
        self._num_draft_tokens = 0
        self._num_accepted_per_position = [0] * max_num_drafts

    def count(self, num_draft_tokens: int, num_accepted: int) -> None:
        """Records the verification of one request's drafts, the first `num_accepted` of which were accepted."""
        assert 0 <= num_accepted <= num_draft_tokens, (num_accepted, num_draft_tokens)
        self._num_drafts += num_draft_tokens > 0
        self._num_draft_tokens += num_draft_tokens
        for position in range(num_accepted):
            self._num_accepted_per_position[position] += 1

    def stats(self) -> SpeculationStats:
        return SpeculationStats(self._num_drafts, self._num_draft_tokens, tuple(self._num_accepted_per_position))
