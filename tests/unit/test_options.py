"""Options of arguments that are JSON objects: conversion, and errors that name option, value and what is valid."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest

from penstock.config.options import NOT_AN_OPTION, Limits, Must, Text, convert_options, one_of, read_object
from penstock.utils.errors import ConfigError


def _is_even(value: int) -> bool:
    return value % 2 == 0


@dataclass(frozen=True, slots=True)
class Options:
    name: Annotated[Text, Must("a name")]
    count: Annotated[int, Limits(ge=1, le=8)] = 1
    steps: Annotated[int, Limits(ge=1)] = 1
    even: Annotated[int, Must("an even number", _is_even)] = 0
    kind: Literal["a", "b"] = "a"
    colour: Annotated[str, one_of("red", "blue")] = "red"
    is_on: bool | None = None
    names: tuple[Text, ...] = ()
    share: float = 1.0
    seen: int = field(default=0, metadata=NOT_AN_OPTION)


def test_options_are_converted_to_the_types_of_their_fields() -> None:
    given = read_object("config", '{"name": "x", "names": ["y"], "share": 2, "is_on": true}')
    assert convert_options(Options, given, "in config") == Options("x", names=("y",), share=2.0, is_on=True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "config needs name, a name"),
        ({"name": ""}, "name in config must be a name, got ''"),
        ({"nam": "x"}, "unknown key 'nam' in config; did you mean 'name'?"),
        ({"name": "x", "seen": 1}, "unknown key 'seen' in config"),
        ({"name": "x", "count": 9}, "count in config must be an integer from 1 to 8, got 9"),
        ({"name": "x", "count": True}, "count in config must be an integer from 1 to 8, got True"),
        ({"name": "x", "steps": 0}, "steps in config must be an integer of at least 1, got 0"),
        ({"name": "x", "even": 1}, "even in config must be an even number, got 1"),
        ({"name": "x", "even": "2"}, "even in config must be an even number, got '2'"),
        ({"name": "x", "kind": "c"}, "kind in config must be one of a, b, got 'c'"),
        ({"name": "x", "colour": ["red"]}, "colour in config must be one of red, blue, got ['red']"),
        ({"name": "x", "is_on": 1}, "is_on in config must be true or false, got 1"),
    ],
)
def test_errors_name_the_option_the_value_and_what_is_valid(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        convert_options(Options, given, "in config")
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("given", "message"),
    [("{", "config is not JSON: "), ("[]", "config must be an object"), ("[" * 20_000, "config is not JSON: ")],
    ids=["cut", "list", "deep"],
)
def test_an_argument_must_be_an_object(given: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_object("config", given)
