"""Writes an answer as a message, either with complete blocks or as a stream of events."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

from penstock.messages.outputs import FinishReason
from penstock.server.anthropic.edge import error_of
from penstock.server.openai.blocks import AnswerBlocks, Block, BlockEvent, BlockKind, Closed, Opened
from penstock.server.openai.conversation import Chat
from penstock.server.sse import typed_event, with_errors

_DELTAS = {
    BlockKind.REASONING: ("thinking_delta", "thinking"),
    BlockKind.TEXT: ("text_delta", "text"),
    BlockKind.CALL: ("input_json_delta", "partial_json"),
}


class MessageAnswer:
    """Writes one message."""

    def __init__(self, chat: Chat, message_id: str) -> None:
        self._blocks = AnswerBlocks(chat)
        self._has_begun = False
        self._head = {"id": message_id, "type": "message", "role": "assistant", "model": chat.model}

    def whole(self) -> dict[str, Any]:
        self._blocks.advance()
        content = [_content(block, block.text) for block in self._blocks.blocks]
        return {**self._head, "content": content, **self._end(), "usage": self._usage()}

    def stream(self) -> AsyncGenerator[bytes, None]:
        self._blocks.skip_given()
        self._has_begun = bool(self._blocks.completion.num_given_tokens)
        return with_errors(self._events(), _failed)

    async def _events(self) -> AsyncGenerator[bytes, None]:
        async with aclosing(self._blocks.generation.stream(self._news)) as streamed:
            async for data in streamed:
                yield data
        yield typed_event({"type": "message_delta", "delta": self._end(), "usage": self._usage()})
        yield typed_event({"type": "message_stop"})

    def _news(self, _: int) -> Iterator[bytes]:
        if not self._has_begun:
            self._has_begun = True
            # The number of cached prompt tokens is known only now.
            yield typed_event({"type": "message_start", "message": self._empty()})
        update = self._blocks.advance()
        for each in () if update is None else update.events:
            yield _block_event(each)

    def _empty(self) -> dict[str, Any]:
        usage = {**self._usage(), "output_tokens": 0}
        return {**self._head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}

    def _end(self) -> dict[str, Any]:
        """Returns why the message ended."""
        completion = self._blocks.completion
        if isinstance(completion.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": completion.stop_reason}
        if completion.finish_reason == FinishReason.LENGTH:
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        return {"stop_reason": "tool_use" if self._blocks.called else "end_turn", "stop_sequence": None}

    def _usage(self) -> dict[str, int]:
        """Returns the usage; its input tokens exclude cached tokens."""
        usage = self._blocks.generation.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
        }


def _block_event(event: BlockEvent) -> bytes:
    block = event.block
    if isinstance(event, Opened):
        data = {"type": "content_block_start", "index": block.index, "content_block": _content(block, "")}
    elif isinstance(event, Closed):
        data = {"type": "content_block_stop", "index": block.index}
    else:
        kind, field = _DELTAS[block.kind]
        data = {"type": "content_block_delta", "index": block.index, "delta": {"type": kind, field: event.text}}
    return typed_event(data)


def _content(block: Block, text: str) -> dict[str, Any]:
    if block.kind is BlockKind.CALL:
        return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": _input(text)}
    if block.kind is BlockKind.REASONING:
        # Signatures are empty, and those that clients send back are not checked.
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "text", "text": text}


def _input(arguments: str) -> dict[str, Any]:
    """Returns a call's arguments; empty if they are not a JSON object, for example because they were cut off. Halves of
    surrogate pairs, which the model can write as escapes but an answer cannot contain, are replaced.
    """
    try:
        value = json.loads(json.dumps(json.loads(arguments), ensure_ascii=False).encode(errors="replace"))
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _failed(body: dict[str, Any]) -> bytes:
    return typed_event(error_of(body))
