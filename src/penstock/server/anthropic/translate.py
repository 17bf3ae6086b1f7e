"""Converts a Messages request to a chat completion request."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from penstock.server.anthropic.protocol import (
    CountTokensRequest,
    Message,
    MessagesRequest,
    TextBlock,
    ThinkingBlock,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
)
from penstock.server.openai.protocol import ChatCompletionRequest
from penstock.server.openai.translation import chat_request, passed_on, with_system
from penstock.utils.errors import RequestError

FIELD_NAMES = {"stop": "stop_sequences", "response_format": "output_config.format"}
"""Fields of the chat completion whose names here differ."""

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def to_chat(body: CountTokensRequest) -> ChatCompletionRequest:
    """Converts the request of a message, or of a conversation to be counted. Raises RequestError and
    RequestValidationError.
    """
    messages = [turn for message in body.messages for turn in _turns(message)]
    if not messages:
        raise RequestError("messages hold no text and no tool results", "messages")
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": with_system(_text(body.system or ""), messages),
        "chat_template_kwargs": _template_variables(body),
        **_tools(body),
    }
    if messages[-1]["role"] == "assistant":
        if "tool_calls" in messages[-1]:
            raise RequestError("the results of the last tool_use blocks are missing", "messages")
        # The client has provided the beginning of the answer.
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    if isinstance(body, MessagesRequest):
        fields |= _generation_fields(body)
    return chat_request(fields)


def _generation_fields(body: MessagesRequest) -> dict[str, Any]:
    wanted = None if body.output_config is None else body.output_config.format
    schema = None if wanted is None else {"type": "json_schema", "json_schema": {"schema": wanted.schema_}}
    return {
        **passed_on(body),
        "stream": body.stream,
        "max_tokens": body.max_tokens,
        "stop": body.stop_sequences or None,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "response_format": schema,
    }


def _turns(message: Message) -> list[dict[str, Any]]:
    """Converts one message to turns; each tool result becomes a separate turn."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    if message.role == "assistant":
        return _assistant_turns(message)
    turns: list[dict[str, Any]] = []
    for block in message.content:
        if isinstance(block, ToolResultBlock):
            turns.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content)})
        elif not isinstance(block, TextBlock):
            raise RequestError(f"a {message.role} message must not have {block.type} blocks", "messages")
        elif turns and turns[-1]["role"] == message.role:
            turns[-1]["content"] += block.text
        else:
            turns.append({"role": message.role, "content": block.text})
    return turns


def _assistant_turns(message: Message) -> list[dict[str, Any]]:
    blocks = message.content
    if any(isinstance(block, ToolResultBlock) for block in blocks):
        raise RequestError("an assistant message must not have tool_result blocks", "messages")
    turn: dict[str, Any] = {"role": "assistant", "content": _text(blocks)}
    reasoning = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    calls = [
        {"id": block.id, "function": {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}}
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    if reasoning:
        turn["reasoning_content"] = reasoning
    if calls:
        turn["tool_calls"] = calls
    return [turn]


def _text(content: str | Sequence[Any]) -> str:
    if isinstance(content, str):
        return content
    return "".join(block.text for block in content if isinstance(block, TextBlock))


def _tools(body: CountTokensRequest) -> dict[str, Any]:
    tools = [{"function": {**dict(tool), "parameters": tool.input_schema}} for tool in body.tools or ()]
    choice = body.tool_choice
    if choice is None:
        return {"tools": tools or None}
    named = isinstance(choice, ToolChoice)
    return {
        "tools": tools or None,
        "tool_choice": {"type": "function", "function": {"name": choice.name}} if named else _CHOICES[choice.type],
        "parallel_tool_calls": not choice.disable_parallel_tool_use,
    }


def _template_variables(body: CountTokensRequest) -> dict[str, Any] | None:
    wanted: dict[str, Any] = {}
    if body.thinking is not None and body.thinking.type != "adaptive":
        wanted["enable_thinking"] = body.thinking.type == "enabled"
    if body.output_config is not None and body.output_config.effort is not None:
        wanted["reasoning_effort"] = body.output_config.effort
    return {**wanted, **(body.chat_template_kwargs or {})} or None
