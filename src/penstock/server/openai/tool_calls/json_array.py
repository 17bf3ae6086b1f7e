"""Calls as a JSON array after a tag: Granite 3 (`granite`) and Phi-4-mini (`phi4_mini_json`).

<|tool_call|>[{"name": "f", "arguments": {...}}, ...]
functools[{"name": "f", "arguments": {...}}, ...]
"""

from __future__ import annotations

from typing import ClassVar

from penstock.server.openai.tool_calls.json_call import JsonCallParser
from penstock.server.openai.tool_calls.parser import Scan, TaggedParser, skip_whitespace
from penstock.server.openai.tool_calls.tool_format import JsonObjectFormat

GRANITE_TAG, PHI_TAG = "<|tool_call|>", "functools"


class JsonArrayParser(TaggedParser, JsonCallParser):
    BEGIN: ClassVar[str]

    def _call_after_tag(self, content: str) -> Scan[tuple[bool, str]]:
        before = self.num_calls
        char = yield from skip_whitespace((yield))
        if char != "[":
            return False, self._break_off()
        char = yield from self._list(self._call, content)
        return self.num_calls > before, char


class GraniteParser(JsonArrayParser):
    BEGIN = GRANITE_TAG


class PhiParser(JsonArrayParser):
    BEGIN = PHI_TAG


class GraniteFormat(JsonObjectFormat):
    NAME = "granite"
    PARSER = GraniteParser
    TAGS = (GRANITE_TAG,)
    TRIGGERS = (GRANITE_TAG,)
    OPENING, CLOSING = f"{GRANITE_TAG}[", "]"


class PhiFormat(JsonObjectFormat):
    NAME = "phi4_mini_json"
    PARSER = PhiParser
    TAGS = TRIGGERS = (f"{PHI_TAG}[",)
    OPENING, CLOSING = f"{PHI_TAG}[", "]"
