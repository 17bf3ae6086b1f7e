"""Reads numbers of a checkpoint's `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.utils.errors import ConfigError


def read_count(raw: Mapping[str, Any], name: str, default: int | None = None, least: int = 1) -> int:
    """Returns an integer field; `default` replaces a missing or null one.

    Raises ConfigError for another type or a smaller number, KeyError if a field without a default is missing.
    """
    value = raw[name] if default is None else raw.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name} must be an integer of at least {least}, got {value!r}")
    return value
