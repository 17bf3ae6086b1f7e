"""The command line's parser: short usage, help for terminals of 80 columns, helpful one-line errors."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from penstock.utils.names import nearest

USAGE_ERROR = 2
_COLUMNS, _MOST_COLUMNS = 80, 100
_HELP_POSITION = 32
_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS[f"{_letter}b"] = 1000**_power
    _UNITS[f"{_letter}ib"] = 1024**_power
_AMBIGUOUS = tuple("kmgt")
_SIZE = re.compile(r"([0-9]{1,19}|[0-9]{1,19}\.[0-9]*|\.[0-9]+)\s*([a-z]*)")


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Prints flags on the left, their help on the right, and switches that are on by default as `--[no-]name`."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=_HELP_POSITION, width=_terminal_columns() - 2)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if isinstance(action, Switch):
            return action.name if action.default is False else action.name.replace("--", "--[no-]", 1)
        return super()._format_action_invocation(action)

    def _format_action(self, action: argparse.Action) -> str:
        if action.nargs == argparse.PARSER:
            # Commands need no line that says COMMAND above them.
            commands: Any = action
            return self._join_parts([self._format_action(command) for command in commands._get_subactions()])
        return super()._format_action(action)

    def start_section(self, heading: str | None) -> None:
        names = {"positional arguments": "arguments", "options": "help"}
        super().start_section(names.get(heading or "", heading))


class Parser(argparse.ArgumentParser):
    """Accepts only complete flag names. Errors say what is wrong, suggest a correction, and name the help command."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, "formatter_class": HelpFormatter, **options})

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Like the base class, but rejects unknown flags here: the parser of the whole command has other flags."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flags = [text.split("=")[0] for text in unknown if text.startswith("-")]
            if not flags:
                self.error(f"unexpected argument {unknown[0]!r}")
            self.error(f"unknown flag {flags[0]}{nearest(flags[0].replace('_', '-'), self._option_string_actions)}")
        return parsed, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            raise argparse.ArgumentError(
                action, f"must be one of {', '.join(known)}, got {value!r}{nearest(str(value), known)}"
            )

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE_ERROR, f"{self.prog}: {message} (see {self.prog} --help)\n")


class Switch(argparse.BooleanOptionalAction):
    """`--name` and `--no-name`."""

    def __init__(self, option_strings: Sequence[str], dest: str, default: bool | None, help: str) -> None:
        super().__init__(option_strings, dest, default=default)
        self.help = f"{help} (default: on)" if default else help

    @property
    def name(self) -> str:
        return self.option_strings[0]


def add_values(group: Any, *flags: tuple[str, Callable[[str], Any], Any, str, str]) -> None:
    """Adds flags that take a value: name, type, default, metavar and help."""
    for flag, kind, default, metavar, text in flags:
        group.add_argument(flag, type=kind, default=default, metavar=metavar, help=text)


def whole_number(text: str) -> int:
    with contextlib.suppress(ValueError):
        if (value := int(text)).bit_length() < 64:
            return value
    raise argparse.ArgumentTypeError(f"must be a whole number of at most 64 bits, got {text!r}")


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None


def positive_number(text: str) -> float:
    value = number(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return value


def size(text: str) -> int:
    """Bytes from a number and a unit: `5GB` (10^9 each), `512MiB` (2^20 each), `1.5 TiB`, or a plain number of bytes.

    Raises ArgumentTypeError with a message that describes the accepted forms.
    """
    match = _SIZE.fullmatch(text.strip().lower())
    if match is None or match[2] not in (*_UNITS, *_AMBIGUOUS):
        raise argparse.ArgumentTypeError(f"must be a size such as 5GB, 512MiB or 1048576, got {text!r}")
    amount, unit = match.groups()
    if unit in _AMBIGUOUS:
        unit = unit.upper()
        raise argparse.ArgumentTypeError(
            f"{text!r} is ambiguous: write {amount}{unit}B (1000s) or {amount}{unit}iB (1024s)"
        )
    return int(amount) * _UNITS[unit] if amount.isdigit() else int(float(amount) * _UNITS[unit])


def format_size(num_bytes: int) -> str:
    """The shortest exact form in binary units, else two digits of the largest unit: `16 MiB`, `4.66 GiB`."""
    units = [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)]
    for unit, factor in units:
        if num_bytes >= factor:
            return f"{num_bytes // factor} {unit}" if num_bytes % factor == 0 else f"{num_bytes / factor:.2f} {unit}"
    return f"{num_bytes} B"


def count(text: str, low: int = 1) -> int:
    value = whole_number(text)
    if value < low:
        raise argparse.ArgumentTypeError(f"must be at least {low}, got {value}")
    return value


def count_from_zero(text: str) -> int:
    return count(text, low=0)


def at_most(high: int, low: int = 1) -> Callable[[str], int]:
    """Returns a parser of whole numbers from `low` to `high`."""

    def parse(text: str) -> int:
        if (value := count(text, low)) > high:
            raise argparse.ArgumentTypeError(f"must be at most {high:,}, got {value}")
        return value

    return parse


# 0 means a free one. The event loop would take the lowest 16 bits of a larger number.
port = at_most(65535, low=0)


def describe_default(value: Any, *, is_size: bool = False) -> str:
    """Returns the default to append to a flag's help: nothing if the help already describes the default."""
    return "" if value is None else f" (default: {format_size(value) if is_size else value})"


def _terminal_columns() -> int:
    try:
        return min(os.get_terminal_size(sys.stdout.fileno()).columns or _COLUMNS, _MOST_COLUMNS)
    except (OSError, ValueError, AttributeError):
        return _COLUMNS
