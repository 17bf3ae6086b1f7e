"""`POST /v1/chat/completions`."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.messages.outputs import RequestOutput
from penstock.messages.sampling_params import SamplingParams
from penstock.messages.structured_outputs import StructuredOutputsParams
from penstock.server.openai import generation, logprobs, prompts
from penstock.server.openai.answer_parts import AnswerDelta, ToolCallDelta
from penstock.server.openai.generation import Cursor, Delta, Generation
from penstock.server.openai.prompts import AS_WRITTEN, Tokenizing
from penstock.server.openai.protocol import ChatCompletionRequest, ChatMessage, TokenizeRequest, Tool
from penstock.server.openai.reasoning import ReasoningFormat, Start
from penstock.server.openai.responses import COMPLETION_RESPONSES
from penstock.server.openai.tool_use import AnswerReader, ToolUse
from penstock.server.service import Service, service_of
from penstock.server.sse import DONE, event
from penstock.utils.errors import RequestError

router = APIRouter()

_ROLE = "assistant"
_RESERVED_VARIABLES = ("self", "messages", "tools", "add_generation_prompt", "continue_final_message")


@router.post("/v1/chat/completions", responses=COMPLETION_RESPONSES)
async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
    """Answers a conversation, `n` times."""
    service = service_of(request)
    names = generation.name_request(request, body, "chatcmpl")
    chat = await start_chat(service, request, body, names.engine_id)
    head = {"id": names.answer_id, "created": int(service.clock.wall()), "model": chat.model}
    answer = _Answer(service, body, chat, head)
    return await generation.respond(request, chat.generation, answer, names.header, is_stream=bool(body.stream))


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation whose answer is being generated; used by all APIs that answer conversations. `start` is the state
    from which its reasoning is separated; `prefix` is the beginning of the answer that the prompt already contains.
    """

    model: str
    generation: Generation
    tools: ToolUse
    reasoning: ReasoningFormat
    start: Start
    prefix: str

    def reader(self) -> AnswerReader:
        """Reads one completion."""
        return self.tools.reader(self.reasoning.reader(self.start), self.prefix)


async def render_chat(service: Service, body: ChatCompletionRequest) -> tuple[ToolUse, list[int]]:
    """Returns the tools that the answer may use, and the conversation's tokens. Raises RequestError."""
    tools = ToolUse(body, service.tool_format)
    tokenizing = prompts.tokenizing_of(body, service, _max_tokens(body))
    return tools, await render_messages(service, body.messages, tools.offered, template_options(body), tokenizing)


async def start_chat(service: Service, request: Request, body: ChatCompletionRequest, request_id: str) -> Chat:
    """Renders the conversation and hands it to the engine. Raises RequestError."""
    model = service.admit(body.model)
    tools, prompt = await render_chat(service, body)
    tokenizer = service.llm.get_tokenizer()
    continued = str(_plain_message(body.messages[-1]).get("content", "")) if body.continue_final_message else None
    start = service.reasoning.start_of(tokenizer, prompt, continued)
    # A reasoning model writes the prefix itself, after its reasoning.
    prefix = tools.prefix if start is Start.OVER else ""
    if prefix:
        prompt += tokenizer.encode(prefix, add_special_tokens=False)
    params = _sampling_params(body, service, tools, start)
    started = await generation.start(service, request, request_id, [prompt], params, body)
    separated_from = Start.OVER if body.separate_reasoning is False else start
    return Chat(model, started, tools, service.reasoning, separated_from, prefix)


def _max_tokens(body: ChatCompletionRequest) -> int | None:
    return body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens


