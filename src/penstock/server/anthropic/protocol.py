"""The requests of the Messages API. Unknown fields are refused, as everywhere; messages and blocks may have the fields
with which an earlier answer described them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from penstock.messages.sampling_params import MAX_COUNT, MAX_STOP_STRINGS
from penstock.server import limits
from penstock.server.openai.dialects import CLIENT_LIBRARY_FIELDS, MESSAGES_FIELDS, TOOL_FIELDS
from penstock.server.openai.protocol import (
    AnswerPart,
    FewValues,
    FunctionName,
    Name,
    PassedOnFields,
    RequestBody,
    StopText,
    within,
)


class TextBlock(AnswerPart):
    type: Literal["text"]
    text: str


Texts = Annotated[list[TextBlock], Field(max_length=limits.MAX_CONTENT_PARTS, fail_fast=True)]


class ToolUseBlock(AnswerPart):
    type: Literal["tool_use"]
    id: Name
    name: Name
    input: dict[str, Any]


class ToolResultBlock(AnswerPart):
    type: Literal["tool_result"]
    tool_use_id: Name
    content: str | Texts = ""
    is_error: bool | None = None


class ThinkingBlock(AnswerPart):
    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(AnswerPart):
    type: Literal["redacted_thinking"]


def _block_type(block: Any) -> str:
    kind = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
    return kind if isinstance(kind, str) else ""


Block = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[RedactedThinkingBlock, Tag("redacted_thinking")],
    Discriminator(
        _block_type,
        custom_error_type="block_type",
        custom_error_message="must be a text, tool_use, tool_result or thinking block",
    ),
]


class Message(AnswerPart):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Field(max_length=limits.MAX_CONTENT_PARTS, fail_fast=True)]


class Tool(RequestBody):
    dialect = TOOL_FIELDS

    type: Literal["custom"] | None = None
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_server_tools(cls, tool: Any) -> Any:
        if isinstance(tool, dict) and tool.get("type") not in (None, "custom"):
            raise PydanticCustomError("tool_type", "only tools of type custom are supported")
        return tool


class AnyChoice(RequestBody):
    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool | None = None


class ToolChoice(RequestBody):
    type: Literal["tool"]
    name: Name
    disable_parallel_tool_use: bool | None = None


class Thinking(RequestBody):
    """`budget_tokens` and `display` have no effect: the length of the reasoning is not limited, and all of it is
    shown.
    """

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1, le=MAX_COUNT)] | None = None
    display: Any = None


class OutputFormat(RequestBody):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(RequestBody):
    effort: Name | None = None
    format: OutputFormat | None = None


class CountTokensRequest(RequestBody):
    """A conversation, with the fields that affect its rendering."""

    dialect = (*CLIENT_LIBRARY_FIELDS, *MESSAGES_FIELDS)

    messages: Annotated[list[Message], Field(min_length=1, max_length=limits.MAX_MESSAGES, fail_fast=True), FewValues]
    model: Name | None = None
    system: str | Texts | None = None
    tools: Annotated[list[Tool], Field(max_length=limits.MAX_TOOLS)] | None = None
    tool_choice: Annotated[AnyChoice | ToolChoice, Field(discriminator="type")] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(CountTokensRequest, PassedOnFields):
    max_tokens: Annotated[int, within("max_tokens")]
    stream: bool | None = False
    stop_sequences: Annotated[list[StopText], Field(max_length=MAX_STOP_STRINGS)] | None = None
    temperature: Annotated[float, within("temperature")] | None = None
    top_p: Annotated[float, within("top_p")] | None = None
    top_k: Annotated[int, within("top_k")] | None = None
