"""An estimate of the work of requests, used to balance them among engines."""

from __future__ import annotations

_TOKENS_PER_ANSWER = 256


def load(num_prompt_tokens: int, num_requests: int = 1) -> int:
    """Estimates the load of unfinished requests in prompt tokens: the prompts to compute, plus the steps of answers of
    unknown lengths.
    """
    return num_prompt_tokens + _TOKENS_PER_ANSWER * num_requests
