"""A request inside the scheduler: its status, its tokens and the counts from which all else is derived."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from penstock.core.block_hash import BlockHash, extend_chain, root_hash
from penstock.messages.kv_transfer import TransferId
from penstock.messages.outputs import FinishReason
from penstock.messages.requests import EngineRequest
from penstock.messages.runner_output import TokenLogprobs


class RequestStatus(enum.Enum):
    WAITING = "waiting"
    WAITING_FOR_REMOTE_KV = "waiting_for_remote_kv"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


# All allowed transitions of a request's status. `set_status` is the only place that changes it.
TRANSITIONS: dict[RequestStatus, frozenset[RequestStatus]] = {
    RequestStatus.WAITING: frozenset(
        {RequestStatus.RUNNING, RequestStatus.WAITING_FOR_REMOTE_KV, RequestStatus.FINISHED}
    ),
    RequestStatus.WAITING_FOR_REMOTE_KV: frozenset({RequestStatus.WAITING, RequestStatus.FINISHED}),
    RequestStatus.RUNNING: frozenset({RequestStatus.PREEMPTED, RequestStatus.FINISHED}),
    RequestStatus.PREEMPTED: frozenset(
        {RequestStatus.RUNNING, RequestStatus.WAITING_FOR_REMOTE_KV, RequestStatus.FINISHED}
    ),
    RequestStatus.FINISHED: frozenset(),
}


class GrammarProgress(Protocol):
    """Receives a request's tokens when they become final."""

    def advance(self, request_id: str, token_id: int) -> bool:
        """Returns whether the output is complete. Raises GrammarError."""
        ...


