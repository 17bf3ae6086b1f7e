"""Kimi K2's calls, between special tokens. A call has an id, which the model expects with its result.

<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>
<|tool_calls_section_end|>
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from penstock.server.openai.tool_calls.deepseek import SectionParser
from penstock.server.openai.tool_calls.parser import Scan, expect, read_name, require
from penstock.server.openai.tool_calls.tool_format import RULE, ToolCallFormat, json_rule

CALLS_BEGIN, CALLS_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL_BEGIN, CALL_END, ARGUMENTS = "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>"
_ID = re.compile(r"functions\.(.+):[0-9]{1,4}")


class KimiK2Parser(SectionParser):
    BEGIN = CALL_BEGIN
    OUTER = (CALLS_BEGIN,)
    ENDS = (CALL_END, CALLS_END)

    def _head(self) -> Scan[tuple[str, str | None]]:
        call_id, char = yield from read_name((yield), "<")
        yield from expect(ARGUMENTS, char)
        match = _ID.fullmatch(call_id)
        require(match is not None)
        assert match is not None
        return match[1], call_id


class KimiK2Format(ToolCallFormat):
    NAME = "kimi_k2"
    PARSER = KimiK2Parser
    TAGS = (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, ARGUMENTS)
    TRIGGERS = (CALLS_BEGIN, CALL_BEGIN)

    def forced_prefix(self, function: str | None) -> str:
        return f"{CALLS_BEGIN}{CALL_BEGIN}functions." + (f"{function}:" if function else "")

    def _forced_call(self, name: str, schema: Mapping[str, Any], function: str | None) -> str:
        head = "" if function else self.literal(f"{name}:") + " "
        call = f"/[0-9]{{1,4}}/ {self.literal(ARGUMENTS)} {RULE}_arguments {self.literal(CALL_END + CALLS_END)}"
        return f"{head}{call}\n{RULE}_arguments: {json_rule(schema)}"
