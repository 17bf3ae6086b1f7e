"""Calls with keys and values between tags: GLM 4.5 and 4.6 (`glm45`), and 4.7 (`glm47`), which has no line breaks.

<tool_call>f
<arg_key>city</arg_key>
<arg_value>Paris</arg_value>
</tool_call>

<tool_call>f<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>
"""

from __future__ import annotations

from penstock.server.openai.tool_calls.parser import Scan, expect, read_name, read_tag, require, skip_whitespace
from penstock.server.openai.tool_calls.text_arguments import TextArgumentsFormat, TextArgumentsParser, text_terminals

OPENING_TAG, CLOSING_TAG = "<tool_call>", "</tool_call>"
KEY, _KEY_END = "<arg_key>", "</arg_key>"
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"


class GlmParser(TextArgumentsParser):
    """Reads both forms."""

    BEGIN = OPENING_TAG
    ENDS = (CLOSING_TAG,)
    VALUE_END = _VALUE_END
    BREAKS = False

    def _name(self) -> Scan[tuple[str, str]]:
        char = yield from skip_whitespace((yield))
        return (yield from read_name(char, "\n<"))

    def _key(self, char: str) -> Scan[str | None]:
        char = yield from skip_whitespace(char)
        require(char == "<")
        tag, _ = yield from read_tag("<", KEY, CLOSING_TAG)
        require(bool(tag))
        if tag == CLOSING_TAG:
            return None
        name, char = yield from read_name((yield), "<")
        yield from expect(_KEY_END, char)
        char = yield from skip_whitespace((yield))
        yield from expect(_VALUE, char)
        return name


class Glm45Format(TextArgumentsFormat):
    NAME = "glm45"
    PARSER = GlmParser
    TAGS = (OPENING_TAG, CLOSING_TAG, KEY, _KEY_END, _VALUE, _VALUE_END)
    TRIGGERS = (OPENING_TAG,)
    OPENING = OPENING_TAG
    NAME_END = "\n"
    BEFORE_KEY, AFTER_KEY, AFTER_VALUE = KEY, f"{_KEY_END}\n{_VALUE}", f"{_VALUE_END}\n"
    CLOSING = CLOSING_TAG
    TERMINALS = text_terminals(AFTER_VALUE)


class Glm47Format(Glm45Format):
    NAME = "glm47"
    NAME_END = ""
    AFTER_KEY, AFTER_VALUE = f"{_KEY_END}{_VALUE}", _VALUE_END
    TERMINALS = text_terminals(AFTER_VALUE)
