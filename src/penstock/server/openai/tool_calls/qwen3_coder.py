"""Calls as XML, with arguments as plain text: Qwen3-Coder, Qwen3.5.

<tool_call>
<function=f>
<parameter=city>
Paris
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

from penstock.server.openai.tool_calls.parser import Scan, read_name, read_tag, require, skip_whitespace
from penstock.server.openai.tool_calls.text_arguments import TextArgumentsFormat, TextArgumentsParser, text_terminals

OPENING_TAG, CLOSING_TAG = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_NAME_END = ">\n"


class Qwen3CoderParser(TextArgumentsParser):
    """The outer tags may be missing, because the models sometimes omit them."""

    BEGIN = _FUNCTION
    OUTER = (OPENING_TAG,)
    ENDS = (CLOSING_TAG,)
    VALUE_END = _PARAMETER_END
    CALL_ENDS = (f"{_FUNCTION_END}\n{CLOSING_TAG}", f"{_FUNCTION_END}{CLOSING_TAG}")
    BREAKS = True

    def _name(self) -> Scan[tuple[str, str]]:
        name, _ = yield from read_name((yield), ">")
        return name, (yield)

    def _key(self, char: str) -> Scan[str | None]:
        char = yield from skip_whitespace(char)
        require(char == "<")
        tag, _ = yield from read_tag("<", _PARAMETER, _FUNCTION_END)
        require(bool(tag))
        if tag == _FUNCTION_END:
            return None
        name, _ = yield from read_name((yield), ">")
        return name


class Qwen3CoderFormat(TextArgumentsFormat):
    NAME = "qwen3_coder"
    PARSER = Qwen3CoderParser
    TAGS = (OPENING_TAG, CLOSING_TAG)
    TRIGGERS = (OPENING_TAG, _FUNCTION)
    OPENING = f"{OPENING_TAG}\n{_FUNCTION}"
    NAME_END = _NAME_END
    BEFORE_KEY, AFTER_KEY, AFTER_VALUE = _PARAMETER, _NAME_END, f"\n{_PARAMETER_END}\n"
    CLOSING = f"{_FUNCTION_END}\n{CLOSING_TAG}"
    TERMINALS = text_terminals(AFTER_VALUE)
