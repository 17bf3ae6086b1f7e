"""Returning unused memory of the C library's allocator to the operating system."""

from __future__ import annotations

import ctypes
from collections.abc import Callable


def _find_trim() -> Callable[[int], object]:
    """Returns glibc's `malloc_trim`; other C libraries lack it and return memory by themselves."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return (lambda _: None) if trim is None else trim


_trim = _find_trim()


def release_freed_memory() -> None:
    """Returns freed memory to the operating system. Takes milliseconds per gigabyte; other Python threads continue."""
    _trim(0)
