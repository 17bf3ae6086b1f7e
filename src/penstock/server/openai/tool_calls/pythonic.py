"""Calls as a list of Python calls: the whole answer (Llama 3.2 and 4, ToolACE), or between tags (LFM2).

[f(city='Paris', days=2), g()]
<|tool_call_start|>[f(city='Paris', days=2), g()]<|tool_call_end|>
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

from penstock.server.openai.tool_calls import typed_text
from penstock.server.openai.tool_calls.parser import (
    Malformed,
    Scan,
    TaggedParser,
    ToolCallParser,
    read_name,
    read_tag,
    require,
    skip_whitespace,
)
from penstock.server.openai.tool_calls.tool_format import (
    RULE,
    ToolCallFormat,
    bounded,
    definitions_of,
    json_rule,
    lark_string,
)

PYTHON_START, PYTHON_END = "<|python_start|>", "<|python_end|>"
LFM2_START, LFM2_END = "<|tool_call_start|>", "<|tool_call_end|>"
_BRACKETS = {"(": ")", "[": "]", "{": "}"}
_MAX_DEPTH = 64


class _PythonCallParser(ToolCallParser):
    """A call is emitted at its closing bracket: before that it may turn out not to be a call."""

    def _call(self, char: str, content: str) -> Scan[tuple[bool, str]]:
        """Reads a call; returns whether it was one, and the next character, or the one at which it is malformed."""
        try:
            name, arguments = yield from self._expression(char)
        except Malformed:
            return False, self._held[-1]
        self._begin(name, content)
        self._emit(json.dumps(arguments, ensure_ascii=False, allow_nan=False))
        self._end()
        return True, (yield)

    def _expression(self, char: str) -> Scan[tuple[str, dict[str, Any]]]:
        """Reads one call to its closing bracket. Raises `Malformed`."""
        name, _ = yield from read_name(char, "(")
        require(name in self._tools)
        arguments: dict[str, Any] = {}
        char = yield from skip_whitespace((yield))
        while char != ")":
            key, _ = yield from read_name(char, "=")
            require(key.isidentifier() and key not in arguments)
            text, char = yield from _argument()
            arguments[key] = typed_text.value_of(text)
            if char == ",":
                char = yield from skip_whitespace((yield))
        return name, arguments


class PythonicParser(_PythonCallParser):
    def _answer(self) -> Scan[None]:
        char = yield from skip_whitespace((yield))
        if char == "<":
            tag, char = yield from read_tag("<", PYTHON_START)
            if tag:
                char = yield from skip_whitespace((yield))
        if char == "[":
            char = yield from self._list(self._call, "")
            if self.num_calls and (yield from skip_whitespace(char)) == "<":
                tag, _ = yield from read_tag("<", PYTHON_END)
                if tag:
                    self._held.clear()
                    yield
        while True:
            self._release()
            yield


class Lfm2Parser(TaggedParser, _PythonCallParser):
    BEGIN = LFM2_START
    ENDS = (LFM2_END,)

    def _call_after_tag(self, content: str) -> Scan[tuple[bool, str]]:
        before = self.num_calls
        char = yield from skip_whitespace((yield))
        if char == "[":
            char = yield from self._list(self._call, content)
        if self.num_calls > before:
            return True, char
        return False, self._break_off()


def _argument() -> Scan[tuple[str, str]]:
    """Reads an expression; returns it, and the comma or the bracket after it."""
    pieces: list[str] = []
    closing: list[str] = []
    quote, escaped = "", False
    while True:
        char = yield
        if quote:
            quote = "" if char == quote and not escaped else quote
            escaped = char == "\\" and not escaped
        elif char in "'\"":
            quote = char
        elif char in _BRACKETS:
            closing.append(_BRACKETS[char])
            require(len(closing) <= _MAX_DEPTH)
        elif closing:
            require(char not in ")]}" or char == closing[-1])
            if char == closing[-1]:
                closing.pop()
        elif char in ",)":
            return "".join(pieces), char
        pieces.append(char)


class PythonicFormat(ToolCallFormat):
    NAME = "pythonic"
    PARSER = PythonicParser
    TAGS = (PYTHON_START, PYTHON_END)

    OPENING: ClassVar[str] = ""
    CLOSING: ClassVar[str] = ""

    def forced_prefix(self, function: str | None) -> str:
        return f"{self.OPENING}[" + (f"{function}(" if function else "")

    def _forced_call(self, name: str, schema: Mapping[str, Any], function: str | None) -> str:
        """Required arguments first, each of the others after a comma or not at all."""
        known, needed = typed_text.properties_of(schema)
        required, optional = [key for key in known if key in needed], [key for key in known if key not in needed]
        rules = {key: f"{RULE}_{number}" for number, key in enumerate(known)}
        lines = bounded(_argument_rule(rules[key], key, known[key], definitions_of(schema)) for key in known)
        head = [] if function else [lark_string(f"{name}(")]
        arguments = ' ", " '.join(rules[key] for key in required)
        if required:
            arguments += "".join(f' (", " {rules[key]})?' for key in optional)
        elif optional:
            # Any of them may be the first one.
            starts = bounded(
                " ".join([rules[key], *(f'(", " {rules[later]})?' for later in optional[place + 1 :])])
                for place, key in enumerate(optional)
            )
            arguments = f"({' | '.join(starts)})?"
        return "\n".join([" ".join([*head, arguments, '")]"', self.literal(self.CLOSING)]), *lines])


class Lfm2Format(PythonicFormat):
    NAME = "lfm2"
    PARSER = Lfm2Parser
    TAGS = (LFM2_START, LFM2_END)
    TRIGGERS = (LFM2_START,)
    OPENING, CLOSING = LFM2_START, LFM2_END


def _argument_rule(rule: str, key: str, schema: Any, definitions: Mapping[str, Any]) -> str:
    if typed_text.types_of(schema, definitions) == {"boolean"}:
        return f'{rule}: {lark_string(f"{key}=")} ("True" | "False")'
    value = {**schema, **definitions} if isinstance(schema, Mapping) else {}
    return f"{rule}: {lark_string(f'{key}=')} {rule}_value\n{rule}_value: {json_rule(value)}"
