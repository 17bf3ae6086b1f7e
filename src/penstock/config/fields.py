"""Reads numbers of a checkpoint's `config.json`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from penstock.utils.errors import ConfigError

# Sizes of tensors and kernels have 32 bits. Lists of layers are made before any tensor is read.
_MOST, _MOST_LAYERS = 2**31 - 1, 1 << 16


def read_count(raw: Mapping[str, Any], name: str, default: int | None = None, least: int = 1) -> int:
    """Returns an integer field; `default` replaces a missing or null one.

    Raises ConfigError for another type, a smaller number or one of more than 31 bits, or more than 65536 layers;
    KeyError if a field without a default is missing.
    """
    most = _MOST_LAYERS if name == "num_hidden_layers" else _MOST
    value = raw[name] if default is None else raw.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        bound = f"at most {most}" if type(value) is int and value > most else f"at least {least}"
        raise ConfigError(f"{name} must be an integer of {bound}, got {value!r}")
    return value


def read_number(raw: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """Returns a number field; `default` replaces a missing or null one.

    Raises ConfigError for another type and for a number that is not positive and finite; KeyError if a field without a
    default is missing.
    """
    value = raw[name] if default is None else raw.get(name)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ConfigError(f"{name} must be a positive number, got {value!r}")
    return float(value)
