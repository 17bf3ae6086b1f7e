"""Log probabilities as the two APIs write them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from penstock.messages.outputs import Logprob, Logprobs
from penstock.server.openai.protocol import CompletionLogprobs

# JSON has no infinity; this is what other servers write for an impossible token.
_LOWEST = -9999.0


def completion_logprobs(
    rows: Iterable[Mapping[int, Logprob] | None], first_token_ids: Iterable[int], offset: int, num_top: int
) -> CompletionLogprobs:
    """The legacy form: lists beside the tokens. A row's first entry is the token that stands there.

    `first_token_ids` names the tokens of rows that are None; `offset` is the number of characters before them.
    """
    result: CompletionLogprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for row, token_id in zip(rows, first_token_ids, strict=True):
        text = "" if row is None else row[token_id].decoded_token or ""
        result["tokens"].append(text)
        result["token_logprobs"].append(None if row is None else _finite(row[token_id].logprob))
        if result["top_logprobs"] is not None:
            result["top_logprobs"].append(None if row is None else _top(row, num_top))
        result["text_offset"].append(offset)
        offset += len(text)
    if num_top == 0:
        result["top_logprobs"] = None
    return result


def _top(row: Mapping[int, Logprob], num_top: int) -> dict[str, float]:
    """The likeliest tokens and, if it is none of them, the one that stands there."""
    chosen, *_ = row.values()
    wanted = [entry for entry in row.values() if entry is chosen or (entry.rank or 0) <= num_top]
    return {entry.decoded_token or "": _finite(entry.logprob) for entry in wanted}


def chat_logprobs(rows: Logprobs, num_top: int) -> dict[str, Any]:
    """`{"content": [...]}`: an entry per token, each with its likeliest alternatives."""
    return {"content": [_chat_entry(row, num_top) for row in rows]}


def _chat_entry(row: Mapping[int, Logprob], num_top: int) -> dict[str, Any]:
    chosen, *_ = row.values()
    top = sorted((entry for entry in row.values() if (entry.rank or 0) <= num_top), key=lambda entry: entry.rank or 0)
    return {**_token(chosen), "top_logprobs": [_token(entry) for entry in top]}


def _token(entry: Logprob) -> dict[str, Any]:
    text = entry.decoded_token or ""
    return {"token": text, "logprob": _finite(entry.logprob), "bytes": list(text.encode("utf-8", "replace"))}


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)


def prompt_logprobs(rows: Iterable[Mapping[int, Logprob] | None]) -> list[dict[str, Any] | None]:
    """vLLM's extra field: per prompt position, token id -> log probability, rank and text."""
    return [
        None
        if row is None
        else {
            str(token_id): {
                "logprob": _finite(entry.logprob),
                "rank": entry.rank,
                "decoded_token": entry.decoded_token,
            }
            for token_id, entry in row.items()
        }
        for row in rows
    ]
