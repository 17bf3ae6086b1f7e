"""Calls as XML, with arguments as plain text: Qwen3-Coder.

<tool_call>
<function=f>
<parameter=city>
Paris
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from penstock.server.openai.tool_calls import typed_text
from penstock.server.openai.tool_calls.parser import (
    Malformed,
    Scan,
    TaggedParser,
    Tools,
    read_name,
    read_tag,
    require,
    skip_whitespace,
)
from penstock.server.openai.tool_calls.tool_format import (
    RULE,
    ToolCallFormat,
    definitions_of,
    json_rule,
    lark_string,
)

OPENING_TAG, CLOSING_TAG = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_NAME_END = ">\n"
# A value's last newline belongs to the tag.
_VALUE_ENDS = ("\n" + _PARAMETER_END, _PARAMETER_END)


class Qwen3CoderParser(TaggedParser):
    """The outer tags may be missing, because the models sometimes omit them. Text arguments are streamed, all others
    are sent when they are complete.
    """

    BEGIN = _FUNCTION
    OUTER = (OPENING_TAG,)
    ENDS = (CLOSING_TAG,)

    def _call_after_tag(self, content: str) -> Scan[tuple[bool, str]]:
        try:
            name, _ = yield from read_name((yield), ">")
            require(name in self._tools)
        except Malformed:
            return False, self._break_off()
        self._begin(name, content)
        seen: set[str] = set()
        try:
            while (yield from self._parameter(self._tools[name], seen)):
                pass
        except Malformed:
            self._close(seen)
            return True, self._break_off()
        self._close(seen)
        self._end()
        return True, (yield)

    def _close(self, seen: set[str]) -> None:
        """Ends the arguments, also if the call breaks off between two of them."""
        self._parts.add_arguments(self.num_calls - 1, "}" if seen else "{}")

    def _parameter(self, schema: Mapping[str, Any], seen: set[str]) -> Scan[bool]:
        """Reads one argument; returns False at the function's end. If an argument is repeated, its first value is
        used.
        """
        char = yield from skip_whitespace((yield))
        require(char == "<")
        tag, _ = yield from read_tag("<", _PARAMETER, _FUNCTION_END)
        require(bool(tag))
        if tag == _FUNCTION_END:
            return False
        name, _ = yield from read_name((yield), ">")
        types = typed_text.types_of(typed_text.property_of(schema, name))
        head = f"{', ' if seen else '{'}{json.dumps(name, ensure_ascii=False)}: "
        if name in seen:
            yield from _read_text(lambda _: None)
        elif typed_text.is_text(types):
            seen.add(name)
            self._emit(f'{head}"')
            yield from _read_text(lambda text: self._emit(typed_text.escaped(text)))
            self._emit('"')
        else:
            pieces: list[str] = []
            yield from _read_text(pieces.append)
            seen.add(name)
            self._emit(head + typed_text.to_json("".join(pieces), types))
        return True


def _read_text(emit: Any) -> Scan[None]:
    """Reads a value and its closing tag, without the newlines next to the tags."""
    pending = ""
    char = yield
    if char == "\n":
        char = yield
    while True:
        pending += char
        while pending and not any(end.startswith(pending) for end in _VALUE_ENDS):
            emit(pending[0])
            pending = pending[1:]
        if pending in _VALUE_ENDS:
            return
        char = yield


class Qwen3CoderFormat(ToolCallFormat):
    """In a forced call, only `enum` and `const` of the schema are enforced for text arguments."""

    NAME = "qwen3_coder"
    PARSER = Qwen3CoderParser
    TAGS = (OPENING_TAG, CLOSING_TAG)
    TRIGGERS = (OPENING_TAG, _FUNCTION)
    # One terminal that includes the closing tag, because the text must not continue past it.
    TERMINALS = (
        'TEXT_ARGUMENT: NO_END "\\n</parameter>\\n"',
        r"NO_END: /(?s:.*)/ & ~/(?s:.*)\n<\/parameter>(?s:.*)/",
    )

    def forced_prefix(self, function: str | None) -> str:
        return f"{OPENING_TAG}\n{_FUNCTION}" + (f"{function}{_NAME_END}" if function else "")

    def _forced_calls(self, tools: Tools, function: str | None) -> Mapping[str, str]:
        return {name: self._call(name, schema, function) for name, schema in tools.items()}

    def _call(self, name: str, schema: Mapping[str, Any], function: str | None) -> str:
        head = [] if function else [lark_string(f"{name}{_NAME_END}")]
        rules: list[str] = []
        properties = schema.get("properties")
        required = schema.get("required") or ()
        for number, (key, kind) in enumerate((properties if isinstance(properties, Mapping) else {}).items()):
            rule = f"{RULE}_{number}"
            head.append(rule if key in required else f"{rule}?")
            rules.append(self._parameter(rule, key, kind, definitions_of(schema)))
        if not rules:
            head.append(f"{RULE}_any*")
            rules.append(f'{RULE}_any: "{_PARAMETER}" /[A-Za-z0-9_.-]{{1,64}}/ {lark_string(_NAME_END)} TEXT_ARGUMENT')
        end = self.literal(f"{_FUNCTION_END}\n{CLOSING_TAG}")
        return "\n".join([" ".join([*head, end]), *rules])

    def _parameter(self, rule: str, key: str, schema: Any, definitions: Mapping[str, Any]) -> str:
        head = f"{rule}: {lark_string(f'{_PARAMETER}{key}{_NAME_END}')}"
        end = lark_string(f"\n{_PARAMETER_END}\n")
        choices = _choices(schema)
        if choices:
            return f"{head} ({' | '.join(map(lark_string, choices))}) {end}"
        if typed_text.is_text(typed_text.types_of(schema)):
            return f"{head} TEXT_ARGUMENT"
        return f"{head} {rule}_value {end}\n{rule}_value: {json_rule({**schema, **definitions})}"


def _choices(schema: Any) -> list[str]:
    """Returns the allowed texts, if only certain ones are allowed."""
    if not isinstance(schema, Mapping):
        return []
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and values and all(isinstance(value, str) for value in values):
        return values
    return []
