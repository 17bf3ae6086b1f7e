"""Results: the engine core's report for a request per step, and the output for a caller of the engine."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from penstock.messages.runner_output import TokenLogprobs


class FinishReason(enum.StrEnum):
    """Why a request ended; the spelling is the OpenAI API's."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


# A Struct, because one is made per request and step: a frozen dataclass takes twenty times as long.
class EngineOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One step's output for one request. `logprobs` is parallel to `new_token_ids`. `prompt_logprobs` is sent once,
    with the first token, and covers the prompt's positions from 1 on. `num_accepted_tokens` of `num_draft_tokens`
    drafts were accepted. `stop_reason` is the stop token that ended the request, None for an end of sequence. With
    `is_request_error` the request itself caused its `error`. `pooled`, [hidden_size] float32, is a pooling engine's
    result, sent once, in place of tokens. `kv_transfer_params`, sent with the finish reason, are the KV connector's
    parameters for the next engine.
    """

    request_id: str
    new_token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    num_cached_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    error: str | None = None
    is_request_error: bool = False
    pooled: np.ndarray | None = None
    kv_transfer_params: Mapping[str, Any] | None = None


class Logprob(msgspec.Struct, frozen=True):
    """One token's log probability, its rank (1 is the most likely) and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


Logprobs = list[dict[int, Logprob]]
PromptLogprobs = list[dict[int, Logprob] | None]


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's `n` completions, generated so far.

    If the request continues given output, `text` and `token_ids` begin with it: its `num_given_tokens`, and the
    `num_given_characters` that could be shown before the first new token. `logprobs` begin after it. A completion that
    had ended before has no text.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list[int])
    cumulative_logprob: float | None = None
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_given_tokens: int = 0
    num_given_characters: int = 0

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A request and its completions. `num_cached_tokens` prompt tokens were found in the prefix cache.

    `num_draft_tokens` were verified for all of its completions together, and `num_accepted_tokens` of them were
    accepted. `error` is why a completion ended with the finish reason "error"; with `is_request_error` the request is
    invalid and would fail again. `pooled`, [hidden_size] float32, is the answer of a pooling engine, before truncation
    and normalisation; its completion stays empty. `kv_transfer_params` are the KV connector's parameters for the next
    engine when the request (with several completions, the last one) has ended.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    prompt_logprobs: PromptLogprobs | None = None
    num_cached_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    error: str | None = None
    is_request_error: bool = False
    pooled: np.ndarray | None = None
    kv_transfer_params: Mapping[str, Any] | None = None
