"""Describes the fields of a dataclass of arguments for the command line, and checks their types."""

from __future__ import annotations

import typing
from dataclasses import field
from typing import Any

from penstock.utils.errors import ConfigError


def argument(
    group: str,
    default: Any,
    help_text: str,
    choices: tuple[str, ...] = (),
    *,
    metavar: str = "",
    unit: str = "",
    server_only: bool = False,
) -> Any:
    """Returns a field with its default, and its flag's help: group, text, choices, placeholder of the value.

    `unit="bytes"` marks a size, which the command line takes with a unit, such as 4GiB. `server_only` marks a flag of
    `penstock serve` alone.
    """
    metadata = {"group": group, "help": help_text, "choices": choices, "metavar": metavar, "unit": unit}
    return field(default=default, metadata={**metadata, "server_only": server_only})


def check_types(args: Any) -> None:
    """Raises ConfigError if a field of a dataclass has another type than its annotation."""
    for name, hint in typing.get_type_hints(args.__class__).items():
        kinds: tuple[Any, ...] = tuple(typing.get_origin(kind) or kind for kind in typing.get_args(hint) or (hint,))
        value = getattr(args, name)
        accepted = (*kinds, int) if float in kinds else kinds
        if not isinstance(value, accepted) or (isinstance(value, bool) and bool not in kinds):
            wanted = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
            raise ConfigError(f"{name} must be {wanted}, got {value!r}")
