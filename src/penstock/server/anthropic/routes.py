"""`POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

import secrets

from fastapi import APIRouter, Request
from starlette.responses import Response
from typing_extensions import TypedDict

from penstock.server.anthropic.answer import MessageAnswer
from penstock.server.anthropic.protocol import CountTokensRequest, MessagesRequest
from penstock.server.anthropic.translate import FIELD_NAMES, to_chat
from penstock.server.errors import JSONResponse
from penstock.server.openai import generation
from penstock.server.openai.conversation import render_chat, start_chat
from penstock.server.openai.protocol import COMPLETION_RESPONSES, error_responses
from penstock.server.openai.reported_streams import reported_stream
from penstock.server.openai.translation import naming_fields
from penstock.server.service import service_of

router = APIRouter()


class _ErrorDetails(TypedDict):
    type: str
    message: str


class MessagesErrorBody(TypedDict):
    type: str
    error: _ErrorDetails
    request_id: str


_ERRORS = error_responses(MessagesErrorBody)


@router.post("/v1/messages", responses={**COMPLETION_RESPONSES, **_ERRORS})
async def create_message(body: MessagesRequest, request: Request) -> Response:
    """Answers a conversation."""
    request_id = f"msg_{secrets.token_hex(16)}"
    service, chat_body = service_of(request), to_chat(body)
    reported = reported_stream(service, request, chat_body, request_id)
    with naming_fields(FIELD_NAMES):
        chat = await start_chat(service, request, chat_body, request_id, reported)
    answer = MessageAnswer(chat, request_id if reported is None else reported.id)
    return await generation.respond(
        request, chat.generation, answer, request_id, is_stream=bool(body.stream), reported=reported
    )


@router.post("/v1/messages/count_tokens", responses=_ERRORS)
async def count_tokens(body: CountTokensRequest, request: Request) -> Response:
    """Returns the number of tokens of a conversation, including its tools."""
    service = service_of(request)
    service.check_model(body.model)
    _, prompt, *_ = await render_chat(service, to_chat(body))
    return JSONResponse({"input_tokens": len(prompt)})
