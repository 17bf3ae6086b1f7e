"""The requests of the OpenAI routes, with vLLM's extra fields, and the shapes of their answers. Unknown fields are
refused, because ignoring a misspelled one would silently change the answer. Fields of other servers' clients are
handled in `dialects`.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, model_validator
from typing_extensions import TypedDict

from penstock.messages.sampling_params import BOUNDS, MAX_COUNT, MAX_LOGIT_BIAS, MAX_STOP_STRINGS
from penstock.server import limits
from penstock.server.openai.dialects import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    EARLIER_ANSWER_FIELDS,
    MESSAGE_FIELDS,
    PART_FIELDS,
    REQUEST_FIELDS,
    STRUCTURED_OUTPUTS_FIELDS,
    TOKENIZE_FIELDS,
    DialectField,
    translate,
)
from penstock.utils.errors import RequestError


def within(parameter: str) -> Any:
    """Describes a field with the bounds of a sampling parameter."""
    bound = BOUNDS[parameter]
    return Field(gt=bound.low, le=bound.high) if bound.excludes_low else Field(ge=bound.low, le=bound.high)


def _few_values(most: int, given: Any) -> Any:
    """Returns a field's value, before it is validated. Raises RequestError if it has too many values at all depths."""
    values = [given]
    for value in values:
        values += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        if len(values) > most:
            raise RequestError(f"at most {most} texts, numbers, lists and objects are allowed, at all depths together")
    return given


FewValues = BeforeValidator(partial(_few_values, limits.MAX_MESSAGE_VALUES))
FewEntries = BeforeValidator(partial(_few_values, limits.MAX_ENTRY_VALUES))
Name = Annotated[str, StringConstraints(max_length=limits.MAX_NAME_CHARACTERS)]
StopText = Annotated[str, StringConstraints(min_length=1, max_length=limits.MAX_STOP_CHARACTERS)]
BadWord = Annotated[str, StringConstraints(min_length=1, max_length=limits.MAX_BAD_WORD_CHARACTERS)]
FunctionName = Annotated[Name, StringConstraints(pattern=r"^[A-Za-z0-9_.-]+$")]
Variables = Annotated[dict[Name, Any], Field(max_length=limits.MAX_TEMPLATE_VARIABLES), FewEntries]
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
TokenId = Annotated[int, Field(ge=0, le=MAX_COUNT)]
# Only the first error is reported, here and in other long lists; a million errors could fill the memory.
Choices = Annotated[list[str], Field(fail_fast=True)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
RequestId = Annotated[str, StringConstraints(pattern=r"^[\x21-\x7e]+$", max_length=limits.MAX_NAME_CHARACTERS)]


class RequestBody(BaseModel):
    """An object that accepts only known fields: its own, and those of other dialects."""

    model_config = ConfigDict(extra="forbid", strict=True)

    dialect: ClassVar[Iterable[DialectField]] = ()

    @model_validator(mode="before")
    @classmethod
    def translate(cls, given: Any) -> Any:
        return translate(given, cls.dialect, _names(cls))


def _names(kind: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in kind.model_fields.items()]


class StreamOptions(RequestBody):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False
    include_obfuscation: Any = None


class JsonSchema(BaseModel):
    name: Name | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class TextFormat(RequestBody):
    type: Literal["text"]


class JsonObjectFormat(RequestBody):
    type: Literal["json_object"]


class JsonSchemaFormat(RequestBody):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class StructuredOutputs(RequestBody):
    """vLLM's field: exactly one of these."""

    dialect = STRUCTURED_OUTPUTS_FIELDS

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None


class EngineRequestBody(RequestBody):
    """Fields of all requests that the engine runs. `user` is accepted without effect."""

    model: Name | None = None
    user: Name | None = None
    request_id: RequestId | None = None
    priority: Annotated[int, Field(ge=-MAX_COUNT, le=MAX_COUNT)] | None = 0
    cache_salt: Annotated[Name, StringConstraints(min_length=1)] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=MAX_COUNT)] | None = None


