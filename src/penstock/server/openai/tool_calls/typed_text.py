"""Conversion of arguments in plain text to JSON, by the schema of the function."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

_WORDS = {"True": "true", "False": "false", "None": "null"}
_TYPES = {"boolean": bool, "integer": int, "number": (int, float), "object": dict, "array": list, "null": type(None)}


def types_of(schema: Any) -> frozenset[str]:
    """Returns the JSON types that a value may have; empty if the schema does not restrict them."""
    if not isinstance(schema, Mapping):
        return frozenset()
    kind = schema.get("type")
    kinds: list[Any] = kind if isinstance(kind, list) else [kind]
    types = frozenset(each for each in kinds if isinstance(each, str))
    for key in ("anyOf", "oneOf"):
        options = schema.get(key)
        if isinstance(options, list):
            types |= frozenset().union(*map(types_of, options))
    if not types and isinstance(schema.get("enum"), list):
        types = frozenset(_type_name(value) for value in schema["enum"])
    return types


def is_text(types: frozenset[str]) -> bool:
    """Whether a value of these types is always the text itself."""
    return not types - {"string"}


def to_json(text: str, types: frozenset[str]) -> str:
    """Returns a complete value as JSON: of one of the types if the text parses as it, otherwise a string."""
    stripped = text.strip()
    candidate = _WORDS.get(stripped, stripped)
    try:
        value = json.loads(candidate, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    if _fits(value, types):
        return candidate
    if "string" in types:
        return json.dumps(text, ensure_ascii=False)
    # Neither a requested type nor text: passed on for the client to handle.
    return candidate


def escaped(text: str) -> str:
    """Returns a piece of text escaped for a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def property_of(schema: Mapping[str, Any], name: str) -> Any:
    """Returns the schema of one argument; None if there is none."""
    properties = schema.get("properties")
    return properties.get(name) if isinstance(properties, Mapping) else None


def _fits(value: Any, types: frozenset[str]) -> bool:
    if isinstance(value, bool):
        return "boolean" in types
    return any(isinstance(value, _TYPES[name]) for name in types if name in _TYPES and name != "boolean")


def _type_name(value: Any) -> str:
    if isinstance(value, str):
        return "string"
    return next((name for name, kind in _TYPES.items() if isinstance(value, kind)), "string")


def _refuse(constant: str) -> NoReturn:
    """Rejects NaN and Infinity, which Python's parser accepts but JSON does not have."""
    raise ValueError(constant)
