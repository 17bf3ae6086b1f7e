"""`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Qwen, Hermes, the built-in model."""

from __future__ import annotations

from penstock.server.openai.tool_calls.json_call import JsonCallParser
from penstock.server.openai.tool_calls.parser import Scan, TaggedParser, skip_whitespace
from penstock.server.openai.tool_calls.tool_format import JsonObjectFormat

OPENING_TAG, CLOSING_TAG = "<tool_call>", "</tool_call>"


class HermesParser(TaggedParser, JsonCallParser):
    BEGIN = OPENING_TAG
    ENDS = (CLOSING_TAG,)

    def _call_after_tag(self, content: str) -> Scan[tuple[bool, str]]:
        char = yield from skip_whitespace((yield))
        return (yield from self._call(char, content))


class HermesFormat(JsonObjectFormat):
    NAME = "hermes"
    PARSER = HermesParser
    TAGS = (OPENING_TAG, CLOSING_TAG)
    TRIGGERS = (OPENING_TAG,)
    OPENING = f"{OPENING_TAG}\n"
    CLOSING = f"\n{CLOSING_TAG}"
