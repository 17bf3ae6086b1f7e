"""Harmony, the format of gpt-oss (OpenAI 2025, github.com/openai/harmony): an answer is a sequence of messages.

    <|channel|>analysis<|message|>REASONING<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>CONTENT<|return|>

The prompt ends with `<|start|>assistant`. Messages in the channel `analysis` are reasoning; those to a function are
passed on without what is between name and arguments, for the parser of calls; all others are content. An answer
without channels is content.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from penstock.server.openai.reasoning import ReasoningFormat, ReasoningReader, Start, overlap, thought_terminals
from penstock.server.openai.tool_calls.tool_format import lark_string

CHANNEL, MESSAGE, CONSTRAIN, CALL = "<|channel|>", "<|message|>", "<|constrain|>", "<|call|>"
CALL_BEGIN = f"{CHANNEL}commentary to=functions."
_START, _END, _RETURN = "<|start|>", "<|end|>", "<|return|>"
_ASSISTANT = f"{_START}assistant"
_CHANNELS = tuple(f"{CHANNEL}{name}" for name in ("analysis", "commentary", "final"))
_ENDS = (_END, CALL, _RETURN, _ASSISTANT, *_CHANNELS)
_HEADERS = (*_CHANNELS, _ASSISTANT)
_FIRST_HEADERS = (*_HEADERS, "to=functions.")
_MAX_HEADER = 512
_PIECE = 1024  # characters that are examined at once, so that the cost is linear
_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")
_BETWEEN = "\n\n"


@dataclass(frozen=True, slots=True)
class HarmonyReasoning(ReasoningFormat):
    """`opening` begins the reasoning, and `closing` ends every message."""

    @property
    def tags(self) -> tuple[str, ...]:
        return CHANNEL, MESSAGE, CONSTRAIN, CALL, _START, _END, _RETURN

    def grammar(self, start: Start, *, is_call: bool = False) -> str | None:
        if start is Start.OVER:
            return None
        end = self.added_tokens.get(_END)
        thought = "THOUGHT" if end is None else f"(THOUGHT | NO_CLOSING <[{end.id}]>)"
        analysis = (
            f'{self._piece(CHANNEL)} "analysis" {self._piece(MESSAGE)} {thought} {self._piece(_START)} "assistant"'
        )
        final = "" if is_call else f' {self._piece(CHANNEL)} "final" {self._piece(MESSAGE)}'
        return "\n".join((f"reasoning: ({analysis})?{final}", *thought_terminals(_END)))

    def reader(self, start: Start) -> ReasoningReader:
        return ReasoningReader("", "", start) if start is Start.OVER else HarmonyReader()

    def _piece(self, tag: str) -> str:
        token = self.added_tokens.get(tag)
        return lark_string(tag) if token is None else f"<[{token.id}]>"


class HarmonyReader(ReasoningReader):
    """Reads one completion, whose first message has no `<|start|>assistant`."""

    def __init__(self) -> None:
        super().__init__("", "", Start.POSSIBLE)
        self._is_in_header = True
        self._is_first = True
        self._is_reasoning = False
        self._is_call = False
        self._has_text = {False: False, True: False}  # content, reasoning

    def feed(self, text: str) -> tuple[str, str]:
        read = list(self.feed_in_order(text))
        return "".join(reasoning for reasoning, _ in read), "".join(content for _, content in read)

    def feed_in_order(self, text: str) -> Iterator[tuple[str, str]]:
        for start in range(0, len(text), _PIECE):
            self._pending += text[start : start + _PIECE]
            while (piece := self._next()) is not None:
                yield piece

    def finish(self) -> tuple[str, str]:
        """Returns the text that was held back. A header that was cut off says nothing."""
        pending, self._pending = self._pending, ""
        if not self._is_in_header:
            return self._as_part(pending)
        text = pending.lstrip()
        is_cut = not self._is_first and any(header.startswith(text) for header in _HEADERS)
        return ("", "") if is_cut or text.startswith(self._headers) else ("", pending)

    @property
    def _headers(self) -> tuple[str, ...]:
        return _FIRST_HEADERS if self._is_first else _HEADERS

    def _next(self) -> tuple[str, str] | None:
        """Returns the next piece; None if it needs more text."""
        return self._read_header() if self._is_in_header else self._read_body()

    def _read_header(self) -> tuple[str, str] | None:
        pending = self._pending.lstrip()
        is_header = pending.startswith(self._headers)
        if not is_header and any(header.startswith(pending) for header in self._headers):
            return None
        place = pending.find(MESSAGE, 0, _MAX_HEADER)
        if is_header and place < 0 and len(pending) < _MAX_HEADER:
            return None
        self._is_in_header, is_first, self._is_first = False, self._is_first, False
        self._is_reasoning = self._is_call = False
        if not is_header:
            # No channel: the text is content as it is.
            return "", ""
        if place < 0:
            # The same, without the tag that begins no message.
            self._pending = pending.removeprefix(CHANNEL).removeprefix(_START)
            return "", ""
        header, self._pending = pending[:place], pending[place + len(MESSAGE) :]
        recipient = _RECIPIENT.search(header)
        if recipient is not None:
            self._is_call = True
            return "", f"{CALL_BEGIN}{recipient[1]}{MESSAGE}"
        self._is_reasoning = f"{CHANNEL}analysis" in header
        between = _BETWEEN if not is_first and self._has_text[self._is_reasoning] else ""
        return (between, "") if self._is_reasoning else ("", between)

    def _read_body(self) -> tuple[str, str] | None:
        places = {end: self._pending.find(end) for end in _ENDS}
        found = min((place for place in places.values() if place >= 0), default=-1)
        if found < 0:
            cut = len(self._pending) - max(overlap(self._pending, end) for end in _ENDS)
            text, self._pending = self._pending[:cut], self._pending[cut:]
            return self._as_part(text) if text else None
        end = next(each for each, place in places.items() if place == found)
        text, self._pending = self._pending[:found], self._pending[found:]
        if end in (_END, CALL, _RETURN):
            self._pending = self._pending[len(end) :]
        self._is_in_header = True
        reasoning, content = self._as_part(text)
        return reasoning, content + (CALL if self._is_call else "")

    def _as_part(self, text: str) -> tuple[str, str]:
        self._has_text[self._is_reasoning] |= bool(text) and not self._is_call
        return (text, "") if self._is_reasoning else ("", text)
