"""`POST /v1/chat/completions`."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.messages.outputs import RequestOutput
from penstock.messages.sampling_params import SamplingParams
from penstock.messages.structured_outputs import StructuredOutputsParams
from penstock.server import limits
from penstock.server.openai import generation, logprobs, prompts
from penstock.server.openai.generation import Cursor, Delta, Generation
from penstock.server.openai.prompts import AS_WRITTEN, Tokenizing
from penstock.server.openai.protocol import ChatCompletionRequest, ChatMessage, TokenizeRequest, Tool, ToolChoice
from penstock.server.openai.responses import COMPLETION_RESPONSES
from penstock.server.openai.tool_calls import ParsedDelta, ToolCallDelta, ToolCallFormat, ToolCallParser
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
    model = service.admit(body.model)
    tools = _ToolUse(body, service.tool_format)
    params = _sampling_params(body, service, tools)
    tokenizing = prompts.tokenizing_of(body, service, params.max_tokens)
    prompt = await render_messages(service, body.messages, tools.offered, template_options(body), tokenizing)
    if tools.prefix:
        prompt += service.llm.get_tokenizer().encode(tools.prefix, add_special_tokens=False)
    names = generation.name_request(request, body, "chatcmpl")
    started = await generation.start(service, request, names.engine_id, [prompt], params, body)
    head = {"id": names.answer_id, "created": int(service.clock.wall()), "model": model}
    answer = _Answer(service, body, started, tools, head)
    return await generation.respond(request, started, answer, names.header, is_stream=bool(body.stream))


def _sampling_params(body: ChatCompletionRequest, service: Service, tools: _ToolUse) -> SamplingParams:
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", "top_logprobs")
    overrides: dict[str, Any] = {}
    if tools.grammar:
        if body.structured_outputs is not None or (body.response_format and body.response_format.type != "text"):
            raise RequestError("a forced tool call excludes response_format and structured_outputs", "tool_choice")
        overrides["structured_outputs"] = StructuredOutputsParams(grammar=tools.grammar)
    return generation.sampling_params(
        body,
        service.default_sampling_params,
        **overrides,
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )


# ---- Conversations to tokens ----


def template_options(body: ChatCompletionRequest | TokenizeRequest) -> dict[str, Any]:
    """What `render_messages` passes on to the template. Raises RequestError for options that contradict each other."""
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
    """The conversation's tokens. Raises RequestError for unknown roles and fields, and when the template refuses it."""
    tokenizer = service.llm.get_tokenizer()
    template = tokenizer.chat_template_source or ""
    prompts.check_messages(messages, template)
    plain = [prompts.in_todays_form(_plain_message(message), template) for message in messages]
    described = [tool.model_dump(exclude_none=True) for tool in tools] or None

    def work() -> list[int]:
        text = tokenizer.render_chat(plain, tools=described, **options)
        return tokenizer.encode(text, tokenizing.add_special_tokens, tokenizing.truncation)

    return await service.llm.text_work.run(prompts.num_characters([plain, described, *options.values()]), work)


def _plain_message(message: ChatMessage) -> dict[str, Any]:
    """As templates expect it: text for content, and objects for the arguments of earlier tool calls."""
    plain = message.model_dump(exclude_none=True)
    if isinstance(message.content, list):
        plain["content"] = "".join(part.text for part in message.content)
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


# ---- Tools ----


