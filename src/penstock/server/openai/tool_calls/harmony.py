"""gpt-oss' calls (`openai`), as messages to a function (`server/openai/harmony.py`).

<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.server.openai.harmony import CALL, CALL_BEGIN, CHANNEL, CONSTRAIN, MESSAGE
from penstock.server.openai.tool_calls.deepseek import SectionParser
from penstock.server.openai.tool_calls.parser import Scan, expect, read_name, read_tag, require, skip_whitespace
from penstock.server.openai.tool_calls.tool_format import RULE, ToolCallFormat, json_rule

_JSON = f" {CONSTRAIN}json"


class HarmonyParser(SectionParser):
    BEGIN = CALL_BEGIN
    ENDS = (CALL,)

    def _head(self) -> Scan[tuple[str, str | None]]:
        name, char = yield from read_name((yield), " <")
        char = yield from skip_whitespace(char)
        require(char == "<")
        tag, _ = yield from read_tag("<", CONSTRAIN, MESSAGE)
        if tag == CONSTRAIN:
            kind, char = yield from read_name((yield), "<")
            require(kind == "json")
            yield from expect(MESSAGE, char)
        else:
            require(tag == MESSAGE)
        return name, None


class HarmonyFormat(ToolCallFormat):
    """It has no triggers: text before a call is in messages with tags of their own."""

    NAME = "openai"
    PARSER = HarmonyParser
    TAGS = (CHANNEL, CONSTRAIN, MESSAGE, CALL)

    def forced_prefix(self, function: str | None) -> str:
        return CALL_BEGIN + (f"{function}{_JSON}{MESSAGE}" if function else "")

    def _forced_call(self, name: str, schema: Mapping[str, Any], function: str | None) -> str:
        head = "" if function else self.literal(f"{name}{_JSON}{MESSAGE}") + " "
        return f"{head}{RULE}_arguments {self.literal(CALL)}\n{RULE}_arguments: {json_rule(schema)}"
