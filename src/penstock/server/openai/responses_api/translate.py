"""Converts a Responses request to a chat completion request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.server import limits
from penstock.server.openai.protocol import ChatCompletionRequest
from penstock.server.openai.responses_api.protocol import (
    AllowedTools,
    Content,
    FunctionCallItem,
    FunctionCallOutput,
    FunctionChoice,
    FunctionTool,
    InputItem,
    InputMessage,
    JsonSchemaFormat,
    RefusalPart,
    ResponsesRequest,
)
from penstock.server.openai.translation import chat_request, passed_on, with_system
from penstock.utils.errors import RequestError

FIELD_NAMES = {"max_completion_tokens": "max_output_tokens", "response_format": "text.format"}
"""Fields of the chat completion whose names here differ."""

_SYSTEM_ROLES = ("system", "developer")


def to_messages(given: str | Sequence[InputItem]) -> list[dict[str, Any]]:
    """Converts the input to turns. The items of one answer (reasoning, messages and calls) become one turn again."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[dict[str, Any]] = []
    for item in given:
        last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
        if isinstance(item, InputMessage) and item.role == "assistant":
            if last is None or (any(last["content"]) and "tool_calls" not in last):
                messages.append(last := {"role": "assistant", "content": []})
            last["content"].append(_text(item.content))
        elif isinstance(item, InputMessage):
            role = "system" if item.role in _SYSTEM_ROLES else item.role
            messages.append({"role": role, "content": [_text(item.content)]})
        elif isinstance(item, FunctionCallItem):
            if last is None or len(last.get("tool_calls", ())) == limits.MAX_TOOLS:
                # A turn has at most that many calls.
                messages.append(last := {"role": "assistant", "content": []})
            call = {"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}}
            last.setdefault("tool_calls", []).append(call)
        elif isinstance(item, FunctionCallOutput):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": [_text(item.output)]})
        elif reasoning := "".join(part.text for part in item.content or item.summary):
            messages.append({"role": "assistant", "content": [], "reasoning_content": reasoning})
    return [{**message, "content": "".join(message["content"])} for message in messages]


def to_chat(body: ResponsesRequest, messages: list[dict[str, Any]]) -> ChatCompletionRequest:
    """Converts the request for these messages, the conversation without the instructions.

    Raises RequestError and RequestValidationError.
    """
    tools, choice = _tools(body)
    return chat_request(
        {
            **passed_on(body),
            "model": body.model,
            "messages": with_system(body.instructions or "", messages),
            "stream": body.stream,
            "max_completion_tokens": body.max_output_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "tools": [{"function": dict(tool)} for tool in tools] or None,
            "tool_choice": choice,
            "parallel_tool_calls": body.parallel_tool_calls,
            "response_format": _response_format(body),
            "chat_template_kwargs": _template_variables(body),
        }
    )


def _text(content: Content) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.refusal if isinstance(part, RefusalPart) else part.text for part in content)


def _tools(body: ResponsesRequest) -> tuple[list[FunctionTool], Any]:
    """Returns the offered tools and the tool choice in the form of chat completions."""
    tools, choice = list(body.tools or ()), body.tool_choice
    if isinstance(choice, AllowedTools):
        names = {tool.name for tool in choice.tools}
        unknown = names - {tool.name for tool in tools}
        if unknown:
            raise RequestError(f"tool_choice allows {min(unknown)!r}, which is not in tools", "tool_choice")
        return [tool for tool in tools if tool.name in names], choice.mode
    if isinstance(choice, FunctionChoice):
        return tools, {"type": "function", "function": {"name": choice.name}}
    # Clients send the default also without tools.
    return tools, choice if tools or choice not in ("auto", "none") else None


def _response_format(body: ResponsesRequest) -> dict[str, Any] | None:
    wanted = None if body.text is None else body.text.format
    if wanted is None:
        return None
    if isinstance(wanted, JsonSchemaFormat):
        schema = wanted.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)
        return {"type": "json_schema", "json_schema": schema}
    return {"type": wanted.type}


def _template_variables(body: ResponsesRequest) -> dict[str, Any] | None:
    effort = None if body.reasoning is None else body.reasoning.effort
    if effort is None:
        return body.chat_template_kwargs
    wanted = {"enable_thinking": False} if effort == "none" else {"reasoning_effort": effort}
    return {**wanted, **(body.chat_template_kwargs or {})}