class _ToolUse:
    """Whether and how this answer may call tools.

    `prefix` is what the answer is made to begin with, and `grammar` what it is held to from there on.
    """

    def __init__(self, body: ChatCompletionRequest, tool_format: ToolCallFormat | None) -> None:
        choice = body.tool_choice or ("auto" if body.tools else "none")
        self.offered: list[Tool] = [] if choice == "none" else list(body.tools or ())
        self.prefix = ""
        self.grammar = ""
        self.allows_several = body.parallel_tool_calls is not False
        self._format = tool_format if self.offered else None
        if choice == "none":
            return
        if not self.offered:
            raise RequestError("tool_choice needs tools", "tool_choice")
        for tool in self.offered:
            _check_schema(tool)
        if self._format is None:
            raise RequestError(
                "the chat template shows no known format of tool calls: start the server with --tool-call-parser",
                "tools",
            )
        if isinstance(choice, ToolChoice):
            name = choice.function.name
            if name not in [tool.function.name for tool in self.offered]:
                raise RequestError(f"tool_choice names {name!r}, which is none of the tools", "tool_choice")
            self._force(self._format, name)
        elif choice == "required":
            self._force(self._format, None)

    def _force(self, tool_format: ToolCallFormat, name: str | None) -> None:
        """Makes the answer a call of this function, or of any."""
        functions = [tool.function for tool in self.offered if name in (None, tool.function.name)]
        schemas = {function.name: function.parameters or {"type": "object"} for function in functions}
        self.prefix = tool_format.forced_prefix(name)
        self.grammar = tool_format.forced_grammar(schemas, name)

    def reader(self) -> _ToolReader | _PlainReader:
        """Reads one completion."""
        if self._format is None:
            return _PlainReader()
        return _ToolReader(self._format.parser(), self.prefix, self.allows_several)


def _check_schema(tool: Tool) -> None:
    try:
        size = len(msgspec.json.encode(tool.function.parameters))
    except UnicodeEncodeError:
        raise RequestError(f"the parameters of tool {tool.function.name!r} are not valid Unicode", "tools") from None
    if size > limits.MAX_TOOL_SCHEMA_BYTES:
        raise RequestError(
            f"the parameters of tool {tool.function.name!r} take {size} of at most {limits.MAX_TOOL_SCHEMA_BYTES} B",
            "tools",
        )


class _PlainReader:
    """Takes all text for content."""

    called = False

    def read(self, text: str, is_last: bool) -> ParsedDelta:
        return ParsedDelta(text)


class _ToolReader:
    """Separates tool calls from content; `called` tells whether there was a call."""

    def __init__(self, parser: ToolCallParser, prefix: str, allows_several: bool) -> None:
        self._parser = parser
        self._pending = prefix
        self._allows_several = allows_several

    @property
    def called(self) -> bool:
        return self._parser.num_calls > 0

    def read(self, text: str, is_last: bool) -> ParsedDelta:
        parts = [self._parser.feed(self._pending + text)]
        self._pending = ""
        if is_last:
            parts.append(self._parser.finish())
        calls = [call for part in parts for call in part.tool_calls if self._allows_several or call.index == 0]
        return ParsedDelta("".join(part.content for part in parts), tuple(calls))


# ---- Answers ----


