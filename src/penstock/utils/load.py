"""How much work requests are, so that they can be divided among engines."""

from __future__ import annotations

_TOKENS_PER_ANSWER = 256


def load(num_prompt_tokens: int, num_requests: int = 1) -> int:
    """What unfinished requests weigh, in prompt tokens: the prompts that are to be computed, and the steps of answers
    of unknown lengths."""
    return num_prompt_tokens + _TOKENS_PER_ANSWER * num_requests
