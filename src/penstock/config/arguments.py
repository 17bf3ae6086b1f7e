"""How a dataclass of arguments describes its fields to the command line."""

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
    """A field with its default, and what the help shows of its flag: group, text, choices, placeholder of the value.

    `unit="bytes"` marks a size, which the command line takes with a unit, such as 4GiB. What is `server_only` is a flag
    of `penstock serve` alone.
    """
    metadata = {"group": group, "help": help_text, "choices": choices, "metavar": metavar, "unit": unit}
    return field(default=default, metadata={**metadata, "server_only": server_only})