class _Answer:
    """Writes one request's answer, whole or as it comes."""

    def __init__(
        self,
        service: Service,
        body: ChatCompletionRequest,
        started: Generation,
        tools: _ToolUse,
        head: dict[str, Any],
    ) -> None:
        self._body = body
        self._generation = started
        self._tools = tools
        self._tokenizer = service.llm.get_tokenizer()
        self._head = head
        self._end_token_ids = service.llm.eos_token_ids
        last = body.messages[-1]
        self._echoed = str(_plain_message(last).get("content", "")) if body.echo and last.role == _ROLE else ""

    def whole(self) -> dict[str, Any]:
        output = self._generation.outputs[0]
        choices: list[dict[str, Any]] = []
        for completion in output.outputs:
            delta = Cursor().advance(completion)
            assert delta is not None, "a finished completion has something to say"
            reader = self._tools.reader()
            parsed = reader.read(delta.text, is_last=True)
            choice = self._choice(delta, reader.called)
            choice["message"] = self._message(parsed)
            choices.append(self._in_the_form_asked_for(choice, choice["message"]))
        answer = {**self._head, "object": "chat.completion", "choices": choices, "usage": self._generation.usage()}
        return {**answer, **self._prompt_fields(output)}

    def _message(self, parsed: ParsedDelta) -> dict[str, Any]:
        content = self._echoed + parsed.content
        message: dict[str, Any] = {"role": _ROLE, "content": content, "refusal": None}
        if parsed.tool_calls:
            # A call whose text is here whole comes in one delta.
            calls = [{"id": c.id, "type": "function", "function": _function(c)} for c in parsed.tool_calls]
            message |= {"content": content or None, "tool_calls": calls}
        return message

    async def stream(self) -> AsyncGenerator[bytes, None]:
        options = self._body.stream_options
        output = self._generation.outputs[0]
        head = {**self._head, "object": "chat.completion.chunk"}
        states = [(Cursor(), self._tools.reader()) for _ in output.outputs]
        async with aclosing(self._generation.updates()) as updates:
            async for _ in updates:
                for (cursor, reader), completion in zip(states, output.outputs, strict=True):
                    delta = cursor.advance(completion)
                    if delta is None:
                        continue
                    parsed = reader.read(delta.text, is_last=delta.finish_reason is not None)
                    choice = self._choice(delta, reader.called)
                    choice["delta"] = self._delta(delta, parsed)
                    choice = self._in_the_form_asked_for(choice, choice["delta"])
                    if not self._has_news(choice):
                        continue
                    chunk = {**head, "choices": [choice]}
                    if delta.is_first:
                        chunk |= self._prompt_fields(output)
                    if options is not None and options.include_usage:
                        chunk["usage"] = self._generation.usage() if options.continuous_usage_stats else None
                    yield event(chunk)
        if options is not None and options.include_usage:
            yield event({**head, "choices": [], "usage": self._generation.usage()})
        yield DONE

    def _has_news(self, choice: dict[str, Any]) -> bool:
        """Whether a chunk says anything: while a tool call is being read, most would not."""
        options = self._body.stream_options
        counts = options is not None and options.continuous_usage_stats
        return bool(choice["delta"] or choice["finish_reason"] or choice["logprobs"] or "token_ids" in choice or counts)

    def _delta(self, delta: Delta, parsed: ParsedDelta) -> dict[str, Any]:
        content = (self._echoed if delta.is_first else "") + parsed.content
        result: dict[str, Any] = {"role": _ROLE} if delta.is_first else {}
        if content or (delta.is_first and not parsed.tool_calls):
            result["content"] = content
        if parsed.tool_calls:
            result["tool_calls"] = [_call_delta(call) for call in parsed.tool_calls]
        return result

    def _in_the_form_asked_for(self, choice: dict[str, Any], message: dict[str, Any]) -> dict[str, Any]:
        """The choice; for a request with `functions` its call stands in `function_call`."""
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
        """Whether the last token ended the answer, as no part of it."""
        if delta.finish_reason != "stop" or not delta.token_ids or self._body.include_stop_str_in_output:
            return False
        last = delta.token_ids[-1]
        is_end = last in self._end_token_ids and not self._body.ignore_eos
        return is_end or (isinstance(delta.stop_reason, int) and delta.stop_reason == last)

    def _prompt_fields(self, output: RequestOutput) -> dict[str, Any]:
        """What vLLM tells of the prompt, when it is asked for."""
        fields: dict[str, Any] = {}
        if self._body.return_token_ids:
            fields["prompt_token_ids"] = output.prompt_token_ids
        if self._body.prompt_logprobs is not None:
            fields["prompt_logprobs"] = logprobs.prompt_logprobs(
                output.prompt_logprobs or (), self._body.prompt_logprobs
            )
        return fields


def _call_delta(call: ToolCallDelta) -> dict[str, Any]:
    head = {} if call.name is None else {"id": call.id, "type": "function"}
    return {"index": call.index, **head, "function": _function(call)}


def _function(call: ToolCallDelta) -> dict[str, Any]:
    name = {} if call.name is None else {"name": call.name}
    return {**name, "arguments": call.arguments}
