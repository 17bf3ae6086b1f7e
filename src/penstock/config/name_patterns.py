"""Regular expressions of other people's files, matched with names in limited time.

`re` tries one way of matching after another, and how many there are can grow exponentially with a name. Before a
pattern is used, the number of its ways is bounded from above.
"""

from __future__ import annotations

import functools
import math
import re

_LONGEST = 512
_MOST_WAYS = 1 << 22  # about 0.2 seconds
_PIECE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?[:=!]|\(\?|[()|*+?{]|.", re.DOTALL)


def ends_with_match(pattern: str, name: str) -> bool:
    """Returns whether the pattern matches the whole name, or what follows one of its dots.

    Raises ValueError, with a reason, for an invalid pattern and for one that could take long.
    """
    if max(len(pattern), len(name)) > _LONGEST:
        raise ValueError(f"patterns and names of at most {_LONGEST} characters are matched")
    return _checked(pattern, len(name)).match(name) is not None


@functools.lru_cache(1 << 15)
def _checked(pattern: str, length: int) -> re.Pattern[str]:
    if _num_ways(pattern, length) > _MOST_WAYS:
        raise ValueError("it has so many repetitions and alternatives that matching could take very long")
    try:
        return re.compile(rf"(.*\.)?({pattern})$")
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(str(error)) from None


def _num_ways(pattern: str, length: int) -> int:
    """Returns an upper bound of the ways in which a pattern divides `length` characters. Raises ValueError for groups
    that are repeated, or have other extensions than (?:, (?= and (?!, for which there is none.
    """
    repetitions, choices, alternatives, last = 1, 1, [1], ""
    for piece in _PIECE.findall(pattern):
        if piece in ("*", "+", "?", "{"):
            if last == ")" and piece != "?":
                raise ValueError("a repeated group can take exponentially long: write it without the repetition")
            repetitions += 1
        elif piece == "(?":
            raise ValueError("of groups that begin with (? only (?:, (?= and (?! are matched")
        elif piece.startswith("("):
            alternatives.append(1)
        elif piece == "|":
            alternatives[-1] += 1
        elif piece == ")" and len(alternatives) > 1:
            choices *= alternatives.pop()
        last = piece
    return math.comb(length + repetitions, repetitions) * choices * math.prod(alternatives)
