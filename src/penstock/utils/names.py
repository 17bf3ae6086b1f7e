"""Suggestions for unknown names, and checks of text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns `; did you mean ...?`, or an empty string if no known name is similar."""
    import difflib  # imported here because only errors need it

    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.7)
    return f"; did you mean {found[0]}?" if found else ""


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """Returns the text to append to "unknown ...": the nearest known name, or all of them."""
    import difflib  # imported here because only errors need it

    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"


def one_line(text: str) -> str:
    """Returns text of another program as one line that is safe to print: without control characters."""
    return "".join(letter if letter.isprintable() else " " for letter in " ".join(text.split()))


def is_unicode(text: str) -> bool:
    """Returns False for text with a lone surrogate, which JSON can contain and UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
