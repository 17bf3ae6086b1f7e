"""Reads the usage from the end of an answer without parsing all of it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

# Quotation marks inside JSON strings are escaped, so generated text cannot match.
_USAGE = re.compile(rb'[{,]\s*"usage"\s*:\s*(?=\{)')


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts tokens. `num_cached` of the prompt's tokens were found in the instance's prefix cache, or were loaded."""

    num_prompt: int = 0
    num_output: int = 0
    num_cached: int = 0


def usage_of(tail: bytes) -> Usage | None:
    """Returns the last usage in the end of a body, streamed or whole; None if it has none.

    The instance that answers counts the whole prompt, so of two halves only its usage is read.
    """
    starts = list(_USAGE.finditer(tail)) if b'"usage"' in tail else ()
    if not starts:
        return None
    try:
        found, _ = json.JSONDecoder().raw_decode(tail[starts[-1].end() :].decode("utf-8", "replace"))
    except ValueError:
        return None
    details = found.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else 0
    return Usage(_count(found.get("prompt_tokens")), _count(found.get("completion_tokens")), _count(cached))


def _count(value: object) -> int:
    return value if isinstance(value, int) and value >= 0 else 0
