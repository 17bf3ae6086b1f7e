"""The requests of the Responses API. Unknown fields are refused, as everywhere; items may have the fields with which an
earlier answer described them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, StringConstraints, Tag, model_validator
from pydantic_core import PydanticCustomError

from penstock.messages.sampling_params import MAX_COUNT
from penstock.server import limits
from penstock.server.openai.dialects import CLIENT_LIBRARY_FIELDS, RESPONSES_FIELDS
from penstock.server.openai.protocol import (
    AnswerPart,
    FewEntries,
    FewValues,
    FunctionDefinition,
    JsonObjectFormat,
    Name,
    PassedOnFields,
    RequestBody,
    TextFormat,
    within,
)

MetadataText = Annotated[str, StringConstraints(max_length=limits.MAX_METADATA_CHARACTERS)]
Metadata = Annotated[dict[Name, MetadataText], Field(max_length=limits.MAX_TEMPLATE_VARIABLES), FewEntries]
LongText = Annotated[str, StringConstraints(max_length=limits.MAX_TOOL_SCHEMA_BYTES)]


class TextPart(AnswerPart):
    type: Literal["input_text", "output_text", "text"]
    text: str


class RefusalPart(AnswerPart):
    type: Literal["refusal"]
    refusal: str


class SummaryPart(AnswerPart):
    type: Literal["summary_text", "reasoning_text"]
    text: str


Summary = Annotated[list[SummaryPart], Field(max_length=limits.MAX_CONTENT_PARTS, fail_fast=True)]
ContentPart = Annotated[TextPart | RefusalPart, Field(discriminator="type")]
Content = str | Annotated[list[ContentPart], Field(max_length=limits.MAX_CONTENT_PARTS, fail_fast=True)]


class InputMessage(AnswerPart):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class FunctionCallItem(AnswerPart):
    type: Literal["function_call"]
    call_id: Name
    name: Name
    arguments: str


class FunctionCallOutput(AnswerPart):
    type: Literal["function_call_output"]
    call_id: Name
    output: Content


class ReasoningItem(AnswerPart):
    type: Literal["reasoning"]
    summary: Summary = Field(default_factory=list[SummaryPart])
    content: Summary | None = None


def _item_type(item: Any) -> str:
    """Returns an item's type; messages may omit it."""
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)
    return kind if isinstance(kind, str) else ""


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(
        _item_type,
        custom_error_type="item_type",
        custom_error_message="must be a message, function_call, function_call_output or reasoning item",
    ),
]

InputItems = Annotated[list[InputItem], Field(min_length=1, max_length=limits.MAX_MESSAGES, fail_fast=True), FewValues]


class FunctionTool(FunctionDefinition):
    type: Literal["function"]

    @model_validator(mode="before")
    @classmethod
    def _refuse_built_in_tools(cls, tool: Any) -> Any:
        if isinstance(tool, dict) and tool.get("type") != "function":
            raise PydanticCustomError("tool_type", "only tools of type function are supported")
        return tool


class JsonSchemaFormat(RequestBody):
    type: Literal["json_schema"]
    name: Name | None = None
    description: LongText | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class TextConfig(RequestBody):
    format: Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Name | None = None


class ReasoningConfig(RequestBody):
    effort: Name | None = None
    summary: Name | None = None
    generate_summary: Name | None = None


class FunctionChoice(RequestBody):
    type: Literal["function"]
    name: Name


class AllowedTools(RequestBody):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[FunctionChoice], Field(min_length=1, max_length=limits.MAX_TOOLS)]


class ResponsesRequest(PassedOnFields):
    dialect = (*CLIENT_LIBRARY_FIELDS, *RESPONSES_FIELDS)

    input: str | InputItems
    model: Name | None = None
    instructions: str | None = None
    previous_response_id: Name | None = None
    store: bool | None = True
    stream: bool | None = False
    max_output_tokens: Annotated[int, within("max_tokens")] | None = None
    temperature: Annotated[float, within("temperature")] | None = None
    top_p: Annotated[float, within("top_p")] | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=limits.MAX_TOOLS)] | None = None
    tool_choice: Literal["auto", "none", "required"] | FunctionChoice | AllowedTools | None = None
    parallel_tool_calls: bool | None = True
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    metadata: Metadata | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None

    chat_template_kwargs: dict[str, Any] | None = None

    # Accepted without effect.
    include: Annotated[list[Literal["reasoning.encrypted_content"]], Field(max_length=1)] | None = None
    max_tool_calls: Annotated[int, Field(ge=1, le=MAX_COUNT)] | None = None
    user: Name | None = None
