"""`POST /v1/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.frontend.input_processor import Prompt
from penstock.messages.outputs import CompletionOutput, FinishReason, RequestOutput
from penstock.messages.sampling_params import SamplingParams
from penstock.server.openai import generation, logprobs, prompts
from penstock.server.openai.generation import Cursor, Delta, Generation, News
from penstock.server.openai.protocol import COMPLETION_RESPONSES, CompletionRequest
from penstock.server.openai.reported_streams import reported_stream
from penstock.server.service import Service, service_of
from penstock.utils.errors import RequestError

router = APIRouter()


@router.post("/v1/completions", responses=COMPLETION_RESPONSES)
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Completes one prompt or several, `n` times each."""
    service = service_of(request)
    model = service.admit(body.model)
    given = _prompts(body)
    params = _sampling_params(body, service)
    tokenizing = prompts.tokenizing_of(body, service, params.max_tokens, adds_by_default=True)
    encoded = await prompts.encode_prompts(service, given, tokenizing)
    names = generation.name_request(request, body, "cmpl")
    can_report = len(given) == 1 and not (params.n > 1 and params.prompt_logprobs is not None)
    reported = reported_stream(service, request, body, names.answer_id) if can_report else None
    started = await generation.start(service, request, names.engine_id, encoded, params, body, reported)
    head = generation.answer_head(service, names.answer_id, model, reported)
    answer = _Answer(service, body, started, head)
    is_stream = bool(body.stream)
    return await generation.respond(request, started, answer, names.header, is_stream=is_stream, reported=reported)


def _prompts(body: CompletionRequest) -> list[Prompt]:
    """Returns one entry per prompt. Raises RequestError if there are none or too many."""
    if body.prompt and body.prompt_token_ids is not None:
        raise RequestError("prompt and prompt_token_ids exclude each other", "prompt_token_ids")
    given: Any = body.prompt if body.prompt_token_ids is None else body.prompt_token_ids
    if not given:
        raise RequestError("prompt must not be empty", "prompt")
    return [given] if isinstance(given, str) or isinstance(given[0], int) else list(given)


