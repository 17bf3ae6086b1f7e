"""Writes an answer as a response, either with complete items or as a stream of events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

from penstock.messages.outputs import FinishReason
from penstock.server.openai.blocks import AnswerBlocks, Block, BlockEvent, BlockKind, Closed, Opened, assistant_message
from penstock.server.openai.conversation import Chat
from penstock.server.openai.responses_api.protocol import ResponsesRequest
from penstock.server.openai.responses_api.store import ResponseStore, StoredResponse
from penstock.server.sse import typed_event, with_errors
from penstock.tokenizer.tokenizer import Tokenizer
from penstock.utils.stream_reports import StreamName

_PREFIXES = {BlockKind.REASONING: "rs", BlockKind.TEXT: "msg", BlockKind.CALL: "fc"}
# For each kind of block, the name of its events and the field of the last event that holds the text.
_EVENTS = {
    BlockKind.REASONING: ("response.reasoning_text", "text"),
    BlockKind.TEXT: ("response.output_text", "text"),
    BlockKind.CALL: ("response.function_call_arguments", "arguments"),
}


class Keeper:
    """Stores a complete response with the conversation that it continues; does nothing without a store."""

    def __init__(self, store: ResponseStore | None, owner: bytes | None, messages: list[dict[str, Any]]) -> None:
        self._store = store
        self._owner = owner
        self._messages = messages

    def keep(self, response: dict[str, Any], blocks: list[Block]) -> None:
        if self._store is not None:
            turn = assistant_message(blocks)
            self._store.add(self._owner, StoredResponse(response, [*self._messages, turn]))


class ResponseAnswer:
    """Writes one response. The ids of its items are made from `name`, so that all who write it make the same."""

    def __init__(
        self, body: ResponsesRequest, chat: Chat, tokenizer: Tokenizer, name: StreamName, keeper: Keeper
    ) -> None:
        self._blocks = AnswerBlocks(chat)
        self._tokenizer = tokenizer
        head = {"id": name.id, "created_at": name.created, "object": "response"}
        self._head = {**head, "model": chat.model, **_echo(body)}
        self._keeper = keeper
        self._name = name
        self._num_events = name.num_events

    def whole(self) -> dict[str, Any]:
        self._blocks.advance()
        return self._finish()

    def stream(self) -> AsyncGenerator[bytes, None]:
        self._blocks.skip_given()
        return with_errors(self._events(), self._failed)

    async def _events(self) -> AsyncGenerator[bytes, None]:
        if not self._blocks.completion.num_given_tokens:
            begun = {**self._response("in_progress"), "output": []}
            yield self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)
        async with aclosing(self._blocks.generation.stream(self._news)) as streamed:
            async for data in streamed:
                yield data
        # Beside the event loop: all of the reasoning is tokenized once more, to be counted.
        response = await asyncio.to_thread(self._finish)
        yield self._event(f"response.{response['status']}", response=response)

    def _news(self, _: int) -> Iterator[bytes]:
        update = self._blocks.advance()
        for each in () if update is None else update.events:
            yield from self._block_events(each)

    def _block_events(self, event: BlockEvent) -> Iterator[bytes]:
        block = event.block
        place = {"output_index": block.index}
        name, field = _EVENTS[block.kind]
        if isinstance(event, Opened):
            item = self._item(block, "in_progress", "")
            parts = item.get("content", ())
            yield self._event("response.output_item.added", **place, item={**item, "content": []} if parts else item)
            for part in parts:
                yield self._event("response.content_part.added", **self._place(block), part=part)
        elif isinstance(event, Closed):
            is_last = block is self._blocks.blocks[-1]
            item = self._item(block, self._status if is_last else "completed", block.text)
            last: dict[str, Any] = {"name": block.name} if block.kind is BlockKind.CALL else {}
            yield self._event(f"{name}.done", **self._place(block), **{field: block.text}, **last)
            for part in item.get("content", ()):
                yield self._event("response.content_part.done", **self._place(block), part=part)
            yield self._event("response.output_item.done", **place, item=item)
        else:
            yield self._event(f"{name}.delta", **self._place(block), delta=event.text)

    def _place(self, block: Block) -> dict[str, Any]:
        """Returns the location of an event in the response; text events have log probabilities, which are empty."""
        place: dict[str, Any] = {"item_id": self._item_id(block), "output_index": block.index}
        if block.kind is not BlockKind.CALL:
            place["content_index"] = 0
        return place

    def _event(self, kind: str, **fields: Any) -> bytes:
        number = self._num_events
        self._num_events += 1
        if kind.startswith("response.output_text."):
            fields["logprobs"] = []
        return typed_event({"type": kind, "sequence_number": number, **fields})

    def _failed(self, body: dict[str, Any]) -> bytes:
        error = body["error"]
        failure = {"code": "server_error", "message": error["message"]}
        response = {**self._response("failed"), "error": failure}
        return self._event("response.failed", response=response)

    @property
    def _status(self) -> str:
        """Returns the status of the last item and of the response: whether the token limit has cut it off."""
        return "incomplete" if self._blocks.completion.finish_reason == FinishReason.LENGTH else "completed"

    def _finish(self) -> dict[str, Any]:
        response = self._response(self._status)
        if response["status"] == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        response["usage"] = self._usage()
        self._keeper.keep(response, self._blocks.blocks)
        return response

    def _response(self, status: str) -> dict[str, Any]:
        blocks = self._blocks.blocks
        last = "incomplete" if status == "failed" else status
        output = [self._item(block, last if block is blocks[-1] else "completed", block.text) for block in blocks]
        return {
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": output,
            "usage": None,
        }

    def _item(self, block: Block, status: str, text: str) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._item_id(block), "status": status}
        if block.kind is BlockKind.CALL:
            call = {"call_id": block.call_id, "name": block.name, "arguments": text}
            return {**item, "type": "function_call", **call}
        if block.kind is BlockKind.REASONING:
            content = [{"type": "reasoning_text", "text": text}]
            return {**item, "type": "reasoning", "summary": [], "content": content}
        content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
        return {**item, "type": "message", "role": "assistant", "content": content}

    def _item_id(self, block: Block) -> str:
        return f"{_PREFIXES[block.kind]}_{self._name.make_id('item', block.index)}"

    def _usage(self) -> dict[str, Any]:
        usage = self._blocks.generation.usage()
        thought = "".join(block.text for block in self._blocks.blocks if block.kind is BlockKind.REASONING)
        num_thought = len(self._tokenizer.encode(thought, add_special_tokens=False)) if thought else 0
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": num_thought},
            "total_tokens": usage["total_tokens"],
        }


def _echo(body: ResponsesRequest) -> dict[str, Any]:
    """Returns the fields of a request that its response repeats."""
    reasoning = {} if body.reasoning is None else body.reasoning.model_dump(include={"effort", "summary"})
    text = {} if body.text is None else body.text.model_dump(by_alias=True, exclude_none=True)
    choice = body.tool_choice
    return {
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": None, "summary": None, **reasoning},
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": body.temperature,
        "text": {"format": {"type": "text"}, **text},
        "tool_choice": "auto" if choice is None else choice if isinstance(choice, str) else choice.model_dump(),
        "tools": [dict(tool) for tool in body.tools or ()],
        "top_p": body.top_p,
        "truncation": "disabled",
        "user": body.user,
    }
