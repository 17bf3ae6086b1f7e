"""`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Qwen, Hermes, the built-in model."""

from __future__ import annotations

from penstock.server.openai.tool_calls.json_call import JsonCallParser
from penstock.server.openai.tool_calls.parser import Scan, read_tag, skip_whitespace
from penstock.server.openai.tool_calls.tool_format import JsonObjectFormat

OPENING_TAG, CLOSING_TAG = "<tool_call>", "</tool_call>"


class HermesParser(JsonCallParser):
    """Parses any number of calls, anywhere in the text."""

    def _answer(self) -> Scan[None]:
        unclosed = False
        char = yield
        while True:
            char = yield from skip_whitespace(char)
            if char != "<":
                self._release()
                char = yield
                continue
            before = len(self._held) - 1
            tag, char = yield from read_tag("<", OPENING_TAG, CLOSING_TAG if unclosed else OPENING_TAG)
            if not tag:
                self._release(keep=1)
            elif tag == CLOSING_TAG:
                unclosed = False
                self._held.clear()
                self._separating = True
                char = yield
            elif not self._may_call:
                unclosed = False
                self._release()
                char = yield
            else:
                content = self._content_before(before)
                char = yield from skip_whitespace((yield))
                unclosed, char = yield from self._call(char, content, needs_arguments=False)


class HermesFormat(JsonObjectFormat):
    NAME = "hermes"
    PARSER = HermesParser
    TAGS = (OPENING_TAG, CLOSING_TAG)
    TRIGGERS = (OPENING_TAG,)
    OPENING = f"{OPENING_TAG}\n"
    CLOSING = f"\n{CLOSING_TAG}"