def _sampling_params(body: CompletionRequest, service: Service) -> SamplingParams:
    n = body.n or 1
    if body.echo or (body.logprobs is not None and body.output_token_ids):
        service.llm.get_tokenizer()  # raises now rather than when the answer is written
    if body.best_of not in (None, n):
        raise RequestError(f"best_of must be absent or equal to n={n}: completions are not ranked here", "best_of")
    overrides: dict[str, Any] = {"max_tokens": prompts.max_tokens_of(body), "logprobs": body.logprobs}
    if overrides["max_tokens"] == 0:
        if not body.echo:
            raise RequestError("max_tokens must be at least 1, or 0 with echo", "max_tokens")
        # The engine always generates a token; the answer omits it if it was not requested.
        overrides["max_tokens"] = 1
    if body.echo and body.logprobs is not None and body.output_token_ids and not body.stream:
        raise RequestError("echo with logprobs excludes output_token_ids, unless the answer is streamed", "echo")
    if body.echo and body.logprobs is not None and not body.output_token_ids:
        overrides["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    return generation.sampling_params(body, service.default_sampling_params, **overrides)


class _Answer:
    """Writes one request's answer, complete or streamed. Choice p * n + i is completion i of prompt p."""

    def __init__(self, service: Service, body: CompletionRequest, started: Generation, head: dict[str, Any]) -> None:
        self._service = service
        self._body = body
        self._generation = started
        self._head = {**head, "object": "text_completion"}
        self._is_prompt_only = prompts.max_tokens_of(body) == 0
        self._prompt_texts: dict[int, str] = {}

    def whole(self) -> dict[str, Any]:
        choices = [
            self._choice(number, output, delta)
            for number, output in enumerate(self._generation.outputs)
            for completion in output.outputs
            if (delta := self._cursor(completion).advance(completion)) is not None
        ]
        fields = self._generation.transfer_fields
        return {**self._head, "choices": choices, "usage": self._usage(), **fields}

    def stream(self) -> AsyncGenerator[bytes, None]:
        cursors = [[self._cursor(each) for each in output.outputs] for output in self._generation.outputs]
        for output, of_prompt in zip(self._generation.outputs, cursors, strict=True):
            for cursor, completion in zip(of_prompt, output.outputs, strict=True):
                cursor.skip_given(completion)

        def news(number: int) -> News:
            output = self._generation.outputs[number]
            for cursor, completion in zip(cursors[number], output.outputs, strict=True):
                delta = cursor.advance(completion)
                if delta is not None:
                    yield self._choice(number, output, delta), {}

        options = self._body.stream_options
        return generation.stream_chunks(self._generation, self._head, options, news, self._usage)

    def _cursor(self, completion: CompletionOutput) -> Cursor:
        """Begins after the tokens that the request gave, the lengths of which only log probabilities need."""
        given = completion.token_ids[: completion.num_given_tokens] if self._body.logprobs is not None else ()
        return Cursor(sum(len(self._service.llm.get_tokenizer().decode_token(each)) for each in given))

    def _usage(self) -> dict[str, Any]:
        usage = self._generation.usage()
        without_answer = {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return {**usage, **(without_answer if self._is_prompt_only else {})}

    def _choice(self, number: int, output: RequestOutput, delta: Delta) -> dict[str, Any]:
        body = self._body
        echo = bool(body.echo) and delta.is_first
        prompt = self._prompt_text(number, output) if body.echo else ""
        choice: dict[str, Any] = {
            "index": number * len(output.outputs) + delta.index,
            "text": (prompt if echo else "") + ("" if self._is_prompt_only else delta.text),
            "logprobs": self._logprobs(output, delta, prompt, echo),
            "finish_reason": FinishReason.LENGTH if self._is_prompt_only else delta.finish_reason,
            "stop_reason": None if self._is_prompt_only else delta.stop_reason,
        }
        if body.return_token_ids:
            choice["token_ids"] = [] if self._is_prompt_only else delta.token_ids
            if delta.is_first:
                choice["prompt_token_ids"] = output.prompt_token_ids
        if body.prompt_logprobs is not None and delta.is_first:
            choice["prompt_logprobs"] = logprobs.prompt_logprobs(output.prompt_logprobs or (), body.prompt_logprobs)
        return choice

    def _logprobs(self, output: RequestOutput, delta: Delta, prompt: str, echo: bool) -> Any:
        """Returns the log probabilities of the new tokens, and of the prompt if it is echoed here."""
        num_top = self._body.logprobs
        if num_top is None:
            return None
        rows = [] if self._is_prompt_only else delta.logprobs
        token_ids = delta.token_ids[len(delta.token_ids) - len(rows) :]
        names_ids = bool(self._body.return_tokens_as_token_ids) or not self._service.llm.has_tokenizer
        new = logprobs.completion_logprobs(rows, token_ids, len(prompt) + delta.offset, num_top, names_ids)
        if not echo:
            return new
        prompt_rows, prompt_ids = output.prompt_logprobs or (), output.prompt_token_ids
        told = logprobs.completion_logprobs(prompt_rows, prompt_ids, 0, num_top, names_ids)
        # The first token has no log probability, and therefore no text yet.
        tokenizer = self._service.llm.get_tokenizer()
        first = tokenizer.decode_token(prompt_ids[0])
        told["tokens"][0] = logprobs.token_name(prompt_ids[0]) if names_ids else first
        # A special token that the tokenizer put before a text is not part of it.
        length = 0 if prompt_ids[0] in tokenizer.special_tokens and not prompt.startswith(first) else len(first)
        told["text_offset"][1:] = [place + length for place in told["text_offset"][1:]]
        return logprobs.joined(told, new)

    def _prompt_text(self, number: int, output: RequestOutput) -> str:
        if output.prompt is not None:
            return output.prompt
        if number not in self._prompt_texts:
            text = self._service.llm.get_tokenizer().decode(output.prompt_token_ids, skip_special_tokens=False)
            self._prompt_texts[number] = text
        return self._prompt_texts[number]