class GenerationRequest(EngineRequestBody):
    """Fields of both completions and chat completions."""

    stream: bool | None = False
    stream_options: StreamOptions | None = None

    # The OpenAI API's sampling fields.
    n: Annotated[int, within("n")] | None = None
    temperature: Annotated[float, within("temperature")] | None = None
    top_p: Annotated[float, within("top_p")] | None = None
    presence_penalty: Annotated[float, within("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, within("frequency_penalty")] | None = None
    seed: Annotated[int, within("seed")] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOP_STRINGS)] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_LOGIT_BIAS), FewEntries] | None = None

    # vLLM's.
    top_k: Annotated[int, within("top_k")] | None = None
    min_p: Annotated[float, within("min_p")] | None = None
    repetition_penalty: Annotated[float, within("repetition_penalty")] | None = None
    min_tokens: Annotated[int, within("min_tokens")] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=limits.MAX_TOKEN_LIST)] | None = None
    allowed_token_ids: Annotated[TokenIds, Field(max_length=limits.MAX_ALLOWED_TOKENS)] | None = None
    bad_words: Annotated[list[BadWord], Field(max_length=limits.MAX_BAD_WORDS)] | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    truncation_side: Literal["left", "right"] | None = None
    prompt_logprobs: Annotated[int, within("prompt_logprobs")] | None = None
    num_speculative_tokens: Annotated[int, within("num_speculative_tokens")] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    output_token_ids: (
        Annotated[list[TokenId], Field(fail_fast=True)]
        | Annotated[list[Annotated[list[TokenId], Field(fail_fast=True)]], Field(fail_fast=True)]
        | None
    ) = None
    finished_choices: Annotated[list[Count], Field(fail_fast=True)] | None = None
    return_token_ids: bool | None = False
    return_tokens_as_token_ids: bool | None = False

    # The older names of structured_outputs.
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None


class PassedOnFields(RequestBody):
    """vLLM's fields of the Responses and the Messages API: passed on to the chat completion, and checked there."""

    top_k: Any = None
    min_p: Any = None
    seed: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    repetition_penalty: Any = None
    min_tokens: Any = None
    ignore_eos: Any = None
    stop_token_ids: Any = None
    priority: Any = None
    cache_salt: Any = None
    structured_outputs: Any = None
    num_speculative_tokens: Any = None
    output_token_ids: Any = None


class AnswerPart(RequestBody):
    """A message, item or block of the Responses or the Messages API, which may come from an earlier answer."""

    dialect = EARLIER_ANSWER_FIELDS


class CompletionRequest(GenerationRequest):
    dialect = (*REQUEST_FIELDS, *COMPLETION_FIELDS)

    prompt: (
        str
        | TokenIds
        | Annotated[list[str], Field(min_length=1, max_length=limits.MAX_PROMPTS, fail_fast=True)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=limits.MAX_PROMPTS, fail_fast=True)]
        | None
    ) = None
    prompt_token_ids: (
        TokenIds | Annotated[list[TokenIds], Field(max_length=limits.MAX_PROMPTS, fail_fast=True)] | None
    ) = None
    max_tokens: Count | None = 16
    max_completion_tokens: Count | None = None
    echo: bool | None = False
    logprobs: Annotated[int, within("logprobs")] | None = None
    best_of: Annotated[int, within("n")] | None = None


class ContentPart(RequestBody):
    """A part of a message; only text is supported, under any of its type names."""

    dialect = PART_FIELDS

    type: Literal["text", "input_text", "output_text"] = "text"
    text: str

    @model_validator(mode="before")
    @classmethod
    def only_text(cls, given: Any) -> Any:
        kind = given.get("type") if isinstance(given, dict) else None
        for medium in ("image", "audio", "video", "file"):
            if isinstance(kind, str) and medium in kind:
                raise RequestError(f"this model takes text only, and this part is of type {kind!r}", "messages")
        return {"text": given} if isinstance(given, str) else given


Parts = Annotated[list[ContentPart], Field(max_length=limits.MAX_CONTENT_PARTS, fail_fast=True)]


class FunctionCall(BaseModel):
    name: Name
    arguments: Annotated[str | dict[str, Any], BeforeValidator(lambda given: "{}" if given is None else given)] = "{}"


