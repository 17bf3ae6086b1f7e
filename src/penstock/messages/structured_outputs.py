"""Constraints on a request's output: a JSON schema, a regular expression, a grammar or a choice.

The names are those of vLLM. The constraint is sent to the engine core as a `GrammarSpec`, one kind and one text, which
is comparable and hashable, so that equal requests share a compiled grammar.
"""

# The values come from users and may have types other than those declared.
# pyright: reportUnnecessaryIsInstance=false

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NoReturn

from penstock.utils.errors import RequestError
from penstock.utils.names import is_unicode

MAX_GRAMMAR_BYTES = 64 << 10
MAX_CHOICES = 1024


class GrammarKind(enum.StrEnum):
    JSON_SCHEMA = "json"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    GRAMMAR = "grammar"
    CHOICE = "choice"


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """`text` is the schema as JSON, the regular expression, the grammar, or the choices as a JSON list; "" for
    JSON_OBJECT. `reasoning` is a Lark rule of that name for the text before it; "" for none.
    """

    kind: GrammarKind
    text: str
    reasoning: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """What the whole output must match; exactly one is given.

    `json` is a JSON schema, as text or as a mapping. `regex` is in Rust's syntax, which is Python's without
    look-arounds and back-references. `grammar` is written in Lark or in GBNF. `json_object` allows any JSON object;
    False is the same as absent. In addition to one of these, `reasoning` is a Lark grammar with a rule of that name for
    the text before the matched part. Raises RequestError that names the field.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    reasoning: str | None = None

    def __post_init__(self) -> None:
        self.spec()

    def spec(self) -> GrammarSpec:
        """The specification to compile."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "reasoning"}
        if not isinstance(values["json_object"], bool | None):
            _refuse("json_object", "must be True or False")
        given = [name for name, value in values.items() if value is not None and value is not False]
        if len(given) != 1:
            got = f"got {' and '.join(given)}" if given else "got none"
            raise RequestError(f"exactly one of {', '.join(values)} must be given, {got}", "structured_outputs")
        (name,) = given
        kind = GrammarKind(name)
        return GrammarSpec(kind, _text(kind, values[name]), _reasoning(self.reasoning))


def _refuse(name: str, what: str) -> NoReturn:
    raise RequestError(f"{name} {what}", name)


def _text(kind: GrammarKind, value: Any) -> str:
    text: Any = value
    if kind is GrammarKind.JSON_OBJECT:
        return ""
    if kind is GrammarKind.CHOICE:
        text = _choices(value)
    elif isinstance(value, Mapping) and kind is GrammarKind.JSON_SCHEMA:
        text = _to_json(kind, dict(value))  # pyright: ignore[reportUnknownArgumentType]
    if not isinstance(text, str) or not text.strip():
        _refuse(kind, "must be text that is not empty")
    if not is_unicode(text):
        _refuse(kind, "must be valid Unicode")
    if len(text.encode()) > MAX_GRAMMAR_BYTES:
        _refuse(kind, f"must be at most {MAX_GRAMMAR_BYTES} bytes, got {len(text.encode())}")
    if kind is GrammarKind.JSON_SCHEMA:
        _check_schema(text)
    return text


def _reasoning(value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, str) or not is_unicode(value) or len(value.encode()) > MAX_GRAMMAR_BYTES:
        _refuse("reasoning", f"must be text of at most {MAX_GRAMMAR_BYTES} bytes")
    return value


def _choices(value: Any) -> str:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        _refuse("choice", "must be a list of strings")
    if not 1 <= len(value) <= MAX_CHOICES:  # pyright: ignore[reportUnknownArgumentType]
        _refuse("choice", f"must hold between 1 and {MAX_CHOICES} strings, got {len(value)}")  # pyright: ignore[reportUnknownArgumentType]
    choices: list[Any] = list(value)  # pyright: ignore[reportUnknownArgumentType]
    if not all(isinstance(choice, str) and choice for choice in choices):
        _refuse("choice", "must be a list of strings that are not empty")
    return _to_json(GrammarKind.CHOICE, choices)


def _to_json(kind: GrammarKind, value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        _refuse(kind, f"cannot be written as JSON: {error}")


def _check_schema(text: str) -> None:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        _refuse("json", f"is not valid JSON: {error}")
    if not isinstance(schema, dict):
        _refuse("json", "must be a JSON schema that is an object")
