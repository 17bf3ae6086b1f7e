"""Converts a request's fields to engine streams, and the streams' outputs to deltas."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.frontend.input_processor import Prompt
from penstock.frontend.replica import RequestStream
from penstock.messages.outputs import CompletionOutput, FinishReason, Logprobs, RequestOutput
from penstock.messages.sampling_params import SamplingParams
from penstock.server import limits
from penstock.server.errors import JSONResponse
from penstock.server.openai import formats
from penstock.server.openai.protocol import EngineRequestBody, GenerationRequest, StreamOptions, Usage
from penstock.server.openai.reported_streams import TokenReports
from penstock.server.service import Service
from penstock.server.sse import DONE, REQUEST_ID_HEADER, EventStream, client_request_id, event, unless_disconnected
from penstock.utils.errors import EngineDeadError, PenstockError, RequestError
from penstock.utils.stream_reports import STREAM_HEADER, StreamName, header_value

_CONVERTED = ("logit_bias", "structured_outputs")
_SAMPLING_FIELDS = [
    field.name
    for field in dataclasses.fields(SamplingParams)
    if field.name in GenerationRequest.model_fields and field.name not in _CONVERTED
]
_MAX_RANK_DIGITS = 9
_MANY_TOKENS = 1024


def sampling_params(body: GenerationRequest, defaults: SamplingParams, **overrides: Any) -> SamplingParams:
    """Returns the checkpoint's recommendations, overridden by the request's fields. Raises RequestError."""
    given = {name: getattr(body, name) for name in _SAMPLING_FIELDS if getattr(body, name) is not None}
    if body.logit_bias is not None:
        given["logit_bias"] = {_token_id(key): value for key, value in body.logit_bias.items()}
    if body.no_stop_trim:
        given.setdefault("include_stop_str_in_output", True)
    given["structured_outputs"] = formats.structured_outputs(body)
    return replace(defaults, **{**given, **overrides})


def _token_id(key: str) -> int:
    if not key.isascii() or not key.isdigit() or len(key) > 10:
        raise RequestError(f"logit_bias has the key {key[:20]!r}, which is not a token id", "logit_bias")
    return int(key)


@dataclass(frozen=True, slots=True)
class Delta:
    """The new part of a completion. `offset` is the number of characters in the tokens before it. Text may lag behind
    its tokens while it could still become a stop string; log probabilities do not lag, but begin after given tokens.
    """

    index: int
    is_first: bool
    text: str
    offset: int
    token_ids: list[int]
    logprobs: Logprobs
    finish_reason: str | None
    stop_reason: int | str | None


class Cursor:
    """The position up to which one completion has been read. `offset` is the number of characters in the tokens that
    the request gave, whose log probabilities are unknown.
    """

    def __init__(self, offset: int = 0) -> None:
        self._num_characters = 0
        self._num_tokens = 0
        self._num_token_characters = offset
        self._is_finished = False

    def skip_given(self, completion: CompletionOutput) -> str:
        """Moves to the end of the output that the request continues; returns its text. A stream begins there."""
        self._is_finished = completion.finished
        self._num_tokens, self._num_characters = completion.num_given_tokens, completion.num_given_characters
        return completion.text[: self._num_characters]

    def advance(self, completion: CompletionOutput) -> Delta | None:
        """Returns the new part; None if there is none."""
        if self._is_finished or (len(completion.token_ids) == self._num_tokens and not completion.finished):
            return None
        start, shown, offset = self._num_tokens, self._num_characters, self._num_token_characters
        logprobs = (completion.logprobs or [])[max(0, start - completion.num_given_tokens) :]
        self._num_token_characters += sum(len(next(iter(row.values())).decoded_token or "") for row in logprobs)
        self._num_tokens = len(completion.token_ids)
        self._num_characters = len(completion.text)
        self._is_finished = completion.finished
        return Delta(
            index=completion.index,
            is_first=start == 0,
            text=completion.text[shown:],
            offset=offset,
            token_ids=completion.token_ids[start:],
            logprobs=logprobs,
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
        )


@dataclass(frozen=True, slots=True)
class Generation:
    """One HTTP request's prompts in the engine, in order; its creator closes it. `reports` are for a router."""

    streams: tuple[RequestStream, ...]
    reports: TokenReports = dataclasses.field(default_factory=TokenReports)

    @property
    def outputs(self) -> list[RequestOutput]:
        return [stream.output for stream in self.streams]

    async def finish(self) -> None:
        """Waits for all prompts. Raises the engine's errors."""
        for stream in self.streams:
            async for _ in stream:
                pass
            check_failed(stream.output)

    async def updates(self) -> AsyncGenerator[int, None]:
        """Yields a prompt's number whenever its output has changed. Raises the engine's errors."""
        if len(self.streams) == 1:
            # The usual case needs no task and no queue.
            async for output in self.streams[0]:
                check_failed(output)
                yield 0
            return
        changed: asyncio.Queue[int | BaseException] = asyncio.Queue()
        tasks = [asyncio.create_task(_follow(number, stream, changed)) for number, stream in enumerate(self.streams)]
        try:
            # If this reader is slow, a prompt may be reported as changed once more after its end.
            running = set(range(len(tasks)))
            while running:
                item = await changed.get()
                if isinstance(item, BaseException):
                    raise item
                check_failed(self.streams[item].output)
                if self.streams[item].output.finished:
                    running.discard(item)
                yield item
        finally:
            for task in tasks:
                task.cancel()

    async def stream(self, news: Callable[[int], Iterable[bytes]]) -> AsyncGenerator[bytes, None]:
        """Yields the events of all that is new, with their reports. `news` takes the number of a prompt whose output
        has changed, and returns its events. Raises the engine's errors.
        """
        try:
            async with aclosing(self.updates()) as updates:
                async for number in updates:
                    # All at once: the output may have changed by the time that an event has been sent.
                    if data := self.reports.mark(list(news(number))):
                        yield data
        except EngineDeadError:
            if self.reports:
                yield self.reports.DEATH
            raise

    def close(self) -> None:
        """Aborts unfinished requests. Idempotent."""
        for stream in self.streams:
            stream.close()

    @property
    def transfer_fields(self) -> dict[str, Any]:
        """Returns the answer's `kv_transfer_params`, if there is one prompt, it has ended and the KV connector returned
        any.
        """
        said = [output.kv_transfer_params for output in self.outputs]
        return {"kv_transfer_params": said[0]} if len(said) == 1 and said[0] is not None else {}

    def usage(self) -> Usage:
        """Returns the token counts so far, as defined by the OpenAI API."""
        outputs = self.outputs
        return make_usage(
            sum(len(output.prompt_token_ids) for output in outputs),
            sum(len(completion.token_ids) for output in outputs for completion in output.outputs),
            sum(output.num_cached_tokens for output in outputs),
        )


