"""Reads arguments that are JSON objects, such as `--kv-transfer-config`, and the options inside them.

The options of an object are the fields of a dataclass. Their annotations say what is valid: the type, its `Limits`, and
with `Must` a further condition and its description. msgspec converts the values; it is imported with the first one, so
that a command's help, which has the dataclasses' fields, need not wait for it.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import Annotated, Any, Literal, TypeVar, Union

from penstock.utils.errors import ConfigError
from penstock.utils.names import did_you_mean

_T = TypeVar("_T")

NOT_AN_OPTION = {"is_option": False}


@dataclass(frozen=True, slots=True)
class Limits:
    """The arguments of `msgspec.Meta`."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    min_length: int | None = None
    max_length: int | None = None


Text = Annotated[str, Limits(min_length=1)]


@dataclass(frozen=True, slots=True)
class Must:
    """Describes a valid value of an option, for errors. `is_right` checks a value that has the right type."""

    be: str
    is_right: Callable[[Any], bool] | None = None


def one_of(*choices: str) -> Must:
    return Must(f"one of {', '.join(choices)}", lambda value: value in choices)


def read_object(argument: str, value: Any) -> Mapping[str, Any]:
    """Returns an argument's object, or parses its JSON text. Raises ConfigError."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{argument} is not JSON: {error}") from None
    if not isinstance(value, Mapping):
        raise ConfigError(f"{argument} must be an object, got {value!r}")
    return value  # pyright: ignore[reportUnknownVariableType]


def convert_options(kind: type[_T], given: Mapping[str, Any], place: str) -> _T:
    """Makes a dataclass of the options given. `place` says where they are, such as "in kv_events_config". Fields with
    the metadata NOT_AN_OPTION cannot be given.

    Raises ConfigError naming an option that is unknown, invalid or missing.
    """
    hints = typing.get_type_hints(kind, include_extras=True)
    options = [each for each in fields(kind) if each.metadata.get("is_option", True)]  # pyright: ignore[reportArgumentType]
    known = tuple(option.name for option in options)
    for key in given:
        if key not in known:
            raise ConfigError(f"unknown key {key!r} {place}{did_you_mean(str(key), known)}")
    for option in options:
        if option.name not in given and option.default is MISSING and option.default_factory is MISSING:
            raise ConfigError(f"{place.split()[-1]} needs {option.name}, {_wanted(hints[option.name])}")
    return kind(**{key: _convert(value, hints[key], f"{key} {place}") for key, value in given.items()})


def replace_options(config: _T, changes: Mapping[str, Any], place: str) -> _T:
    """Returns the dataclass with other values of options. Raises ConfigError as `convert_options` does."""
    hints = typing.get_type_hints(type(config), include_extras=True)
    return replace(config, **{key: _convert(value, hints[key], f"{key} {place}") for key, value in changes.items()})  # pyright: ignore[reportArgumentType, reportUnknownVariableType]


def _convert(value: Any, hint: Any, name: str) -> Any:
    import msgspec

    try:
        converted = msgspec.convert(value, _limited(hint))
        if all(must.is_right is None or must.is_right(converted) for must in _extras(hint, Must)):
            return converted
    except msgspec.ValidationError:
        pass
    raise ConfigError(f"{name} must be {_wanted(hint)}, got {value!r}")


def _limited(hint: Any) -> Any:
    """Returns the type with `Limits` as msgspec knows them."""
    import msgspec

    origin, args = typing.get_origin(hint), tuple(map(_limited, typing.get_args(hint)))
    if origin is Annotated:
        return Annotated[tuple(msgspec.Meta(**asdict(each)) if isinstance(each, Limits) else each for each in args)]
    if origin is tuple:
        return tuple[args]
    return Union[args] if isinstance(hint, types.UnionType) else hint  # noqa: UP007


def _extras(hint: Any, kind: type[_T]) -> list[_T]:
    return [each for each in getattr(hint, "__metadata__", ()) if isinstance(each, kind)]


def _wanted(hint: Any) -> str:
    """Describes the valid values of an option."""
    for must in _extras(hint, Must):
        return must.be
    for limits in _extras(hint, Limits):
        if limits.ge is not None:
            bound = f"of at least {limits.ge}" if limits.le is None else f"from {limits.ge} to {limits.le}"
            return f"an integer {bound}"
    plain = typing.get_args(hint)[0] if typing.get_origin(hint) is Annotated else hint
    if isinstance(plain, types.UnionType):
        return _wanted(typing.get_args(plain)[0])
    if typing.get_origin(plain) is Literal:
        return f"one of {', '.join(typing.get_args(plain))}"
    return {bool: "true or false", str: "text"}.get(plain, "an object")
