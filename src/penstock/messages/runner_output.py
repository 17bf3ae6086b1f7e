"""What came back from one step, after the one copy from the device: plain lists, no tensors."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one position.

    `token_ids[0]` is the token that stands there (sampled, or given by the prompt) and `rank` its rank, 1 for the most
    likely; the rest are the most likely tokens in descending order. `logprobs` runs beside `token_ids`.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRunnerOutput:
    """The result of one step on the rank that samples.

    `sampled_token_ids` has an entry for every scheduled request; it is empty for a chunk of a prefill that did not
    reach the last known token. `prompt_logprobs` holds the positions that this step's chunk covered, in order;
    position 0 of a prompt has none. `failed_requests` maps a request to what went wrong with it alone.
    """

    sampled_token_ids: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    logprobs: dict[str, tuple[TokenLogprobs, ...]] = field(default_factory=dict[str, tuple[TokenLogprobs, ...]])
    prompt_logprobs: dict[str, tuple[TokenLogprobs, ...]] = field(default_factory=dict[str, tuple[TokenLogprobs, ...]])
    failed_requests: dict[str, str] = field(default_factory=dict[str, str])