def make_usage(num_prompt: int, num_output: int, num_cached: int) -> Usage:
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


async def _follow(number: int, stream: RequestStream, changed: asyncio.Queue[int | BaseException]) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        try:
            async for _ in stream:
                changed.put_nowait(number)
        except Exception as error:  # noqa: BLE001 - raised again by the one who waits for it
            changed.put_nowait(error)


def check_failed(output: RequestOutput) -> None:
    """Raises RequestError if the request cannot be completed as given, PenstockError if the engine failed on it."""
    if any(completion.finish_reason == FinishReason.ERROR for completion in output.outputs):
        kind = RequestError if output.is_request_error else PenstockError
        raise kind(output.error or "the engine failed on this request")


async def start(
    service: Service,
    request: Request,
    request_id: str,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    body: GenerationRequest,
    reported: StreamName | None = None,
) -> Generation:
    """Submits all prompts to the engine or none: if one is refused, the previous ones are aborted."""
    if reported is not None and params.seed is None:
        params = replace(params, seed=reported.seed)
    num_completions, counted = len(prompts) * params.n, f"{len(prompts)} prompts times n={params.n}"
    if num_completions > limits.MAX_COMPLETIONS:
        raise RequestError(f"{counted} exceed {limits.MAX_COMPLETIONS} completions", "n")
    repeated = params.allowed_token_ids, params.bad_words, params.kv_transfer_params
    if (size := len(msgspec.json.encode(repeated)) * num_completions) > limits.MAX_REPEATED_BYTES:
        told = f"{counted} repeat {size} bytes of allowed_token_ids, bad_words and kv_transfer_params"
        raise RequestError(f"{told}: at most {limits.MAX_REPEATED_BYTES} are allowed, so ask for fewer at a time", "n")
    if len(prompts) > 1 and params.is_disaggregated and service.llm.config.kv_transfer is not None:
        raise RequestError(
            f"there must be one prompt with do_remote_decode or do_remote_prefill, got {len(prompts)}: send one "
            "request per prompt",
            "prompt",
        )
    if body.finished_choices and not body.stream:
        raise RequestError("an answer with finished_choices must be streamed: it omits them", "finished_choices")
    if body.output_token_ids and len(prompts) > 1:
        raise RequestError(
            f"there must be one prompt with output_token_ids, got {len(prompts)}: send one request per prompt", "prompt"
        )
    salt, lora = service.cache_scope(request, body.cache_salt), service.adapter(body.model)
    trace, rank = request.headers.get("traceparent"), data_parallel_rank(request)
    service.llm.check_count(num_completions, rank)
    service.llm.check_count(params.n, 0)  # the completions of one prompt run on one engine
    streams: list[RequestStream] = []
    try:
        for number, prompt in enumerate(prompts):
            fields = prompt_fields(prompt)
            _check_room(service, fields, body)
            name = request_id if len(prompts) == 1 else f"{request_id}-{number}"
            with formats.naming_the_field(body):
                stream = await service.llm.submit(
                    {
                        **fields,
                        "cache_salt": salt,
                        "output_token_ids": body.output_token_ids,
                        "finished_choices": body.finished_choices,
                    },
                    params,
                    name,
                    priority=body.priority or 0,
                    trace=trace,
                    data_parallel_rank=rank,
                    lora_request=lora,
                )
            streams.append(stream)
    except BaseException:
        Generation(tuple(streams)).close()
        raise
    if reported is None:
        return Generation(tuple(streams))
    return Generation(tuple(streams), TokenReports(streams[0].output.outputs))


