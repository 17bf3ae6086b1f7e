"""Prompts that any model can continue, and whose answers say which prompt they came from.

Each is a list of lines with made-up words, which no other prompt has, and asks for a copy of the list from some line
on. A model that copies reads the whole prompt during its answer: state of another prompt shows in the words.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"
_GOODS = ("apples", "bricks", "candles", "copper", "honey", "lamps", "paper", "pearls", "rope", "salt", "silk", "wool")
_MADE_UP = re.compile(r"\b[A-Z][a-z]{7}\b")


@dataclass(frozen=True)
class Prompt:
    """A prompt, or a further turn: then the text of `parent`, its answer and `own` follow each other.

    `name` identifies it in the audit.
    """

    name: str
    own: str
    parent: Prompt | None = field(default=None, repr=False)

    @property
    def words(self) -> frozenset[str]:
        """The made-up words that it contains."""
        return frozenset(_MADE_UP.findall(self.own)) | (self.parent.words if self.parent else frozenset())


class PromptMaker:
    """Makes prompts from a seed; no made-up word occurs in two of them."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(f"audit {seed}")
        self._words = self._new_words()

    def document(self, name: str, num_lines: int) -> Prompt:
        """A list of `num_lines` lines, and the request to copy it."""
        lines = [self._line(number) for number in range(1, num_lines + 1)]
        opening = f"{next(self._words)} is the name of this list.\n" + "".join(lines)
        return Prompt(name, opening + self._question(num_lines))

    def turn(self, parent: Prompt, number: int, num_lines: int) -> Prompt:
        """A further turn of a conversation, about another line of the list."""
        name = f"{parent.name.partition(',')[0]}, turn {number}"
        return Prompt(name, "\n" + self._line(num_lines + number) + self._question(num_lines), parent)

    def beginning(self, prompt: Prompt, share: float) -> Prompt:
        """The first `share` of a prompt's text (0 to 1), cut anywhere, with another end."""
        text = prompt.own[: int(len(prompt.own) * share)]
        return Prompt(f"{share:.0%} of {prompt.name}", f"{text} {next(self._words)} and {next(self._words)}")

    def _question(self, num_lines: int) -> str:
        number = self._rng.randint(1, max(1, num_lines // 2))
        return f"The same list again, word for word, from line {number} on:\n{number}."

    def _line(self, number: int) -> str:
        count, goods = self._rng.randint(2, 99), self._rng.choice(_GOODS)
        return f"{number}. {next(self._words)} brought {count} {goods} to {next(self._words)}.\n"

    def _new_words(self) -> Iterator[str]:
        seen: set[str] = set()
        while True:
            letters = (self._rng.choice(_CONSONANTS) + self._rng.choice(_VOWELS) for _ in range(4))
            word = "".join(letters).capitalize()
            if word not in seen:
                seen.add(word)
                yield word
