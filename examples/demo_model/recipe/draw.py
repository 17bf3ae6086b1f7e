"""Seeded choices, and the rule that decides which items are held out.

A `Draw` is a random source bound to one split. The split is a property of an item's content and not of the seed that
drew it: an item has a key (the operands of a sum, the facts of a text), a hash of the key decides to which split it
belongs, and a generator redraws until the item belongs to its split. Two splits therefore cannot share an item, however
many items are drawn and whatever the seeds are.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")

HELD_OUT_IN = 10  # one key in this many is held out
MAX_REDRAWS = 2000

Message = dict[str, Any]


@dataclass(frozen=True)
class Item:
    """One training or evaluation example.

    Either `messages` (a conversation in the OpenAI form, learnt on the assistant's turns) or `text` (a plain document,
    learnt whole) is set. `value` is what an evaluation may compare an answer with, parsed; None if only the answer's
    text can be compared.
    """

    task: str
    key: str
    messages: list[Message] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    text: str = ""
    value: Any = None


def is_held_out(key: str) -> bool:
    """Returns whether items with this key belong to the held-out split."""
    digest = hashlib.blake2b(key.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_IN == 0


class Draw:
    """A seeded random source for one split.

    Args:
        seed: any text; equal seeds give equal draws on every machine and Python version from 3.11.
        held_out: whether to draw for the held-out split.
    """

    def __init__(self, seed: str, held_out: bool = False) -> None:
        self.rng = random.Random(seed)
        self.held_out = held_out

    def below(self, stop: int) -> int:
        """Returns an integer in [0, stop)."""
        return int(self.rng.random() * stop)

    def between(self, first: int, last: int) -> int:
        """Returns an integer in [first, last], both included."""
        return first + int(self.rng.random() * (last - first + 1))

    def pick(self, options: Sequence[T]) -> T:
        """Returns one of the options."""
        return options[int(self.rng.random() * len(options))]

    def some(self, options: Sequence[T], count: int) -> list[T]:
        """Returns `count` different options in random order."""
        return self.rng.sample(options, count)

    def chance(self, probability: float) -> bool:
        """Returns True with this probability."""
        return self.rng.random() < probability

    def owns(self, key: str) -> bool:
        """Returns whether an item with this key may be used in this split."""
        return is_held_out(key) == self.held_out

    def owned(self, make: Callable[[], T], key_of: Callable[[T], str]) -> T:
        """Draws with `make` until the result's key belongs to this split.

        Raises:
            RuntimeError: none of many results of `make` belongs to this split.
        """
        for _ in range(MAX_REDRAWS):
            made = make()
            if self.owns(key_of(made)):
                return made
        raise RuntimeError(f"no item of the split (held_out={self.held_out}) in {MAX_REDRAWS} draws of {make}")


def user(content: str) -> Message:
    """Returns a user's message."""
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    """Returns an assistant's message, on which the model is trained."""
    return {"role": "assistant", "content": content}


def system(content: str) -> Message:
    """Returns a system message."""
    return {"role": "system", "content": content}
