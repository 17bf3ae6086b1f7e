"""Rules for an answer's tool calls, and the reader that splits its text into reasoning, content and calls."""

from __future__ import annotations

import msgspec

from penstock.server import limits
from penstock.server.openai.answer_parts import Part, Reasoning, Text, ToolCallDelta
from penstock.server.openai.protocol import ChatCompletionRequest, Tool, ToolChoice
from penstock.server.openai.reasoning import ReasoningReader
from penstock.server.openai.tool_calls.parser import MakeId, ToolCallParser, random_id
from penstock.server.openai.tool_calls.tool_format import ToolCallFormat
from penstock.utils.errors import RequestError


class ToolUse:
    """Whether and how one answer may call tools. Raises RequestError for invalid combinations. If `is_forced`, the
    answer must be a call, and it begins with `prefix`. `grammar()` constrains it: to a forced call, to calls that match
    their schemas if a tool is strict, or to no call if the tools must not be called. `banned_words` are the tags that
    are then forbidden.
    """

    def __init__(self, body: ChatCompletionRequest, tool_format: ToolCallFormat | None) -> None:
        choice = body.tool_choice or ("auto" if body.tools else "none")
        self.offered: list[Tool] = [] if choice == "none" else list(body.tools or ())
        self.is_forced = False
        # The format of tools that must not be called.
        refused = tool_format if body.tools and choice == "none" else None
        self.banned_words = [] if refused is None else refused.trigger_tokens
        self._no_call = None if refused is None else refused.no_call_grammar()
        self._function: str | None = None
        self._allows_several = body.parallel_tool_calls is not False
        self._format = tool_format if self.offered else None
        for tool in body.tools or ():
            _check_schema(tool)
        if choice == "none":
            return
        if not self.offered:
            raise RequestError("tool_choice needs tools", "tool_choice")
        if self._format is None:
            raise RequestError(
                "the chat template shows no known format of tool calls: start the server with --tool-call-parser",
                "tools",
            )
        if isinstance(choice, ToolChoice):
            self._function = choice.function.name
            if self._function not in [tool.function.name for tool in self.offered]:
                raise RequestError(f"tool_choice names {self._function!r}, which is not in tools", "tool_choice")
        self.is_forced = choice != "auto"

    @property
    def needs_special_tokens(self) -> bool:
        """Whether calls are visible only in text that shows special tokens."""
        return self._format is not None and self._format.needs_special_tokens

    @property
    def prefix(self) -> str:
        """The beginning of a forced call; "" if none is forced."""
        return self._format.forced_prefix(self._function) if self._format is not None and self.is_forced else ""

    def grammar(self, *, with_prefix: bool) -> str | None:
        """Returns the grammar of the answer; for a forced call, with or without its prefix. None if unconstrained."""
        if self._format is None:
            return self._no_call
        schemas = self._schemas()
        if self.is_forced:
            callable_now = schemas if self._function is None else {self._function: schemas[self._function]}
            return self._format.forced_grammar(callable_now, self._function, with_prefix=with_prefix)
        if any(tool.function.strict for tool in self.offered):
            return self._format.strict_grammar(schemas, several=self._allows_several)
        return None

    def reader(self, reasoning: ReasoningReader, prefix: str, make_id: MakeId = random_id) -> AnswerReader:
        """Returns a reader of one completion whose beginning, `prefix`, is already in the prompt."""
        parser = None if self._format is None else self._format.parser(self._schemas(), make_id)
        return AnswerReader(reasoning, parser, prefix, self._allows_several)

    def _schemas(self) -> dict[str, dict[str, object]]:
        return {tool.function.name: tool.function.parameters or {"type": "object"} for tool in self.offered}


def _check_schema(tool: Tool) -> None:
    try:
        msgspec.json.encode(tool.function.description)
        size = len(msgspec.json.encode(tool.function.parameters))
    except UnicodeEncodeError:
        raise RequestError(f"the tool {tool.function.name!r} is not described in valid Unicode", "tools") from None
    if size > limits.MAX_TOOL_SCHEMA_BYTES:
        raise RequestError(
            f"the parameters of tool {tool.function.name!r} take {size} of at most {limits.MAX_TOOL_SCHEMA_BYTES} B",
            "tools",
        )


class AnswerReader:
    """Splits one completion's streamed text; `called` is True if there was a call."""

    def __init__(
        self, reasoning: ReasoningReader, parser: ToolCallParser | None, prefix: str, allows_several: bool
    ) -> None:
        self._reasoning = reasoning
        self._parser = parser
        self._prefix = prefix
        self._allows_several = allows_several

    @property
    def called(self) -> bool:
        return self._parser is not None and self._parser.num_calls > 0

    def read(self, text: str, is_last: bool) -> list[Part]:
        """Returns the parts in the next piece; the last piece ends the reader."""
        parts = [part for piece in self._reasoning.feed_in_order(text) for part in self._divide(*piece)]
        if is_last:
            parts += self._divide(*self._reasoning.finish())
            if self._parser is not None:
                parts += self._parser.finish()
        return [part for part in parts if self._is_wanted(part)]

    def _divide(self, reasoning: str, content: str) -> list[Part]:
        parts: list[Part] = [Reasoning(reasoning)] if reasoning else []
        content, self._prefix = self._prefix + content, ""
        if self._parser is not None:
            parts += self._parser.feed(content)
        elif content:
            parts.append(Text(content))
        return parts

    def _is_wanted(self, part: Part) -> bool:
        return not isinstance(part, ToolCallDelta) or self._allows_several or part.index == 0
