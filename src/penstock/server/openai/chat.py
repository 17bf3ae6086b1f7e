"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.messages.outputs import RequestOutput
from penstock.server.openai import generation, logprobs
from penstock.server.openai.blocks import (
    AnswerBlocks,
    Block,
    BlockEvent,
    BlockKind,
    Closed,
    Opened,
    Update,
    calls_of,
    text_of,
)
from penstock.server.openai.conversation import Chat, content_of, start_chat
from penstock.server.openai.generation import Delta, News
from penstock.server.openai.protocol import COMPLETION_RESPONSES, ChatCompletionRequest
from penstock.server.openai.reported_streams import reported_stream
from penstock.server.service import Service, service_of

router = APIRouter()

_ROLE = "assistant"


@router.post("/v1/chat/completions", responses=COMPLETION_RESPONSES)
async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
    """Answers a conversation, `n` times."""
    service = service_of(request)
    names = generation.name_request(request, body, "chatcmpl")
    # Each of several completions begins with what is known of the prompt, which a continued request does not compute.
    can_report = (body.n or 1) == 1 or body.prompt_logprobs is None
    reported = reported_stream(service, request, body, names.answer_id) if can_report else None
    chat = await start_chat(service, request, body, names.engine_id, reported)
    head = generation.answer_head(service, names.answer_id, chat.model, reported)
    answer = _Answer(service, body, chat, head)
    return await generation.respond(
        request, chat.generation, answer, names.header, is_stream=bool(body.stream), reported=reported
    )


class _Answer:
    """Writes one request's answer, complete or streamed."""

    def __init__(self, service: Service, body: ChatCompletionRequest, chat: Chat, head: dict[str, Any]) -> None:
        self._body = body
        self._generation = chat.generation
        self._completions = [AnswerBlocks(chat, number) for number in range(len(chat.generation.outputs[0].outputs))]
        self._tokenizer = service.llm.get_tokenizer()
        self._head = head
        self._end_token_ids = service.llm.eos_token_ids
        self._separates_reasoning = not chat.reasoning.is_none
        self._shows_reasoning = body.include_reasoning is not False
        last = body.messages[-1]
        echoed = content_of(last) if body.echo and last.role == _ROLE else ""
        # The prompt of a continued message omits the whitespace at its end.
        self._echoed = echoed.rstrip() if body.continue_final_message else echoed

    def whole(self) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        for completion in self._completions:
            update = completion.advance()
            assert update is not None, "a finished completion has something to say"
            choices.append(self._choice(update.delta, completion.called, "message", self._message(completion.blocks)))
        answer = {**self._head, "object": "chat.completion", "choices": choices, "usage": self._generation.usage()}
        prompt_fields = self._prompt_fields(self._generation.outputs[0])
        return {**answer, **prompt_fields, **self._generation.transfer_fields}

    def _message(self, blocks: list[Block]) -> dict[str, Any]:
        content = self._echoed + text_of(blocks, BlockKind.TEXT)
        message: dict[str, Any] = {"role": _ROLE, "content": content, "refusal": None}
        if self._separates_reasoning:
            message |= _reasoning(text_of(blocks, BlockKind.REASONING) if self._shows_reasoning else "")
        if calls := calls_of(blocks):
            message |= {"content": content or None, "tool_calls": calls}
        return message

    def stream(self) -> AsyncGenerator[bytes, None]:
        for completion in self._completions:
            completion.skip_given()
        head, options = {**self._head, "object": "chat.completion.chunk"}, self._body.stream_options
        return generation.stream_chunks(self._generation, head, options, self._news)

    def _news(self, number: int) -> News:
        """Yields the choices that have changed, each with the fields of its chunk about the prompt."""
        for completion in self._completions:
            update = completion.advance()
            if update is None:
                continue
            choice = self._choice(update.delta, completion.called, "delta", self._delta(update))
            if self._has_news(choice):
                yield choice, self._prompt_fields(self._generation.outputs[number]) if update.delta.is_first else {}

    def _has_news(self, choice: dict[str, Any]) -> bool:
        """Whether a chunk has content: while a tool call is being parsed, most would be empty."""
        options = self._body.stream_options
        counts = options is not None and options.continuous_usage_stats
        return bool(choice["delta"] or choice["finish_reason"] or choice["logprobs"] or "token_ids" in choice or counts)

    def _delta(self, update: Update) -> dict[str, Any]:
        is_first = update.delta.is_first
        content = (self._echoed if is_first else "") + update.text(BlockKind.TEXT)
        reasoning = update.text(BlockKind.REASONING)
        calls = _call_deltas(update.events)
        result: dict[str, Any] = {"role": _ROLE} if is_first else {}
        if reasoning and self._shows_reasoning:
            result |= _reasoning(reasoning)
        if content or (is_first and not calls):
            result["content"] = content
        if calls:
            result["tool_calls"] = calls
        return result

    def _choice(self, delta: Delta, called: bool, name: str, message: dict[str, Any]) -> dict[str, Any]:
        """Returns a choice with its `message` or `delta`; for a request with `functions` the call is in
        `function_call`.
        """
        body = self._body
        reason = delta.finish_reason
        if called and reason == "stop":
            reason = "function_call" if body.functions else "tool_calls"
        choice: dict[str, Any] = {
            "index": delta.index,
            "logprobs": self._logprobs(delta),
            "finish_reason": reason,
            "stop_reason": delta.stop_reason,
        }
        if body.return_token_ids:
            choice["token_ids"] = delta.token_ids
        if body.functions:
            for call in message.pop("tool_calls", ())[:1]:
                message["function_call"] = call["function"]
        return {**choice, name: message}

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        rows = delta.logprobs[:-1] if self._hides_last(delta) else delta.logprobs
        names_ids = bool(self._body.return_tokens_as_token_ids)
        return logprobs.chat_logprobs(self._tokenizer, rows, self._body.top_logprobs or 0, names_ids)

    def _hides_last(self, delta: Delta) -> bool:
        """Whether the last token ended the answer and is not part of it."""
        if delta.finish_reason != "stop" or not delta.token_ids or self._body.include_stop_str_in_output:
            return False
        last = delta.token_ids[-1]
        return delta.stop_reason == last or (delta.stop_reason is None and last in self._end_token_ids)

    def _prompt_fields(self, output: RequestOutput) -> dict[str, Any]:
        """Returns vLLM's optional fields about the prompt."""
        fields: dict[str, Any] = {}
        if self._body.return_token_ids:
            fields["prompt_token_ids"] = output.prompt_token_ids
        if self._body.prompt_logprobs is not None:
            fields["prompt_logprobs"] = logprobs.prompt_logprobs(
                output.prompt_logprobs or (), self._body.prompt_logprobs
            )
        return fields


def _reasoning(text: str) -> dict[str, Any]:
    """Returns the reasoning under the name that most clients know and under vLLM's newer name."""
    return {"reasoning_content": text or None, "reasoning": text or None}


def _call_deltas(events: list[BlockEvent]) -> list[dict[str, Any]]:
    """Returns what the calls have gained, at most one entry per call, in their order."""
    deltas: dict[int, dict[str, Any]] = {}
    for event in events:
        block = event.block
        if block.kind is not BlockKind.CALL or isinstance(event, Closed):
            continue
        number = block.call_index
        if isinstance(event, Opened):
            function = {"name": block.name, "arguments": ""}
            deltas[number] = {"index": number, "id": block.call_id, "type": "function", "function": function}
        else:
            delta = deltas.setdefault(number, {"index": number, "function": {"arguments": ""}})
            delta["function"]["arguments"] += event.text
    return list(deltas.values())
