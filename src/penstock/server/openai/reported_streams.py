"""Streams that are reported to a router, and continued here after another instance (`utils.stream_reports`)."""

from __future__ import annotations

import functools
import hashlib
import secrets
from collections.abc import Sequence
from typing import ClassVar

from starlette.requests import Request

from penstock.messages.outputs import CompletionOutput
from penstock.server.errors import ConflictError
from penstock.server.openai.protocol import GenerationRequest
from penstock.server.service import Service
from penstock.utils.errors import RequestError
from penstock.utils.stream_reports import ASK, STREAM_HEADER, ReportKind, StreamName, name_of, report_line

# Every reader of JSON keeps such a number.
_SEED_BITS = 53


def reported_stream(service: Service, request: Request, body: GenerationRequest, answer_id: str) -> StreamName | None:
    """Returns the stream to report: a new one, named after its answer, or the one that the request continues. None if
    none was asked for, if the answer is not a stream, or if the weights have no digest.

    Raises RequestError for an invalid name, ConflictError if this server cannot continue the stream.
    """
    asked = request.headers.get(STREAM_HEADER)
    if asked is None or not body.stream:
        return None
    own = _fingerprint(service, body.model) if service.llm.info.fingerprint else ""
    if asked == ASK:
        seed = secrets.randbits(_SEED_BITS)
        return StreamName(own, answer_id, int(service.clock.wall()), seed) if own else None
    name = name_of(asked)
    if name is None:
        raise RequestError(f"{STREAM_HEADER} must be {ASK!r} or the value that an instance answered", STREAM_HEADER)
    if name.fingerprint != own or not own:
        raise ConflictError(
            "this server cannot continue the stream with the same tokens: it differs in model, arithmetic, "
            "chat template or recommended sampling, does not digest its weights, or has drafts that determine tokens"
        )
    return name


def _fingerprint(service: Service, model: str | None) -> str:
    """Returns text that is equal for servers that answer a request with the same tokens and chunks."""
    template = service.llm.get_tokenizer().chat_template_source if service.llm.has_tokenizer else None
    formats = (service.tool_format and service.tool_format.NAME, service.reasoning.name)
    adapter = service.adapter(model)
    names = (service.model_names, model)
    parts = (
        service.llm.info.fingerprint,
        adapter and adapter.digest,
        names,
        template,
        formats,
        service.default_sampling_params,
    )
    return _digest(parts)


@functools.lru_cache(maxsize=64)
def _digest(parts: tuple[object, ...]) -> str:
    # Cached: a chat template has kilobytes, and is the same for every stream.
    return hashlib.blake2b(repr(parts).encode("utf-8", "replace"), digest_size=16).hexdigest()


class TokenReports:
    """The reports of a stream's completions, of the tokens excepted that the request gave. Without any completion, the
    events are not reported.
    """

    DEATH: ClassVar[bytes] = report_line(ReportKind.DIED) + b"\n"

    def __init__(self, completions: Sequence[CompletionOutput] = ()) -> None:
        self._completions = completions
        self._num_reported = [each.num_given_tokens for each in completions]
        self._ended = {each.index for each in completions if each.finished}

    def __bool__(self) -> bool:
        return bool(self._completions)

    def mark(self, events: Sequence[bytes]) -> bytes:
        """Returns the events of everything that is new, with the reports before the last of them."""
        lines = b"".join(map(self._next, self._completions))
        if not lines:
            return b"".join(events)
        return b"".join([*events[:-1], lines, *(events[-1:] or [b"\n"])])

    def _next(self, completion: CompletionOutput) -> bytes:
        """Returns the report of what is new in a completion; b"" if nothing is."""
        index = completion.index
        start, self._num_reported[index] = self._num_reported[index], len(completion.token_ids)
        is_end = completion.finished and index not in self._ended
        if start == self._num_reported[index] and not is_end:
            return b""
        if is_end:
            self._ended.add(index)
        kind = ReportKind.LAST if is_end else ReportKind.TOKENS
        return report_line(kind, completion.token_ids[start:], index)
