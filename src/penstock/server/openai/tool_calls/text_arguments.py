"""Calls whose arguments are plain text between tags, each with its name: what Qwen3-Coder's and GLM's formats share."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from penstock.server.openai.tool_calls import typed_text
from penstock.server.openai.tool_calls.parser import Malformed, Scan, TaggedParser, require
from penstock.server.openai.tool_calls.tool_format import (
    RULE,
    ToolCallFormat,
    bounded,
    definitions_of,
    json_rule,
    lark_string,
)


class TextArgumentsParser(TaggedParser):
    """Text arguments are streamed, all others are sent when they are complete. `VALUE_END` is the tag after a value.
    `CALL_ENDS` are the ends of a call that also end a value, because models sometimes omit that tag.

    With `BREAKS` one line break at either end of a value belongs to the tags.
    """

    VALUE_END: ClassVar[str]
    CALL_ENDS: ClassVar[tuple[str, ...]] = ()
    BREAKS: ClassVar[bool]

    def _call_after_tag(self, content: str) -> Scan[tuple[bool, str]]:
        try:
            name, char = yield from self._name()
            require(name in self._tools)
        except Malformed:
            return False, self._break_off()
        self._begin(name, content)
        self._held.append(char)  # it is not used yet
        seen: set[str] = set()
        try:
            while (key := (yield from self._key(char))) is not None:
                if not (yield from self._value(key, self._tools[name], seen)):
                    break
                char = yield
        except Malformed:
            self._close(seen)
            return True, self._break_off()
        self._close(seen)
        self._end()
        return True, (yield)

    def _name(self) -> Scan[tuple[str, str]]:
        """Reads the function's name; returns it, and the first character after it."""
        raise NotImplementedError

    def _key(self, char: str) -> Scan[str | None]:
        """Reads an argument's name, to the beginning of its value; returns None at the end of the call."""
        raise NotImplementedError

    def _close(self, seen: set[str]) -> None:
        """Ends the arguments, also if the call breaks off between two of them."""
        self._parts.add_arguments(self.num_calls - 1, "}" if seen else "{}")

    def _value(self, key: str, schema: Mapping[str, Any], seen: set[str]) -> Scan[bool]:
        """Reads a value and the tag after it; returns whether the call goes on. If an argument is repeated, its first
        value is used.
        """
        types = typed_text.types_of(typed_text.properties_of(schema)[0].get(key), schema)
        head = f"{', ' if seen else '{'}{json.dumps(key, ensure_ascii=False)}: "
        if key in seen:
            goes_on = yield from self._text(lambda _: None)
        elif typed_text.is_text(types):
            self._emit(f'{head}"')
            goes_on = yield from self._text(lambda text: self._emit(typed_text.escaped(text)))
            self._emit('"')
        else:
            pieces: list[str] = []
            goes_on = yield from self._text(pieces.append)
            self._emit(head + typed_text.to_json("".join(pieces), types))
        seen.add(key)
        return goes_on

    def _text(self, emit: Callable[[str], object]) -> Scan[bool]:
        tags = (self.VALUE_END, *self.CALL_ENDS)
        ends = (*tags, *map("\n".__add__, tags)) if self.BREAKS else tags
        pending = ""
        char = yield
        if self.BREAKS and char == "\n":
            char = yield
        while True:
            pending += char
            while pending and not any(end.startswith(pending) for end in ends):
                emit(pending[0])
                pending = pending[1:]
            if pending in ends:
                return pending.endswith(self.VALUE_END)
            char = yield


class TextArgumentsFormat(ToolCallFormat):
    """In a forced call, only `enum` and `const` of the schema are enforced for text arguments.

    A call is written as `OPENING`, the name, `NAME_END`, for each argument `BEFORE_KEY`, its name, `AFTER_KEY`, the
    value and `AFTER_VALUE`, and then `CLOSING`.
    """

    OPENING: ClassVar[str]
    NAME_END: ClassVar[str]
    BEFORE_KEY: ClassVar[str]
    AFTER_KEY: ClassVar[str]
    AFTER_VALUE: ClassVar[str]
    CLOSING: ClassVar[str]

    def forced_prefix(self, function: str | None) -> str:
        return self.OPENING + (f"{function}{self.NAME_END}" if function else "")

    def _forced_call(self, name: str, schema: Mapping[str, Any], function: str | None) -> str:
        head = [] if function else [lark_string(f"{name}{self.NAME_END}")]
        known, required = typed_text.properties_of(schema)
        head += [f"{RULE}_{number}{'' if key in required else '?'}" for number, key in enumerate(known)]
        rules = bounded(
            self._parameter(f"{RULE}_{number}", key, kind, definitions_of(schema))
            for number, (key, kind) in enumerate(known.items())
        )
        if not rules:
            before, after = lark_string(self.BEFORE_KEY), lark_string(self.AFTER_KEY)
            head.append(f"{RULE}_any*")
            rules.append(f"{RULE}_any: {before} /[A-Za-z0-9_.-]{{1,64}}/ {after} TEXT_ARGUMENT")
        return "\n".join([" ".join([*head, self.literal(self.CLOSING)]), *rules])

    def _parameter(self, rule: str, key: str, schema: Any, definitions: Mapping[str, Any]) -> str:
        head = f"{rule}: {lark_string(f'{self.BEFORE_KEY}{key}{self.AFTER_KEY}')}"
        end = lark_string(self.AFTER_VALUE)
        choices = _choices(typed_text.resolved(schema, definitions))
        if choices:
            return f"{head} ({' | '.join(map(lark_string, choices))}) {end}"
        if typed_text.is_text(typed_text.types_of(schema, definitions)):
            return f"{head} TEXT_ARGUMENT"
        return f"{head} {rule}_value {end}\n{rule}_value: {json_rule({**schema, **definitions})}"


def text_terminals(after_value: str) -> tuple[str, str]:
    """Returns the lines of Lark for a text argument, up to and including what follows a value."""
    tag = re.escape(after_value.removesuffix("\n")).replace("\\\n", r"\n").replace("/", r"\/")
    return (
        # One terminal that includes the closing tag, because the text must not continue past it.
        f"TEXT_ARGUMENT: NO_END {lark_string(after_value)}",
        rf"NO_END: /(?s:.*)/ & ~/(?s:.*){tag}(?s:.*)/",
    )


def _choices(schema: Any) -> list[str]:
    """Returns the allowed texts, if only certain ones are allowed."""
    values = typed_text.values_of(schema) if isinstance(schema, Mapping) else []
    return values if all(isinstance(value, str) for value in values) else []
