"""Command-line flags made from the fields of a dataclass of arguments: no flag is written by hand.

A field's metadata holds its `help` and its `choices`; a tuple becomes a flag that may be repeated.
"""

from __future__ import annotations

import argparse
import dataclasses
import typing

from penstock.config.engine import EngineArgs
from penstock.config.server import ServerArgs

_TYPES: dict[str, type] = {"int": int, "float": float, "str": str}


def add_engine_args(parser: argparse.ArgumentParser) -> None:
    """Adds `--model`, `--max-model-len` and so on to the parser."""
    _add_args(parser, EngineArgs, "engine")


def engine_kwargs(args: argparse.Namespace) -> dict[str, typing.Any]:
    """The parsed engine arguments, by name."""
    return _kwargs(args, EngineArgs)


def add_server_args(parser: argparse.ArgumentParser) -> None:
    """Adds `--host`, `--port` and so on to the parser."""
    _add_args(parser, ServerArgs, "server")


def server_args(args: argparse.Namespace, **overrides: typing.Any) -> ServerArgs:
    """The parsed server arguments."""
    return ServerArgs(**{**_kwargs(args, ServerArgs), **overrides})


def _add_args(parser: argparse.ArgumentParser, kind: type, title: str) -> None:
    group = parser.add_argument_group(title)
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        flag = "--" + field.name.replace("_", "-")
        text = field.metadata["help"]
        hint = hints[field.name]
        if hint in (bool, bool | None):
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=field.default, help=text)
        elif typing.get_origin(hint) is tuple:
            group.add_argument(flag, action="append", default=[], metavar=field.name.upper(), help=text)
        else:
            shown = "" if field.default is None else f" (default: {field.default})"
            group.add_argument(
                flag,
                type=_argument_type(hint),
                default=field.default,
                choices=field.metadata["choices"] or None,
                metavar=None if field.metadata["choices"] else field.name.upper(),
                help=text + shown,
            )


def _kwargs(args: argparse.Namespace, kind: type) -> dict[str, typing.Any]:
    values = {field.name: getattr(args, field.name) for field in dataclasses.fields(kind)}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def _argument_type(hint: typing.Any) -> type:
    """The type inside `X | None`."""
    kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)] or [hint]
    return _TYPES[kinds[0].__name__]
