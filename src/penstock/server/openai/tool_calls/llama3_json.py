"""`{"name": ..., "parameters": {...}}`, several separated by `;`, optionally after `<|python_tag|>`: Llama 3."""

from __future__ import annotations

from penstock.server.openai.tool_calls.json_call import JsonCallParser
from penstock.server.openai.tool_calls.parser import WHITESPACE, Scan, read_tag, skip_whitespace
from penstock.server.openai.tool_calls.tool_format import JsonObjectFormat

PYTHON_TAG = "<|python_tag|>"


class Llama3JsonParser(JsonCallParser):
    """The answer consists only of calls. An answer may be JSON with a "name" without being a call: without the tag,
    only an object with arguments is a call.
    """

    SEPARATORS = WHITESPACE + ";"

    def _answer(self) -> Scan[None]:
        tagged = False
        is_call = True
        char = yield
        while is_call:
            while char in WHITESPACE or (char == ";" and self.num_calls):
                char = yield
            if not self._may_call:
                break
            if char == "<":
                tag, char = yield from read_tag("<", PYTHON_TAG)
                if not tag:
                    break
                tagged = True
                char = yield from skip_whitespace((yield))
            is_call, char = yield from self._call(char, "", needs_arguments=not tagged)
        while True:
            self._release()
            yield


class Llama3JsonFormat(JsonObjectFormat):
    NAME = "llama3_json"
    PARSER = Llama3JsonParser
    ARGUMENTS_KEY = "parameters"