def _sampling_params(body: ChatCompletionRequest, service: Service, tools: ToolUse, start: Start) -> SamplingParams:
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", "top_logprobs")
    overrides: dict[str, Any] = {}
    has_form = body.structured_outputs is not None or (body.response_format and body.response_format.type != "text")
    if tools.is_forced and has_form:
        raise RequestError("a forced tool call excludes response_format and structured_outputs", "tool_choice")
    grammar = None if has_form else tools.grammar(with_prefix=start is not Start.OVER)
    if grammar is not None:
        overrides["structured_outputs"] = StructuredOutputsParams(grammar=grammar)
    if tools.banned_words:
        overrides["bad_words"] = [*(body.bad_words or ()), *tools.banned_words]
    if tools.needs_special_tokens or service.reasoning.needs_special_tokens(start):
        overrides["skip_special_tokens"] = False
    params = generation.sampling_params(
        body,
        service.default_sampling_params,
        **overrides,
        max_tokens=_max_tokens(body),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    if params.structured_outputs is None:
        return params
    outputs = replace(params.structured_outputs, reasoning=service.reasoning.grammar(start))
    return replace(params, structured_outputs=outputs)


# ---- Conversations to tokens ----


def template_options(body: ChatCompletionRequest | TokenizeRequest) -> dict[str, Any]:
    """Returns the options that `render_messages` passes to the template. Raises RequestError if they contradict each
    other.
    """
    variables = body.chat_template_kwargs or {}
    for name in _RESERVED_VARIABLES:
        if name in variables:
            raise RequestError(f"chat_template_kwargs must not set {name!r}", "chat_template_kwargs")
    opens_turn = body.add_generation_prompt and "add_generation_prompt" in body.model_fields_set
    if body.continue_final_message and (opens_turn or not body.messages or body.messages[-1].role != _ROLE):
        raise RequestError(
            "continue_final_message needs a last message of the assistant, and no add_generation_prompt",
            "continue_final_message",
        )
    adds_prompt = body.add_generation_prompt is not False and not body.continue_final_message
    options: dict[str, Any] = {"add_generation_prompt": adds_prompt}
    if body.continue_final_message:
        options["continue_final_message"] = True
    return {**prompts.template_variables(body), **variables, **options}


async def render_messages(
    service: Service,
    messages: Sequence[ChatMessage],
    tools: Sequence[Tool],
    options: dict[str, Any],
    tokenizing: Tokenizing = AS_WRITTEN,
) -> list[int]:
    """Returns the conversation's tokens. Raises RequestError for unknown roles and fields, and if the template refuses
    it.
    """
    tokenizer = service.llm.get_tokenizer()
    template = tokenizer.chat_template_source or ""
    prompts.check_messages(messages, template)
    plain = [prompts.with_known_role(_plain_message(message), template) for message in messages]
    described = [tool.model_dump(exclude_none=True) for tool in tools] or None

    def work() -> list[int]:
        text = tokenizer.render_chat(plain, tools=described, **options)
        return tokenizer.encode(text, tokenizing.add_special_tokens, tokenizing.truncation)

    return await service.llm.text_work.run(prompts.num_characters([plain, described, *options.values()]), work)


def _plain_message(message: ChatMessage) -> dict[str, Any]:
    """Converts a message to the form that templates expect: content as text, arguments of earlier tool calls as
    objects.
    """
    plain = message.model_dump(exclude_none=True)
    if isinstance(message.content, list):
        plain["content"] = "".join(part.text for part in message.content)
    if "reasoning" in plain:
        # The field's newer name; templates know the older one.
        plain.setdefault("reasoning_content", plain["reasoning"])
    for call in plain.get("tool_calls", ()):
        function = call["function"]
        if isinstance(function["arguments"], str):
            function["arguments"] = _arguments(function["arguments"])
    return plain


def _arguments(text: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


# ---- Answers ----


class _Answer:
    """Writes one request's answer, complete or streamed."""

    def __init__(
        self,
        service: Service,
        body: ChatCompletionRequest,
        chat: Chat,
        head: dict[str, Any],
    ) -> None:
        self._body = body
        self._chat = chat
        self._generation = chat.generation
        self._tokenizer = service.llm.get_tokenizer()
        self._head = head
        self._end_token_ids = service.llm.eos_token_ids
        self._shows_reasoning = body.include_reasoning is not False
        last = body.messages[-1]
        self._echoed = str(_plain_message(last).get("content", "")) if body.echo and last.role == _ROLE else ""

    def whole(self) -> dict[str, Any]:
        output = self._generation.outputs[0]
        choices: list[dict[str, Any]] = []
        for completion in output.outputs:
            delta = Cursor().advance(completion)
            assert delta is not None, "a finished completion has something to say"
            reader = self._chat.reader()
            parsed = reader.read(delta.text, is_last=True)
            choice = self._choice(delta, reader.called)
            choice["message"] = self._message(parsed)
            choices.append(self._with_function_call(choice, choice["message"]))
        answer = {**self._head, "object": "chat.completion", "choices": choices, "usage": self._generation.usage()}
        return {**answer, **self._prompt_fields(output), **self._generation.transfer_fields}

    def _message(self, parsed: AnswerDelta) -> dict[str, Any]:
        content = self._echoed + parsed.content
        message: dict[str, Any] = {"role": _ROLE, "content": content, "refusal": None}
        if not self._chat.reasoning.is_none:
            message |= _reasoning(parsed.reasoning if self._shows_reasoning else "")
        if parsed.tool_calls:
            # A call whose text is complete is sent in one delta.
            calls = [{"id": c.id, "type": "function", "function": _function(c)} for c in parsed.tool_calls]
            message |= {"content": content or None, "tool_calls": calls}
        return message

    async def stream(self) -> AsyncGenerator[bytes, None]:
        options = self._body.stream_options
        output = self._generation.outputs[0]
        head = {**self._head, "object": "chat.completion.chunk"}
        states = [(Cursor(), self._chat.reader()) for _ in output.outputs]
        async with aclosing(self._generation.updates()) as updates:
            async for _ in updates:
                for (cursor, reader), completion in zip(states, output.outputs, strict=True):
                    delta = cursor.advance(completion)
                    if delta is None:
                        continue
                    parsed = reader.read(delta.text, is_last=delta.finish_reason is not None)
                    choice = self._choice(delta, reader.called)
                    choice["delta"] = self._delta(delta, parsed)
                    choice = self._with_function_call(choice, choice["delta"])
                    if not self._has_news(choice):
                        continue
                    chunk = {**head, "choices": [choice]}
                    if delta.is_first:
                        chunk |= self._prompt_fields(output)
                    if delta.finish_reason is not None:
                        chunk |= self._generation.transfer_fields
                    if options is not None and options.include_usage:
                        chunk["usage"] = self._generation.usage() if options.continuous_usage_stats else None
                    yield event(chunk)
        if options is not None and options.include_usage:
            yield event({**head, "choices": [], "usage": self._generation.usage()})
        yield DONE

    def _has_news(self, choice: dict[str, Any]) -> bool:
        """Whether a chunk has content: while a tool call is being parsed, most would be empty."""
        options = self._body.stream_options
        counts = options is not None and options.continuous_usage_stats
        return bool(choice["delta"] or choice["finish_reason"] or choice["logprobs"] or "token_ids" in choice or counts)

    def _delta(self, delta: Delta, parsed: AnswerDelta) -> dict[str, Any]:
        content = (self._echoed if delta.is_first else "") + parsed.content
        result: dict[str, Any] = {"role": _ROLE} if delta.is_first else {}
        if parsed.reasoning and self._shows_reasoning:
            result |= _reasoning(parsed.reasoning)
        if content or (delta.is_first and not parsed.tool_calls):
            result["content"] = content
        if parsed.tool_calls:
            result["tool_calls"] = [_call_delta(call) for call in parsed.tool_calls]
        return result

    def _with_function_call(self, choice: dict[str, Any], message: dict[str, Any]) -> dict[str, Any]:
        """Moves the call to `function_call` if the request has the deprecated `functions`; returns the choice."""
        if not self._body.functions:
            return choice
        for call in message.pop("tool_calls", ())[:1]:
            message["function_call"] = call["function"]
        if choice["finish_reason"] == "tool_calls":
            choice["finish_reason"] = "function_call"
        return choice

    def _choice(self, delta: Delta, called: bool) -> dict[str, Any]:
        body = self._body
        reason = "tool_calls" if called and delta.finish_reason == "stop" else delta.finish_reason
        choice: dict[str, Any] = {
            "index": delta.index,
            "logprobs": self._logprobs(delta),
            "finish_reason": reason,
            "stop_reason": delta.stop_reason,
        }
        if body.return_token_ids:
            choice["token_ids"] = delta.token_ids
        return choice

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
        is_end = last in self._end_token_ids and not self._body.ignore_eos
        return is_end or (isinstance(delta.stop_reason, int) and delta.stop_reason == last)

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


def _call_delta(call: ToolCallDelta) -> dict[str, Any]:
    head = {} if call.name is None else {"id": call.id, "type": "function"}
    return {"index": call.index, **head, "function": _function(call)}


def _function(call: ToolCallDelta) -> dict[str, Any]:
    name = {} if call.name is None else {"name": call.name}
    return {**name, "arguments": call.arguments}
