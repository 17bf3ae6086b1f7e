"""Command-line flags made from the fields of a dataclass of arguments: no flag is written by hand.

A field's metadata holds its `group` in the help, its `help`, its `choices`, its `metavar` and its `unit`; a tuple
becomes a flag that may be repeated.
"""

from __future__ import annotations

import argparse
import dataclasses
import typing
from collections.abc import Callable

from penstock.cli.parser import Switch, describe_default, number, size, whole_number
from penstock.config.engine import EngineArgs
from penstock.config.server import ServerArgs
from penstock.utils.errors import ConfigError

_TYPES: dict[str, Callable[[str], typing.Any]] = {"int": whole_number, "float": number, "str": str}
_METAVARS = {"int": "N", "float": "X", "str": "TEXT"}


def add_model_argument(
    parser: argparse.ArgumentParser, help_text: str = "as --model (default: the built-in model)"
) -> None:
    """Adds the positional MODEL."""
    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help=help_text)


def add_engine_args(parser: argparse.ArgumentParser, *, for_server: bool = False) -> None:
    """Adds `--model`, `--max-model-len` and so on to the parser."""
    _add_args(parser, EngineArgs, for_server)


def engine_kwargs(args: argparse.Namespace) -> dict[str, typing.Any]:
    """Returns the parsed engine arguments by name. Raises ConfigError if MODEL and --model disagree."""
    given = _kwargs(args, EngineArgs)
    positional = args.positional_model
    if positional is not None:
        if given["model"] not in (positional, EngineArgs.model):
            raise ConfigError(f"MODEL is {positional!r} and --model is {given['model']!r}: pass one of them")
        given["model"] = positional
    return given


def changed_engine_flags(args: argparse.Namespace) -> list[str]:
    """Returns the engine flags, except the model, that differ from their defaults."""
    given = _kwargs(args, EngineArgs)
    defaults = {field.name: field.default for field in dataclasses.fields(EngineArgs) if field.name != "model"}
    return [_flag(name) for name, default in defaults.items() if given[name] != default]


def add_server_args(parser: argparse.ArgumentParser) -> None:
    """Adds `--host`, `--port` and so on to the parser."""
    _add_args(parser, ServerArgs, for_server=True)


def server_args(args: argparse.Namespace, **overrides: typing.Any) -> ServerArgs:
    """The parsed server arguments."""
    return ServerArgs(**{**_kwargs(args, ServerArgs), **overrides})


def _add_args(parser: argparse.ArgumentParser, kind: type, for_server: bool) -> None:
    hints = typing.get_type_hints(kind)
    groups: dict[str, typing.Any] = {}
    for field in dataclasses.fields(kind):
        if field.metadata["server_only"] and not for_server:
            parser.set_defaults(**{field.name: field.default})
            continue
        title = field.metadata["group"]
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        _add_flag(groups[title], field, hints[field.name])


def _add_flag(group: typing.Any, field: dataclasses.Field[typing.Any], hint: typing.Any) -> None:
    flag, metadata = _flag(field.name), field.metadata
    text = metadata["help"]
    if hint in (bool, bool | None):
        group.add_argument(flag, action=Switch, default=field.default, help=text)
        return
    if typing.get_origin(hint) is tuple:
        group.add_argument(flag, action="append", default=[], metavar=metadata["metavar"] or "TEXT", help=text)
        return
    name = _type_name(hint)
    is_size = metadata["unit"] == "bytes"
    choices = metadata["choices"]
    if choices and metadata["metavar"]:
        # A list of the choices in braces would be too wide for the left column.
        text = f"{text}: {', '.join(choices)}"
    group.add_argument(
        flag,
        type=size if is_size else _TYPES[name],
        default=field.default,
        choices=choices or None,
        metavar=metadata["metavar"] or (None if choices else "SIZE" if is_size else _METAVARS[name]),
        help=(text + describe_default(field.default, is_size=is_size)).replace("%", "%%"),
    )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _kwargs(args: argparse.Namespace, kind: type) -> dict[str, typing.Any]:
    values = {field.name: getattr(args, field.name) for field in dataclasses.fields(kind)}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def _type_name(hint: typing.Any) -> str:
    """The name of the type inside `X | None`."""
    kinds: list[typing.Any] = [kind for kind in typing.get_args(hint) if kind is not type(None)] or [hint]
    return kinds[0].__name__
