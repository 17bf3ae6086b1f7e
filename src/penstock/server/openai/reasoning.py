"""Separation of reasoning from the answer, in the formats of reasoning models.

Where an answer's reasoning begins depends on the prompt: some chat templates open it (Qwen3-Thinking, DeepSeek-R1),
some close it at once because the client switched it off (`enable_thinking: false`), and with the others the model opens
it. `ReasoningFormat.start_of` determines which. A `ReasoningReader` then splits the streamed text; the merged result
does not depend on how the text is divided into pieces. The line breaks around the tags are neither reasoning nor
content.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from penstock.tokenizer.tokenizer import AddedToken, Tokenizer

_MAX_INDENT = 64
_TAIL_TOKENS = 16


class Start(enum.Enum):
    """The state in which an answer begins."""

    INSIDE = enum.auto()
    """The prompt has opened the reasoning."""
    EXPECTED = enum.auto()
    """The model reasons, whether or not it writes the opening tag."""
    POSSIBLE = enum.auto()
    """The model reasons if it writes the opening tag."""
    OVER = enum.auto()
    """There is only content."""


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a family of models marks its reasoning. `added_tokens` has the tags that are single tokens."""

    name: str
    opening: str
    closing: str
    by_default: Start
    added_tokens: Mapping[str, AddedToken] = field(default_factory=dict[str, AddedToken])

    @property
    def is_none(self) -> bool:
        """Whether this format has no reasoning."""
        return self.by_default is Start.OVER

    def start_of(self, tokenizer: Tokenizer, prompt: list[int], continued: str | None) -> Start:
        """Returns the state in which the answer begins; `continued` is the text of the message that it continues, if
        any.
        """
        if self.is_none:
            return Start.OVER
        if continued is not None:
            return Start.INSIDE if continued.rfind(self.opening) > continued.rfind(self.closing) else Start.OVER
        tail = tokenizer.decode(prompt[-_TAIL_TOKENS:], skip_special_tokens=False).rstrip()
        if tail.endswith(self.opening):
            return Start.INSIDE
        return Start.OVER if tail.endswith(self.closing) else self.by_default

    def needs_special_tokens(self, start: Start) -> bool:
        """Whether a tag that may follow is a special token, which is visible only in text that shows special tokens."""
        return start is not Start.OVER and any(token.is_special for token in self.added_tokens.values())

    def with_tokens(self, added_tokens: Mapping[str, AddedToken]) -> ReasoningFormat:
        """Returns the format for a tokenizer with these tokens."""
        tags = {tag: added_tokens[tag] for tag in self.tags if tag in added_tokens}
        return replace(self, added_tokens=tags)

    @property
    def tags(self) -> tuple[str, ...]:
        """The texts that may be single tokens."""
        return self.opening, self.closing

    def grammar(self, start: Start, *, is_call: bool = False) -> str | None:
        """Returns the Lark rule `reasoning`, and the rules that it needs, for the text before a constrained answer,
        which is a call or content. None if there is none.
        """
        if start is Start.OVER:
            return None
        closing, opening = self.added_tokens.get(self.closing), self.added_tokens.get(self.opening)
        thought = "THOUGHT" if closing is None else f"(THOUGHT | NO_CLOSING <[{closing.id}]>)"
        # If the tag is a token, its first characters alone must not begin the reasoning.
        opened = f'"{self.opening}"' if opening is None else f"<[{opening.id}]>"
        match start:
            case Start.INSIDE:
                rule = f"{thought} GAP"
            case Start.EXPECTED:
                rule = f"{opened}? {thought} GAP"
            case _:
                rule = f"({opened} {thought} GAP)?"
        return "\n".join((f"reasoning: {rule}", *thought_terminals(self.closing), r"GAP: /[\r\n ]{0,4}/"))

    def reader(self, start: Start) -> ReasoningReader:
        """Returns a reader for one completion."""
        return ReasoningReader(self.opening, self.closing, start)


class ReasoningReader:
    """Splits one completion: call `feed` any number of times, then `finish` once."""

    def __init__(self, opening: str, closing: str, start: Start) -> None:
        self._opening = opening
        self._closing = closing
        self._start = start
        self._pending = ""
        self._is_open = start is Start.INSIDE
        self._is_undecided = start in (Start.EXPECTED, Start.POSSIBLE)
        self._drops_breaks = True  # line breaks at the beginning of the next text

    def feed(self, text: str) -> tuple[str, str]:
        """Returns the reasoning and the content in the next piece."""
        if not self._is_open and not self._is_undecided:
            return "", self._without_breaks(text) if self._start is not Start.OVER else text
        self._pending += text
        if self._is_undecided and not self._decide():
            return "", ""
        return self._divide()

    def feed_in_order(self, text: str) -> Iterator[tuple[str, str]]:
        """Does the same as `feed`; yields several pieces if there is reasoning after content."""
        yield self.feed(text)

    def finish(self) -> tuple[str, str]:
        """Returns the text that was held back, at the end."""
        pending, self._pending = self._pending, ""
        if self._is_open or (self._is_undecided and self._start is Start.EXPECTED):
            return self._without_breaks(pending), ""
        return "", pending

    def _decide(self) -> bool:
        """Determines whether the answer begins with the opening tag; returns whether that is known."""
        text = self._pending.lstrip()
        if len(self._pending) - len(text) <= _MAX_INDENT:
            if text.startswith(self._opening):
                self._pending = text[len(self._opening) :]
                self._is_open = True
            elif self._opening.startswith(text):
                return False
        self._is_undecided = False
        if self._start is Start.EXPECTED:
            self._is_open = True
        return True

    def _divide(self) -> tuple[str, str]:
        text, self._pending = self._pending, ""
        if not self._is_open:
            # No reasoning: all of the text is content, unchanged.
            self._start = Start.OVER
            return "", text
        text = self._without_breaks(text)
        place = text.find(self._closing)
        if place >= 0:
            self._is_open = False
            self._drops_breaks = True
            # The last line break before the tag belongs to the tag.
            return text[:place].removesuffix("\n"), self._without_breaks(text[place + len(self._closing) :])
        cut = len(text) - max(overlap(text, self._closing), overlap(text, f"\n{self._closing}"))
        self._pending = text[cut:]
        return text[:cut], ""

    def _without_breaks(self, text: str) -> str:
        if self._drops_breaks:
            text = text.lstrip("\r\n")
            self._drops_breaks = not text
        return text


def thought_terminals(closing: str) -> tuple[str, str]:
    """Returns the Lark terminals THOUGHT, text that includes the tag at its end, and NO_CLOSING, text without it."""
    pattern = re.escape(closing).replace("/", r"\/")
    return (
        # One terminal that includes the tag, because the text must not continue past it.
        f'THOUGHT: NO_CLOSING "{closing}"',
        rf"NO_CLOSING: /(?s:.*)/ & ~/(?s:.*){pattern}(?s:.*)/",
    )


def overlap(text: str, tag: str) -> int:
    """Returns the length of the longest suffix of the text that is a prefix of the tag."""
    return next((size for size in range(min(len(text), len(tag) - 1), 0, -1) if text.endswith(tag[:size])), 0)
