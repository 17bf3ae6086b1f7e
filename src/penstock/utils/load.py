"""How much work a request is, so that requests can be divided among engines."""

from __future__ import annotations

_TOKENS_PER_ANSWER = 256


def request_load(num_prompt_tokens: int) -> int:
    """What an unfinished request weighs, in prompt tokens: its prompt, and the steps of an answer of unknown length."""
    return num_prompt_tokens + _TOKENS_PER_ANSWER