def data_parallel_rank(request: Request) -> int | None:
    """Returns the rank that the client or its router chose with vLLM's header. Raises RequestError."""
    given = request.headers.get("x-data-parallel-rank")
    if given is None:
        return None
    if not given.isascii() or not given.isdecimal() or len(given) > _MAX_RANK_DIGITS:
        raise RequestError(f"X-data-parallel-rank must be a number, got {given[:80]!r}", "data_parallel_rank")
    return int(given)


def prompt_fields(prompt: Prompt) -> Mapping[str, Any]:
    """Returns text or token ids as a dictionary."""
    if isinstance(prompt, Mapping):
        return prompt
    return {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": prompt}


def _check_room(service: Service, prompt: Mapping[str, Any], body: GenerationRequest) -> None:
    """Raises RequestError if the request asks for more tokens than fit into the context after its prompt."""
    num_prompt, longest = len(prompt.get("prompt_token_ids", ())), service.llm.max_model_len
    for field in ("max_completion_tokens", "max_tokens"):
        wanted = getattr(body, field, None)
        if wanted is None or field not in body.model_fields_set or num_prompt >= longest:
            continue
        if num_prompt + wanted > longest:
            raise RequestError(
                f"{field}={wanted} is too large: max_model_len={longest} leaves {longest - num_prompt} tokens after a "
                f"prompt of {num_prompt}",
                field,
                "context_length_exceeded",
            )
        return


@dataclass(frozen=True, slots=True)
class RequestNames:
    """A request's names: in its answer, in the engine (not chosen by clients), and in `X-Request-Id`."""

    answer_id: str
    engine_id: str
    header: str


def name_request(request: Request, body: EngineRequestBody, kind: str) -> RequestNames:
    """Makes names from the client's id, given in the body or the header, if there is one."""
    given = body.request_id or client_request_id(request.headers)
    if given is None:
        name = f"{kind}-{secrets.token_hex(16)}"
        return RequestNames(name, name, name)
    name = f"{kind}-{given}"
    return RequestNames(name, f"{name}-{secrets.token_hex(8)}", given)


News = Iterator[tuple[dict[str, Any], Mapping[str, Any]]]
"""Choices with new content, and further fields of the chunks that hold them."""


async def stream_chunks(
    started: Generation,
    head: Mapping[str, Any],
    options: StreamOptions | None,
    news: Callable[[int], News],
    usage: Callable[[], Mapping[str, Any]] | None = None,
) -> AsyncGenerator[bytes, None]:
    """Streams the chunks of a completion or chat completion, each `head` with one choice. `news` takes the number of
    the prompt whose output has changed; `usage` defaults to the generation's.
    """
    usage = usage or started.usage
    shows_usage = options is not None and bool(options.include_usage)
    counts = options is not None and bool(options.continuous_usage_stats)

    def events(number: int) -> Iterator[bytes]:
        for choice, fields in news(number):
            chunk = {**head, "choices": [choice], **fields}
            if choice["finish_reason"] is not None:
                chunk |= started.transfer_fields
            if shows_usage:
                chunk["usage"] = usage() if counts else None
            yield event(chunk)

    async with aclosing(started.stream(events)) as streamed:
        async for data in streamed:
            yield data
    if shows_usage:
        yield event({**head, "choices": [], "usage": usage()})
    yield DONE


class Answer(Protocol):
    """Writes the output of a generation in the shape of one of the APIs."""

    def whole(self) -> dict[str, Any]: ...

    def stream(self) -> AsyncGenerator[bytes, None]: ...


def answer_head(service: Service, answer_id: str, model: str, reported: StreamName | None) -> dict[str, Any]:
    """Returns the fields that all chunks of an answer have in common."""
    if reported is not None:
        return {"id": reported.id, "created": reported.created, "model": model}
    return {"id": answer_id, "created": int(service.clock.wall()), "model": model}


async def respond(
    request: Request,
    started: Generation,
    answer: Answer,
    request_id: str,
    *,
    is_stream: bool,
    reported: StreamName | None = None,
) -> Response:
    """Returns the HTTP response, complete or as events; closes the generation when it ends or the client
    disconnects.
    """
    if is_stream:
        headers = {REQUEST_ID_HEADER: request_id}
        if reported is not None:
            headers[STREAM_HEADER] = header_value(reported)
        return EventStream(answer.stream(), started.close, headers)
    try:
        await unless_disconnected(request, started.finish())
    finally:
        started.close()

    def whole() -> Response:
        return JSONResponse(answer.whole(), headers={REQUEST_ID_HEADER: request_id})

    # Log probabilities may be many megabytes, and the parsers of calls examine each character.
    is_large = any(output.prompt_logprobs or output.outputs[0].logprobs for output in started.outputs)
    is_large |= started.usage()["completion_tokens"] >= _MANY_TOKENS
    return await asyncio.to_thread(whole) if is_large else whole()
