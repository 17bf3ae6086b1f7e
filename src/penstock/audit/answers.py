"""A server's answers in one form, whichever engine wrote them.

Log probabilities have two forms: lists by token (`tokens`, `token_logprobs`, `top_logprobs`: the completions of OpenAI,
vLLM, SGLang, TensorRT-LLM and llama-cpp-python) and a list of entries (`content`: all chats, and llama.cpp everywhere).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.loadgen.stream import EventReader, error_message
from penstock.utils.names import one_line

_MAX_EVENT_BYTES = 4 << 20
_ERROR_CHARS = 300
# Rounding may make a log probability a little larger than 0.
_MOST = 0.1


@dataclass(frozen=True, slots=True)
class Token:
    """One output token. `top` has the log probabilities (natural logarithms) that the server reported at its position,
    by text, its own included; it is empty if the server reported none.
    """

    text: str
    top: Mapping[str, float]
    token_id: int | None = None

    @property
    def logprob(self) -> float | None:
        return self.top.get(self.text)

    def is_same(self, other: Token) -> bool:
        if self.token_id is not None and other.token_id is not None:
            return self.token_id == other.token_id
        return self.text == other.text


@dataclass(frozen=True, slots=True)
class Answer:
    """`tokens` is empty if the server reports no log probabilities; the counts, in tokens, are None if it states none.
    `prompt_ids` is empty if the server does not return token ids.
    """

    text: str
    tokens: tuple[Token, ...] = ()
    finish_reason: str | None = None
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    prompt_ids: tuple[int, ...] = ()


class _Top(msgspec.Struct):
    token: str
    logprob: float | None = None


class _Entry(msgspec.Struct):
    token: str
    logprob: float | None = None
    id: int | None = None
    top_logprobs: list[_Top] | None = None


class _Logprobs(msgspec.Struct):
    content: list[_Entry] | None = None
    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float | None] | None] | None = None


class _Message(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    @property
    def text(self) -> str:
        return (self.reasoning_content or self.reasoning or "") + (self.content or "")


class _Choice(msgspec.Struct):
    text: str | None = None
    message: _Message | None = None
    delta: _Message | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Response(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None
    prompt_token_ids: list[int] | None = None


class AnswerReader:
    """Reads one answer: `take_whole` for a JSON body, `take_stream` for the parts of an event stream, then `finish`.

    All of them raise ValueError for what is not an answer of the OpenAI API.
    """

    def __init__(self) -> None:
        self._events = EventReader(_MAX_EVENT_BYTES)
        self._has_begun = self._has_ended = False
        self._texts: list[str] = []
        self._tokens: list[Token] = []
        self._ids: list[int] = []
        self._prompt_ids: list[int] = []
        self._finish_reason: str | None = None
        self._usage = _Usage()

    def take_whole(self, body: bytes) -> None:
        self._take(body)
        self._has_ended = True

    def take_stream(self, data: bytes) -> None:
        for event in self._events.receive(data):
            if event == b"[DONE]":
                self._has_ended = True
            else:
                self._take(event)

    def finish(self) -> Answer:
        if not self._has_begun:
            raise ValueError("the answer has no choices")
        if not (self._has_ended or self._finish_reason):
            raise ValueError("the stream ended before the answer did")
        tokens = self._tokens
        if len(self._ids) == len(tokens):
            tokens = [Token(each.text, each.top, self._ids[i]) for i, each in enumerate(tokens)]
        details = self._usage.prompt_tokens_details or _Details()
        return Answer(
            "".join(self._texts),
            tuple(tokens),
            self._finish_reason,
            self._usage.prompt_tokens,
            details.cached_tokens,
            tuple(self._prompt_ids),
        )

    def _take(self, body: bytes) -> None:
        try:
            response = msgspec.json.decode(body, type=_Response)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not an answer of the OpenAI API ({error}): {body[:80]!r}") from None
        if response.error is not None:
            raise ValueError(f"the server reported: {one_line(error_message(response.error)[:_ERROR_CHARS])}")
        self._usage = response.usage or self._usage
        self._prompt_ids = response.prompt_token_ids or self._prompt_ids
        if response.choices:
            self._take_choice(response.choices[0])

    def _take_choice(self, choice: _Choice) -> None:
        message = choice.message or choice.delta
        text = choice.text if message is None else message.text
        if text is None:
            raise ValueError("an answer of the OpenAI API has `text` or `message`, and this one has neither")
        self._has_begun = True
        self._texts.append(text)
        self._ids += choice.token_ids or ()
        self._prompt_ids = choice.prompt_token_ids or self._prompt_ids
        self._finish_reason = choice.finish_reason or self._finish_reason
        if choice.logprobs is not None:
            self._tokens += _tokens(choice.logprobs)


def _tokens(logprobs: _Logprobs) -> list[Token]:
    if logprobs.content is not None:
        return [
            _token(each.token, each.logprob, {top.token: top.logprob for top in each.top_logprobs or ()}, each.id)
            for each in logprobs.content
        ]
    texts = logprobs.tokens or []
    values, tops = logprobs.token_logprobs or [None] * len(texts), logprobs.top_logprobs or [None] * len(texts)
    if not len(texts) == len(values) == len(tops):
        raise ValueError("the lists of `logprobs` have different lengths")
    return [_token(text, value, top or {}) for text, value, top in zip(texts, values, tops, strict=True)]


def _token(text: str, logprob: float | None, top: Mapping[str, float | None], token_id: int | None = None) -> Token:
    known = {name: value for name, value in top.items() if value is not None}
    if logprob is not None:
        known[text] = logprob
    if max(known.values(), default=0.0) > _MOST:
        raise ValueError(f"a log probability is above 0: {max(known.values())}")
    return Token(text, known, token_id)
