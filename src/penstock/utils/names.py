"""Help with unknown names and invalid text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean ...?`, or nothing where no known name is near."""
    import difflib  # here, because only mistakes need it

    found = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {found[0]}?" if found else ""


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """What to append to "unknown ...": the nearest known name, or all of them."""
    import difflib  # here, because only mistakes need it

    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"


def is_unicode(text: str) -> bool:
    """False for text with half a character in it (a lone surrogate), which JSON can bring and UTF-8 cannot say."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