class ToolCall(BaseModel):
    id: Name | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(BaseModel):
    """One turn. Fields that only some templates know are kept; `conversation.render_messages` checks them against the
    template.
    """

    model_config = ConfigDict(extra="allow")

    role: Annotated[Name, StringConstraints(min_length=1)]
    content: str | Parts | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=limits.MAX_TOOLS, fail_fast=True)] | None = None
    tool_call_id: Name | None = None
    name: Name | None = None

    @model_validator(mode="before")
    @classmethod
    def translate(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        refusal = given.get("refusal")
        if given.get("content") is None and isinstance(refusal, str):
            given = {**given, "content": refusal}
        # Null is the same as absent for every field.
        given = {name: value for name, value in given.items() if value is not None}
        if "function_call" in given and isinstance(given.get("tool_calls", []), list):
            call = {"type": "function", "function": given.pop("function_call")}
            given["tool_calls"] = [call, *given.get("tool_calls", ())]
        others = [name for name in given if name not in _MESSAGE_NAMES]
        return translate(given, MESSAGE_FIELDS, [*_names(cls), *others])


_MESSAGE_NAMES = frozenset(row.name for row in MESSAGE_FIELDS)


class FunctionDefinition(BaseModel):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    type: Literal["function"] = "function"
    function: FunctionDefinition


class ChosenFunction(BaseModel):
    name: Name


class ToolChoice(BaseModel):
    type: Literal["function"] = "function"
    function: ChosenFunction


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=limits.MAX_MESSAGES, fail_fast=True), FewValues]


class TemplateOptions(RequestBody):
    """How messages are rendered."""

    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    chat_template_kwargs: Variables | None = None


class ChatCompletionRequest(GenerationRequest, TemplateOptions):
    dialect = (*REQUEST_FIELDS, *CHAT_FIELDS)

    messages: Messages
    max_tokens: Annotated[int, within("max_tokens")] | None = None
    max_completion_tokens: Annotated[int, within("max_tokens")] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, within("logprobs")] | None = None
    echo: bool | None = False
    tools: Annotated[list[Tool], Field(max_length=limits.MAX_TOOLS)] | None = None
    tool_choice: Literal["auto", "none", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = True
    functions: Annotated[list[FunctionDefinition], Field(max_length=limits.MAX_TOOLS)] | None = None
    function_call: Literal["auto", "none"] | ChosenFunction | None = None
    reasoning_effort: Name | None = None
    include_reasoning: bool | None = True
    separate_reasoning: bool | None = True
    documents: Annotated[list[dict[str, Any]], Field(max_length=limits.MAX_MESSAGES)] | None = None

    @model_validator(mode="after")
    def _convert_functions_to_tools(self) -> ChatCompletionRequest:
        """Copies `functions` and `function_call` to `tools` and `tool_choice`, with one call at a time."""
        for new, old in (("tools", "functions"), ("tool_choice", "function_call")):
            if getattr(self, new) is not None and getattr(self, old) is not None:
                raise RequestError(f"{new} and {old} exclude each other", old)
        if self.functions is not None:
            self.tools = [Tool(function=function) for function in self.functions]
            self.parallel_tool_calls = False
        if self.function_call is not None:
            chosen = self.function_call
            self.tool_choice = ToolChoice(function=chosen) if isinstance(chosen, ChosenFunction) else chosen
        return self


class TokenizeRequest(TemplateOptions):
    """Text, or messages as in a chat completion."""

    dialect = TOKENIZE_FIELDS

    model: Name | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Annotated[list[Tool], Field(max_length=limits.MAX_TOOLS)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = False


class DetokenizeRequest(RequestBody):
    model: Name | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


# ---- Answers ----


class PromptTokensDetails(TypedDict):
    cached_tokens: int


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(TypedDict):
    """Four lists parallel to the tokens; the first token of a prompt has no log probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class ErrorDetails(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    error: ErrorDetails


# ---- Descriptions of the responses for the OpenAPI document ----


def error_responses(body: type) -> dict[int | str, dict[str, Any]]:
    return {
        "4XX": {"model": body, "description": "The request is invalid; the message names field and bound."},
        "5XX": {"model": body, "description": "The engine is full, shutting down or dead."},
    }


_STREAM = {"text/event-stream": {"schema": {"type": "string", "description": "`data: {...}` events, then [DONE]"}}}

ERRORS = error_responses(ErrorBody)

COMPLETION_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"description": "The completion, or its events with `stream`.", "content": _STREAM},
    **ERRORS,
}
