"""Reasoning apart from the answer, in the formats of the models that think before they answer.

Where an answer's reasoning begins depends on the prompt: some chat templates open it (Qwen3-Thinking, DeepSeek-R1),
some close it at once because the client switched it off (`enable_thinking: false`), and with the others the model opens
it. `ReasoningFormat.start_of` tells which. A `ReasoningReader` then divides the text as it comes; how the text is cut
changes nothing in the merged result. The line breaks that set the tags apart are neither reasoning nor content.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.tokenizer.tokenizer import AddedToken, Tokenizer

_MAX_INDENT = 64
_TAIL_TOKENS = 16


class Start(enum.Enum):
    """Where an answer is at its beginning."""

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
    """How a family of models marks its reasoning. `added_tokens` says which tags are tokens of their own."""

    name: str
    opening: str
    closing: str
    by_default: Start
    added_tokens: Mapping[str, AddedToken] = field(default_factory=dict[str, AddedToken])

    @property
    def is_none(self) -> bool:
        """Whether this format knows no reasoning."""
        return self.by_default is Start.OVER

    def start_of(self, tokenizer: Tokenizer, prompt: list[int], continued: str | None) -> Start:
        """Where the answer to this prompt begins; `continued` is the text of the message that it continues, if any."""
        if self.is_none:
            return Start.OVER
        if continued is not None:
            return Start.INSIDE if continued.rfind(self.opening) > continued.rfind(self.closing) else Start.OVER
        tail = tokenizer.decode(prompt[-_TAIL_TOKENS:], skip_special_tokens=False).rstrip()
        if tail.endswith(self.opening):
            return Start.INSIDE
        return Start.OVER if tail.endswith(self.closing) else self.by_default

    def needs_special_tokens(self, start: Start) -> bool:
        """Whether a tag that may come is a special token, so that it is seen only in text that shows those."""
        tags = [self.added_tokens.get(tag) for tag in (self.opening, self.closing)]
        return start is not Start.OVER and any(tag is not None and tag.is_special for tag in tags)

    def grammar(self, start: Start) -> str | None:
        """What comes before an answer that is held to a grammar, in Lark: the rule `reasoning` and what it needs.

        None when nothing does.
        """
        if start is Start.OVER:
            return None
        closing, opening = self.added_tokens.get(self.closing), self.added_tokens.get(self.opening)
        thought = "THOUGHT" if closing is None else f"(THOUGHT | NO_CLOSING <[{closing.id}]>)"
        # Where the tag is a token, its first characters alone must not lead a model into reasoning.
        opened = f'"{self.opening}"' if opening is None else f"<[{opening.id}]>"
        match start:
            case Start.INSIDE:
                rule = f"{thought} GAP"
            case Start.EXPECTED:
                rule = f"{opened}? {thought} GAP"
            case _:
                rule = f"({opened} {thought} GAP)?"
        pattern = re.escape(self.closing).replace("/", r"\/")
        return "\n".join(
            (
                f"reasoning: {rule}",
                # One terminal with the tag, because the text must not run past it.
                f'THOUGHT: NO_CLOSING "{self.closing}"',
                rf"NO_CLOSING: /(?s:.*)/ & ~/(?s:.*){pattern}(?s:.*)/",
                r"GAP: /[\r\n ]{0,4}/",
            )
        )

    def reader(self, start: Start) -> ReasoningReader:
        """A reader of one completion."""
        return ReasoningReader(self.opening, self.closing, start)


class ReasoningReader:
    """Divides one completion: `feed` any number of times, `finish` once."""

    def __init__(self, opening: str, closing: str, start: Start) -> None:
        self._opening = opening
        self._closing = closing
        self._start = start
        self._pending = ""
        self._is_open = start is Start.INSIDE
        self._is_undecided = start in (Start.EXPECTED, Start.POSSIBLE)
        self._drops_breaks = True  # line breaks at the beginning of what comes now

    def feed(self, text: str) -> tuple[str, str]:
        """The reasoning and the content that the next piece brought."""
        if not self._is_open and not self._is_undecided:
            return "", self._without_breaks(text) if self._start is not Start.OVER else text
        self._pending += text
        if self._is_undecided and not self._decide():
            return "", ""
        return self._divide()

    def finish(self) -> tuple[str, str]:
        """What was held back, when nothing comes any more."""
        pending, self._pending = self._pending, ""
        if self._is_open or (self._is_undecided and self._start is Start.EXPECTED):
            return self._without_breaks(pending), ""
        return "", pending

    def _decide(self) -> bool:
        """Whether the answer begins with the opening tag is known now."""
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
            # No reasoning: all of it is content, as it stands.
            self._start = Start.OVER
            return "", text
        text = self._without_breaks(text)
        place = text.find(self._closing)
        if place >= 0:
            self._is_open = False
            self._drops_breaks = True
            # The last line break before the tag belongs to the tag.
            return text[:place].removesuffix("\n"), self._without_breaks(text[place + len(self._closing) :])
        cut = len(text) - max(_overlap(text, self._closing), _overlap(text, f"\n{self._closing}"))
        self._pending = text[cut:]
        return text[:cut], ""

    def _without_breaks(self, text: str) -> str:
        if self._drops_breaks:
            text = text.lstrip("\r\n")
            self._drops_breaks = not text
        return text


def _overlap(text: str, tag: str) -> int:
    """The length of the longest end of the text with which the tag begins."""
    return next((size for size in range(min(len(text), len(tag) - 1), 0, -1) if text.endswith(tag[:size])), 0)


REASONING_FORMATS: dict[str, ReasoningFormat] = {
    each.name: each
    for each in (
        ReasoningFormat("qwen3", "<think>", "</think>", Start.POSSIBLE),
        ReasoningFormat("deepseek_r1", "<think>", "</think>", Start.EXPECTED),
        ReasoningFormat("none", "", "", Start.OVER),
    )
}


def make_reasoning_format(name: str, tokenizer: Tokenizer | None) -> ReasoningFormat:
    """The format of this name, with what the tokenizer makes of its tags."""
    known = REASONING_FORMATS[name]
    tokens = {} if tokenizer is None else tokenizer.added_tokens
    tags = {tag: tokens[tag] for tag in (known.opening, known.closing) if tag in tokens}
    return ReasoningFormat(known.name, known.opening, known.closing, known.by_default, tags)
