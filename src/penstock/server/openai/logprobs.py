"""Log probabilities in the formats of the two APIs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from penstock.messages.outputs import Logprob, Logprobs
from penstock.server.openai.protocol import CompletionLogprobs
from penstock.tokenizer.tokenizer import Tokenizer

# JSON has no infinity; this is what other servers write for an impossible token.
_LOWEST = -9999.0


def completion_logprobs(
    rows: Iterable[Mapping[int, Logprob] | None],
    first_token_ids: Iterable[int],
    offset: int,
    num_top: int,
    names_ids: bool = False,
) -> CompletionLogprobs:
    """Returns the legacy format: parallel lists. A row's first entry is the token at its position.

    `first_token_ids` names the tokens of rows that are None; `offset` is the number of characters before them; with
    `names_ids` tokens are named by `token_name`.
    """
    result: CompletionLogprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for row, token_id in zip(rows, first_token_ids, strict=True):
        text = "" if row is None else row[token_id].decoded_token or ""
        result["tokens"].append(token_name(token_id) if names_ids else text)
        result["token_logprobs"].append(None if row is None else _finite(row[token_id].logprob))
        if result["top_logprobs"] is not None:
            result["top_logprobs"].append(None if row is None else _top(row, num_top, names_ids))
        result["text_offset"].append(offset)
        offset += len(text)
    if num_top == 0:
        result["top_logprobs"] = None
    return result


def joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    """Concatenates two consecutive pieces of one text."""
    tops = (first["top_logprobs"], second["top_logprobs"])
    return {
        "tokens": first["tokens"] + second["tokens"],
        "token_logprobs": first["token_logprobs"] + second["token_logprobs"],
        "top_logprobs": None if tops[0] is None or tops[1] is None else tops[0] + tops[1],
        "text_offset": first["text_offset"] + second["text_offset"],
    }


def _top(row: Mapping[int, Logprob], num_top: int, names_ids: bool) -> dict[str, float]:
    """Returns the top tokens and, if it is not among them, the token at this position."""
    chosen, *_ = row.values()
    wanted = [(key, entry) for key, entry in row.items() if entry is chosen or (entry.rank or 0) <= num_top]
    top: dict[str, float] = {}
    for token_id, entry in wanted:
        # Incomplete characters have the same text; the most likely of them represents the others.
        text = token_name(token_id) if names_ids else entry.decoded_token or ""
        logprob = _finite(entry.logprob)
        top[text] = max(logprob, top.get(text, logprob))
    return top


def chat_logprobs(tokenizer: Tokenizer, rows: Logprobs, num_top: int, names_ids: bool = False) -> dict[str, Any]:
    """`{"content": [...]}`: an entry per token with its top alternatives; `names_ids` names tokens by `token_name`."""
    return {"content": [_chat_entry(tokenizer, row, num_top, names_ids) for row in rows], "refusal": None}


def token_name(token_id: int) -> str:
    """Returns a token's unambiguous name (`return_tokens_as_token_ids`)."""
    return f"token_id:{token_id}"


def _chat_entry(tokenizer: Tokenizer, row: Mapping[int, Logprob], num_top: int, names_ids: bool) -> dict[str, Any]:
    entries = [_token(tokenizer, token_id, entry, names_ids) for token_id, entry in row.items()]
    ranked = sorted(zip((entry.rank or 0 for entry in row.values()), entries, strict=True), key=lambda pair: pair[0])
    return {**entries[0], "top_logprobs": [entry for rank, entry in ranked if rank <= num_top]}


def _token(tokenizer: Tokenizer, token_id: int, entry: Logprob, names_ids: bool) -> dict[str, Any]:
    """Returns an entry. Its `bytes` can be concatenated also in the middle of a character, where texts cannot."""
    return {
        "token": token_name(token_id) if names_ids else entry.decoded_token or "",
        "logprob": _finite(entry.logprob),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)


def prompt_logprobs(rows: Iterable[Mapping[int, Logprob] | None], num_top: int) -> list[dict[str, Any] | None]:
    """vLLM's extra field: per prompt position, token id -> log probability, rank and text.

    The token at the position comes first, then the `num_top` most likely ones.
    """
    return [
        None
        if row is None
        else {
            str(token_id): {"logprob": _finite(entry.logprob), "rank": entry.rank, "decoded_token": entry.decoded_token}
            for place, (token_id, entry) in enumerate(row.items())
            if place == 0 or (entry.rank or 0) <= num_top
        }
        for row in rows
    ]
