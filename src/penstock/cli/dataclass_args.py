"""The engine arguments as command-line flags, made from the fields of `EngineArgs`: no flag is written by hand."""

from __future__ import annotations

import argparse
import dataclasses
import typing

from penstock.config.engine import EngineArgs

_TYPES: dict[str, type] = {"int": int, "float": float, "str": str}


def add_engine_args(parser: argparse.ArgumentParser) -> None:
    """Adds `--model`, `--max-model-len` and so on to the parser."""
    group = parser.add_argument_group("engine")
    hints = typing.get_type_hints(EngineArgs)
    for field in dataclasses.fields(EngineArgs):
        flag = "--" + field.name.replace("_", "-")
        text = field.metadata["help"]
        if hints[field.name] in (bool, bool | None):
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=field.default, help=text)
            continue
        shown = "" if field.default is None else f" (default: {field.default})"
        group.add_argument(
            flag,
            type=_argument_type(hints[field.name]),
            default=field.default,
            choices=field.metadata["choices"] or None,
            metavar=None if field.metadata["choices"] else field.name.upper(),
            help=text + shown,
        )


def engine_kwargs(args: argparse.Namespace) -> dict[str, typing.Any]:
    """The parsed engine arguments, by name."""
    return {field.name: getattr(args, field.name) for field in dataclasses.fields(EngineArgs)}


def _argument_type(hint: typing.Any) -> type:
    """The type inside `X | None`."""
    kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)] or [hint]
    return _TYPES[kinds[0].__name__]
