"""DeepSeek's calls, between special tokens: V3 and R1 (`deepseek_v3`), and V3.1 (`deepseek_v31`), which writes less.

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME
```json
{...}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜><｜tool▁calls▁end｜>
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from penstock.server.openai.tool_calls.json_call import read_until_closed
from penstock.server.openai.tool_calls.parser import (
    Malformed,
    Scan,
    TaggedParser,
    expect,
    read_name,
    require,
    skip_whitespace,
)
from penstock.server.openai.tool_calls.tool_format import RULE, ToolCallFormat, json_rule

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_FENCE = "```"


class SectionParser(TaggedParser):
    """Calls are between tags, and all of them between two more; `FENCE` is the text after the arguments, if any."""

    BEGIN = CALL_BEGIN
    OUTER = (CALLS_BEGIN,)
    ENDS = (CALL_END, CALLS_END)
    FENCE: ClassVar[str] = ""

    def _call_after_tag(self, content: str) -> Scan[tuple[bool, str]]:
        try:
            return True, (yield from self._call(content))
        except Malformed:
            return self._in_call, self._break_off()

    def _call(self, content: str) -> Scan[str]:
        """Reads a call after its opening tag; returns the first character after what it read."""
        name, call_id = yield from self._head()
        require(name in self._tools)
        char = yield from skip_whitespace((yield))
        require(char == "{")
        self._begin(name, content, call_id)
        yield from read_until_closed(char, self._emit)
        self._end()
        char = yield
        if self.FENCE:
            char = yield from skip_whitespace(char)
            if char == self.FENCE[0]:
                yield from expect(self.FENCE, char)
                self._held.clear()
                char = yield
        return char

    @abstractmethod
    def _head(self) -> Scan[tuple[str, str | None]]:
        """Reads from the opening tag to the arguments; returns the function's name, and the call's id if it has one."""


class DeepSeekV3Parser(SectionParser):
    FENCE = _FENCE

    def _head(self) -> Scan[tuple[str, str | None]]:
        kind, char = yield from read_name((yield), "<")
        require(kind == "function")
        yield from expect(SEPARATOR, char)
        name, _ = yield from read_name((yield), "\n")
        yield from expect(_FENCE + "json", (yield))
        return name, None


class DeepSeekV31Parser(SectionParser):
    def _head(self) -> Scan[tuple[str, str | None]]:
        name, char = yield from read_name((yield), "<")
        yield from expect(SEPARATOR, char)
        return name, None


class DeepSeekV3Format(ToolCallFormat):
    NAME = "deepseek_v3"
    PARSER = DeepSeekV3Parser
    TAGS = (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR)
    TRIGGERS = (CALLS_BEGIN, CALL_BEGIN)
    _BEFORE_NAME: ClassVar[str] = f"{CALLS_BEGIN}{CALL_BEGIN}function{SEPARATOR}"
    _BEFORE_ARGUMENTS: ClassVar[str] = f"\n{_FENCE}json\n"
    _AFTER_ARGUMENTS: ClassVar[str] = f"\n{_FENCE}"

    def forced_prefix(self, function: str | None) -> str:
        return self._BEFORE_NAME + (f"{function}{self._BEFORE_ARGUMENTS}" if function else "")

    def _forced_call(self, name: str, schema: Mapping[str, Any], function: str | None) -> str:
        head = "" if function else self.literal(name + self._BEFORE_ARGUMENTS) + " "
        end = self.literal(self._AFTER_ARGUMENTS + CALL_END + CALLS_END)
        return f"{head}{RULE}_arguments {end}\n{RULE}_arguments: {json_rule(schema)}"


class DeepSeekV31Format(DeepSeekV3Format):
    NAME = "deepseek_v31"
    PARSER = DeepSeekV31Parser
    _BEFORE_NAME = f"{CALLS_BEGIN}{CALL_BEGIN}"
    _BEFORE_ARGUMENTS = SEPARATOR
    _AFTER_ARGUMENTS = ""
