"""Describes the fields of a dataclass of arguments for the command line."""

from __future__ import annotations

from dataclasses import field
from typing import Any


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
