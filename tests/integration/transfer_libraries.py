"""Finds the transfer libraries that can be used here; tests of the others are skipped."""

from __future__ import annotations

import ctypes
import importlib.util
from typing import Any

import pytest

from penstock.kv_transfer.transports.agents import LIBRARIES

_SHARED_OBJECTS = {"mooncake": ("libibverbs.so.1", "librdmacm.so.1", "libnl-3.so.200", "libnl-route-3.so.200")}


def _missing(library: str) -> str:
    if all(importlib.util.find_spec(module) is None for module in LIBRARIES[library].modules):
        return library
    for name in _SHARED_OBJECTS.get(library, ()):
        try:
            ctypes.CDLL(name)
        except OSError:
            return name
    return ""


def with_library(library: str, *values: Any, exhaustive: bool = False) -> Any:
    """Returns a case of `pytest.mark.parametrize` that is skipped without the library."""
    missing = _missing(library)
    marks = [pytest.mark.skipif(bool(missing), reason=f"{missing} is not installed")]
    return pytest.param(*values, marks=[*marks, pytest.mark.exhaustive] if exhaustive else marks)


LIBRARY_KINDS = [with_library(library, library) for library in LIBRARIES]
