"""Conversion of arguments in plain text to JSON, by the schema of the function."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

from penstock.server.openai.tool_calls.parser import Malformed

_MAX_PARTS = 64
# In this order: True is an `int` too.
_TYPES = {"boolean": bool, "integer": int, "number": float, "object": dict, "array": list, "null": type(None)}


def types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """Returns the JSON types that a value may have, by the first parts of its schema; empty if they do not restrict
    them. `root` is the schema that references point into.
    """
    types: set[str] = set()
    parts: list[Any] = [schema]
    followed: set[str] = set()
    # Thousands of arguments may refer to the same long chain of references.
    for _ in range(_MAX_PARTS):
        if not parts:
            break
        part = parts.pop()
        if not isinstance(part, Mapping):
            continue
        kind = part.get("type")
        kinds: list[Any] = kind if isinstance(kind, list) else [kind]
        named = {each for each in kinds if isinstance(each, str)}
        types |= named or {_type_name(value) for value in values_of(part)}
        for options in (part.get("anyOf"), part.get("oneOf"), part.get("allOf")):
            parts += options if isinstance(options, list) else ()
        reference = part.get("$ref")
        if isinstance(reference, str) and reference not in followed:
            followed.add(reference)
            parts.append(_referenced(reference, root))
    return frozenset(types)


def values_of(schema: Mapping[str, Any]) -> list[Any]:
    """Returns the values of a schema's `const` or `enum`; none if it has neither."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else []


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """Returns the schema that a schema is a reference to, if it is one."""
    reference = schema.get("$ref") if isinstance(schema, Mapping) else None
    return _referenced(reference, root) if isinstance(reference, str) else schema


def _referenced(reference: str, root: Mapping[str, Any]) -> Any:
    part: Any = root
    for key in reference.split("/")[1:]:
        part = part.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(part, Mapping) else None
    return part


def is_text(types: frozenset[str]) -> bool:
    """Whether a value of these types is always the text itself."""
    return not types - {"string"}


def to_json(text: str, types: frozenset[str]) -> str:
    """Returns a complete value as JSON: of one of the types if the text parses as it, otherwise a string."""
    try:
        value = value_of(text)
    except Malformed:
        value = text
    kind = _type_name(value)
    kinds = {kind, "number"} if kind == "integer" else {kind}
    if "string" in types and not kinds & types - {"string"}:
        value = text
    # A value of no requested type is passed on for the client to handle.
    return json.dumps(value, ensure_ascii=False)


def value_of(text: str) -> Any:
    """Returns the value of a JSON or Python literal. Raises `Malformed` if JSON cannot represent it."""
    for read in (json.loads, ast.literal_eval):
        try:
            value = read(text.strip())
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            continue
        return value
    raise Malformed


def escaped(text: str) -> str:
    """Returns a piece of text escaped for a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def properties_of(schema: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[Any]]:
    """Returns the schema of each argument, and the names of those that are required."""
    properties, required = schema.get("properties"), schema.get("required")
    return properties if isinstance(properties, Mapping) else {}, required if isinstance(required, list) else []


def _type_name(value: Any) -> str:
    if isinstance(value, str):
        return "string"
    return next((name for name, kind in _TYPES.items() if isinstance(value, kind)), "string")
