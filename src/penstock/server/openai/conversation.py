"""Conversations to prompts, and their start in the engine, for all APIs that answer conversations."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastapi import Request

from penstock.messages.sampling_params import SamplingParams
from penstock.messages.structured_outputs import StructuredOutputsParams
from penstock.server.openai import formats, generation, prompts
from penstock.server.openai.generation import Generation
from penstock.server.openai.prompts import AS_WRITTEN, Tokenizing
from penstock.server.openai.protocol import ChatCompletionRequest, ChatMessage, TokenizeRequest, Tool
from penstock.server.openai.reasoning import ReasoningFormat, Start
from penstock.server.openai.tool_calls.parser import MakeId, random_id
from penstock.server.openai.tool_use import AnswerReader, ToolUse
from penstock.server.service import Service
from penstock.utils.errors import RequestError
from penstock.utils.stream_reports import StreamName

_RESERVED_VARIABLES = ("self", "messages", "tools", "add_generation_prompt", "continue_final_message")


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation whose answer is being generated. `start` is the state from which its reasoning is separated;
    `prefix` is the beginning of the answer that the prompt already contains; the ids of calls are made by `make_id`
    from the numbers of the completion and of the call.
    """

    model: str
    generation: Generation
    tools: ToolUse
    reasoning: ReasoningFormat
    start: Start
    prefix: str
    make_id: MakeId

    def reader(self, number: int) -> AnswerReader:
        """Reads completion `number`."""
        make_id = functools.partial(self.make_id, number)
        return self.tools.reader(self.reasoning.reader(self.start), self.prefix, make_id)


async def render_chat(service: Service, body: ChatCompletionRequest) -> tuple[ToolUse, list[int], Start, str]:
    """Returns the tools that the answer may use, the prompt's tokens, and the `start` and the `prefix` that a `Chat`
    has. Raises RequestError.
    """
    tools, tokenizer = ToolUse(body, service.tool_format), service.llm.get_tokenizer()
    tokenizing = prompts.tokenizing_of(body, service, prompts.max_tokens_of(body))
    prompt = await render_messages(service, body.messages, tools.offered, template_options(body), tokenizing)
    continued = content_of(body.messages[-1]) if body.continue_final_message else None
    start = service.reasoning.start_of(tokenizer, prompt, continued)
    # A reasoning model writes the prefix itself, after its reasoning.
    prefix = tools.prefix if start is Start.OVER else ""
    if prefix:
        prompt += tokenizer.encode(prefix, add_special_tokens=False)
    return tools, prompt, start, prefix


async def start_chat(
    service: Service, request: Request, body: ChatCompletionRequest, request_id: str, reported: StreamName | None = None
) -> Chat:
    """Renders the conversation and hands it to the engine. Raises RequestError."""
    model = service.admit(body.model)
    tools, prompt, start, prefix = await render_chat(service, body)
    params = _sampling_params(body, service, tools, start)
    started = await generation.start(service, request, request_id, [prompt], params, body, reported)
    separated_from = Start.OVER if body.separate_reasoning is False else start
    make_id = random_id if reported is None else reported.make_id
    return Chat(model, started, tools, service.reasoning, separated_from, prefix, make_id)


def _sampling_params(body: ChatCompletionRequest, service: Service, tools: ToolUse, start: Start) -> SamplingParams:
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", "top_logprobs")
    overrides: dict[str, Any] = {}
    has_form = formats.structured_outputs(body) is not None
    if tools.is_forced and has_form:
        raise RequestError("a forced tool call excludes response_format and structured_outputs", "tool_choice")
    with formats.naming_the_field(body):
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
        max_tokens=prompts.max_tokens_of(body),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    if params.structured_outputs is None:
        return params
    outputs = replace(params.structured_outputs, reasoning=service.reasoning.grammar(start, is_call=tools.is_forced))
    return replace(params, structured_outputs=outputs)


def template_options(body: ChatCompletionRequest | TokenizeRequest) -> dict[str, Any]:
    """Returns the options that `render_messages` passes to the template. Raises RequestError if they contradict each
    other.
    """
    variables = body.chat_template_kwargs or {}
    for name in _RESERVED_VARIABLES:
        if name in variables:
            raise RequestError(f"chat_template_kwargs must not set {name!r}", "chat_template_kwargs")
    opens_turn = body.add_generation_prompt and "add_generation_prompt" in body.model_fields_set
    if body.continue_final_message and (opens_turn or not body.messages or body.messages[-1].role != "assistant"):
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
    """Converts a message to the form that templates expect: content as text, and one name for the reasoning."""
    plain = message.model_dump(exclude_none=True)
    if isinstance(message.content, list):
        plain["content"] = "".join(part.text for part in message.content)
    if "reasoning" in plain:
        # The field's newer name; templates know the older one.
        plain.setdefault("reasoning_content", plain["reasoning"])
    return plain


def content_of(message: ChatMessage) -> str:
    """Returns a message's content as text."""
    return str(_plain_message(message).get("content", ""))