class Request:
    """One request and its token counts.

    There is one measure of progress, without phases: `num_computed_tokens` of `num_tokens` known tokens have their KV.
    With steps in flight the count is optimistic: it includes the tokens that they will compute, and
    `num_output_placeholders` counts the tokens that they will sample. While decoding,

        num_tokens + num_output_placeholders - 1 == num_computed_tokens

    In both, drafts in flight count as accepted; rejected ones are subtracted when their step is processed. `num_drafts`
    is the number of drafts that the device will hold for the next step.

    A request that continues given output begins like a preempted one that had generated it.

    `num_last_accepted` is how many drafts of the last processed step were accepted. `num_loaded_tokens` of its
    tokens were in the cache when the last load for it ended, unless it has gained a token since. `waits_for_loads`:
    those of other requests took too much of the pool when it was last looked at.

    `num_samples_in_flight` counts the steps in flight that sample for it, `last_sampling_step` is the newest of them.
    `admission` numbers its latest entry into the runner; results of an earlier admission are dropped.
    """

    def __init__(self, data: EngineRequest, arrival_index: int, block_size: int, num_tokens_ahead: int = 0) -> None:
        self.data = data
        self.request_id = data.request_id
        self.arrival_index = arrival_index
        self.status = RequestStatus.WAITING
        self.token_ids: list[int] = [*data.prompt_token_ids, *data.output_token_ids]
        self.num_prompt_tokens = len(data.prompt_token_ids)
        self.max_num_tokens = self.num_prompt_tokens + data.max_tokens
        self.ending_token_ids = data.eos_token_ids | data.stop_token_ids
        self.num_computed_tokens = 0
        self.num_in_flight_tokens = 0
        self.num_output_placeholders = 0
        self.num_samples_in_flight = 0
        self.last_sampling_step = 0
        self.num_drafts = 0
        self.num_last_accepted = 0
        self.num_cached_tokens = 0
        self.num_tokens_at_admission = 0
        self.admission = 0
        self.num_failed_loads, self.num_loaded_tokens, self.waits_for_loads = 0, 0, False
        self.finish_reason: FinishReason | None = None
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.block_hashes: list[BlockHash] = []
        self._block_size = block_size
        self._num_tokens_ahead = num_tokens_ahead
        self._root_hash = root_hash(data.kv_scope)
        self._extend_hashes()

    @property
    def hold_id(self) -> TransferId:
        """Names the request for other engines, and the hold on its blocks; never reused, unlike the request id."""
        return TransferId(self.request_id, self.arrival_index)

    @property
    def num_tokens(self) -> int:
        """Known tokens: the prompt and the output so far."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_processed_tokens(self) -> int:
        """Tokens whose KV is known to be in place, without those that steps in flight compute."""
        return self.num_computed_tokens - self.num_in_flight_tokens

    @property
    def num_tokens_to_compute(self) -> int:
        """Tokens that a step without limits could compute now."""
        return len(self.token_ids) + self.num_output_placeholders - self.num_computed_tokens

    @property
    def is_prefilling(self) -> bool:
        """Whether its next step starts within the tokens that were known when it entered the runner."""
        return self.num_computed_tokens < self.num_tokens_at_admission

    @property
    def has_all_tokens_in_flight(self) -> bool:
        """Whether the steps in flight will sample the last token that this request may have."""
        return len(self.token_ids) + self.num_output_placeholders >= self.max_num_tokens

    @property
    def max_drafts(self) -> int:
        """Drafts per step that this request takes."""
        wanted = self.data.sampling_params.num_speculative_tokens
        return self.data.max_tokens if wanted is None else wanted

    @property
    def num_useful_drafts(self) -> int:
        """The drafts on the device, limited so that `max_tokens` is not exceeded if all are accepted."""
        room = self.max_num_tokens - len(self.token_ids) - self.num_output_placeholders - 1
        return max(0, min(self.num_drafts, room))

    @property
    def prompt_token_ids(self) -> Sequence[int]:
        return self.data.prompt_token_ids

    @property
    def kv_scope(self) -> bytes:
        return self.data.kv_scope

    @property
    def kv_transfer_params(self) -> Mapping[str, Any]:
        return self.data.sampling_params.kv_transfer_params or {}

    @property
    def is_continued_elsewhere(self) -> bool:
        """Whether another engine will continue its prompt."""
        return bool(self.kv_transfer_params.get("do_remote_decode"))

    @property
    def uses_prefix_cache(self) -> bool:
        """False with prompt log probabilities, which need every position computed."""
        return self.data.sampling_params.prompt_logprobs is None

    def set_status(self, status: RequestStatus) -> None:
        assert status in TRANSITIONS[self.status], f"{self.request_id}: {self.status} -> {status}"
        self.status = status

    def admit(self, admission: int, num_computed_tokens: int) -> None:
        """Enters the runner with that many tokens already in the cache; `admission` is unique in the engine."""
        if self.admission == 0:
            self.num_cached_tokens = min(num_computed_tokens, self.num_prompt_tokens)
        self.set_status(RequestStatus.RUNNING)
        self.admission = admission
        self.num_computed_tokens = num_computed_tokens
        self.num_tokens_at_admission = len(self.token_ids)

    def preempt(self) -> None:
        """Drops its KV and all results in flight, and keeps its tokens."""
        self.set_status(RequestStatus.PREEMPTED)
        self.num_computed_tokens = 0
        self.num_in_flight_tokens = self.num_samples_in_flight = 0
        self.num_output_placeholders = 0
        self.num_drafts = 0
        self.num_last_accepted = 0
        self.prompt_logprobs.clear()

    def on_scheduled(self, step: int, num_tokens: int, num_drafts: int, num_new_drafts: int) -> bool:
        """Counts a scheduled step that computes `num_tokens`, the last `num_drafts` of them drafts.

        If they reach the last known token, the step samples one token more than there are drafts, and the device will
        then hold `num_new_drafts`. Returns whether it samples.
        """
        self.num_computed_tokens += num_tokens
        self.num_in_flight_tokens += num_tokens
        if self.num_tokens_to_compute != -num_drafts:
            return False
        self.num_output_placeholders += 1 + num_drafts
        self.num_samples_in_flight += 1
        self.last_sampling_step = step
        self.num_drafts = num_new_drafts
        return True

    def on_processed(self, num_tokens: int, num_drafts: int, num_sampled: int) -> None:
        """Counts a processed step of `num_tokens` that sampled `num_sampled` tokens: one, and the accepted drafts."""
        self.num_in_flight_tokens -= num_tokens
        self.num_last_accepted = max(0, num_sampled - 1)
        if num_sampled:
            self.num_output_placeholders -= 1 + num_drafts
            self.num_samples_in_flight -= 1
            self.num_computed_tokens -= 1 + num_drafts - num_sampled
        assert self.num_in_flight_tokens >= 0, self.request_id
        assert self.num_output_placeholders >= 0, self.request_id

    def append_until_stop(
        self, sampled: tuple[int, ...], grammars: GrammarProgress
    ) -> tuple[tuple[int, ...], int | None]:
        """Appends the tokens up to one that ends the request, if any; returns them and the stop token.

        Raises GrammarError.
        """
        data = self.data
        for count, token_id in enumerate(sampled, start=1):
            self.append_output(token_id)
            if token_id in self.ending_token_ids and self.num_output_tokens >= data.sampling_params.min_tokens:
                self.finish_reason = FinishReason.STOP
                return sampled[:count], None if token_id in data.eos_token_ids else token_id
            if data.grammar is not None and grammars.advance(self.request_id, token_id):
                # Only an end of sequence, which adds no text, may follow.
                self.finish_reason = FinishReason.STOP
                return sampled[:count], None
            if self.num_tokens >= self.max_num_tokens:
                self.finish_reason = FinishReason.LENGTH
                return sampled[:count], None
        return sampled, None

    def take_prompt_logprobs(self) -> tuple[TokenLogprobs, ...]:
        taken = tuple(self.prompt_logprobs)
        self.prompt_logprobs.clear()
        return taken

    def append_output(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self.num_loaded_tokens = 0
        if (len(self.token_ids) - self._num_tokens_ahead) % self._block_size == 0:
            self._extend_hashes()

    def _extend_hashes(self) -> None:
        extend_chain(self.block_hashes, self._root_hash, self.token_ids, self._block_size, self._num_tokens_ahead)
