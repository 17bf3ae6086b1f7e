"""Help with names that nobody knows."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """What to append to "unknown ...": the nearest known name, or all of them."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
