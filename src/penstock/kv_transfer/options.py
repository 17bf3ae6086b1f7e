"""Checks a connector's own options, `kv_connector_extra_config`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from penstock.utils.errors import ConfigError
from penstock.utils.names import did_you_mean

Check = tuple[Callable[[Any], bool], str]
"""The condition for a valid value, and its description for error messages."""


def read_options(
    connector: str, given: Mapping[str, Any], defaults: Mapping[str, Any], **checks: Check
) -> dict[str, Any]:
    """Merges the given options into the defaults. Raises ConfigError naming an unknown or invalid one."""
    for key, value in given.items():
        if key not in checks:
            raise ConfigError(f"{connector} has no option {key!r}{did_you_mean(key, tuple(checks))}")
        is_right, wanted = checks[key]
        if not is_right(value):
            raise ConfigError(f"{key} of {connector} must be {wanted}, got {value!r}")
    for key in checks:
        if key not in given and key not in defaults:
            raise ConfigError(f"{connector} needs {key} in kv_connector_extra_config")
    return {**defaults, **given}


def is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)
