"""`[TOOL_CALLS]`, then an array of objects (Mistral 7B to Small 3.1), or a name and its arguments (since Small 3.2).

    [TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]
    [TOOL_CALLS]f{...}[TOOL_CALLS]g{...}
    [TOOL_CALLS]f[ARGS]{...}
    [TOOL_CALLS]f[CALL_ID]012345678[ARGS]{...}

Mistral's templates refuse call ids other than nine letters and digits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from penstock.server.openai.tool_calls.json_call import JsonCallParser, read_until_closed
from penstock.server.openai.tool_calls.parser import (
    Malformed,
    Scan,
    TaggedParser,
    expect,
    read_name,
    read_tag,
    require,
    skip_whitespace,
)
from penstock.server.openai.tool_calls.tool_format import RULE, ToolCallFormat, json_rule, lark_string

TOOL_CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_ID_CHARACTERS = 9
_ID = re.compile(r"[A-Za-z0-9]{9}")


class MistralParser(TaggedParser, JsonCallParser):
    BEGIN = TOOL_CALLS

    def _call_after_tag(self, content: str) -> Scan[tuple[bool, str]]:
        char = yield from skip_whitespace((yield))
        return True, (yield from self._list(self._call, content) if char == "[" else self._named(char, content))

    def _named(self, char: str, content: str) -> Scan[str]:
        """Reads one call; returns the first character after it, or the one at which it becomes malformed."""
        try:
            name, char = yield from read_name(char, "[{")
            require(name in self._tools)
            call_id: str | None = None
            if char == "[":
                call_id, char = yield from self._before_arguments()
            char = yield from skip_whitespace(char)
            require(char == "{")
            self._begin(name, content, call_id)
            yield from read_until_closed(char, self._emit)
        except Malformed:
            return self._break_off()
        self._end()
        return (yield)

    def _before_arguments(self) -> Scan[tuple[str | None, str]]:
        """Reads the tags between name and arguments; returns the call's id, if it is valid, and what follows."""
        tag, _ = yield from read_tag("[", ARGS, CALL_ID)
        require(bool(tag))
        if tag == ARGS:
            return None, (yield)
        call_id, char = yield from read_name((yield), "[")
        yield from expect(ARGS, char)
        return (call_id if _ID.fullmatch(call_id) else None), (yield)

    def _make_id(self) -> str:
        return self._id_of(self.num_calls)[:_ID_CHARACTERS]


class MistralFormat(ToolCallFormat):
    NAME = "mistral"
    PARSER = MistralParser
    TAGS = (TOOL_CALLS, ARGS, CALL_ID)
    TRIGGERS = (TOOL_CALLS,)

    def forced_prefix(self, function: str | None) -> str:
        if self._names_come_first:
            return TOOL_CALLS + (f"{function}{ARGS}" if function else "")
        if function is None:
            return f'{TOOL_CALLS}[{{"name": "'
        return f'{TOOL_CALLS}[{{"name": {json.dumps(function)}, "arguments":'

    def _forced_call(self, name: str, schema: Mapping[str, Any], function: str | None) -> str:
        if self._names_come_first:
            head, end = ("" if function else self.literal(name + ARGS) + " "), ""
        else:
            head = "/[ ]?/ " if function else lark_string(f'{name}", "arguments":') + " /[ ]?/ "
            end = ' "}]"'
        return f"{head}{RULE}_arguments{end}\n{RULE}_arguments: {json_rule(schema)}"

    @property
    def _names_come_first(self) -> bool:
        return ARGS in self.template
