"""Memory that the C library keeps for later although nothing uses it any more."""

from __future__ import annotations

import ctypes
from collections.abc import Callable


def _find_trim() -> Callable[[int], object]:
    """glibc's `malloc_trim`; other C libraries have none, and give memory back by themselves."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return (lambda _: None) if trim is None else trim


_trim = _find_trim()


def release_freed_memory() -> None:
    """Returns freed memory to the operating system. Takes milliseconds per gigabyte; other Python threads go on."""
    _trim(0)
