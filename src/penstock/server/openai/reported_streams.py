"""Streams that are reported to a router, and continued here after another instance (`utils.stream_reports`)."""

from __future__ import annotations

import functools
import hashlib

from starlette.requests import Request

from penstock.server.errors import ConflictError
from penstock.server.openai.protocol import GenerationRequest
from penstock.server.service import Service
from penstock.utils.errors import RequestError
from penstock.utils.stream_reports import ASK, STREAM_HEADER, StreamName, name_of


def reported_stream(service: Service, request: Request, body: GenerationRequest, answer_id: str) -> StreamName | None:
    """Returns the stream to report: a new one, named after its answer, or the one that the request continues. None if
    none was asked for, if the answer is not a stream of one completion, or if the weights have no digest.

    Raises RequestError for an invalid name, ConflictError if this server cannot continue the stream.
    """
    asked = request.headers.get(STREAM_HEADER)
    if asked is None or not body.stream or body.n not in (None, 1):
        return None
    own = _fingerprint(service, body.model) if service.llm.info.fingerprint else ""
    if asked == ASK:
        return StreamName(own, answer_id, int(service.clock.wall())) if own else None
    name = name_of(asked)
    if name is None:
        raise RequestError(f"{STREAM_HEADER} must be {ASK!r} or the value that an instance answered", STREAM_HEADER)
    if name.fingerprint != own or not own:
        raise ConflictError(
            "this server cannot continue the stream with the same tokens: its model, arithmetic, chat template or "
            "recommended sampling differ from those of the server that began it, or it does not digest its weights"
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
