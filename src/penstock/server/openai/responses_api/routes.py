"""`POST /v1/responses`, and stored responses: `GET` and `DELETE /v1/responses/{id}`."""

from __future__ import annotations

import secrets
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.server.errors import JSONResponse, NotFoundError
from penstock.server.openai import generation
from penstock.server.openai.conversation import start_chat
from penstock.server.openai.dialects import refused, translate
from penstock.server.openai.protocol import COMPLETION_RESPONSES, ERRORS
from penstock.server.openai.reported_streams import reported_stream
from penstock.server.openai.responses_api.answer import Keeper, ResponseAnswer
from penstock.server.openai.responses_api.protocol import ResponsesRequest
from penstock.server.openai.responses_api.store import StoredResponse
from penstock.server.openai.responses_api.translate import FIELD_NAMES, to_chat, to_messages
from penstock.server.openai.translation import naming_fields
from penstock.server.service import service_of
from penstock.utils.stream_reports import StreamName

router = APIRouter()
_QUERY_FIELDS = (refused("stream", "is not supported here: a stored response is not streamed", "false"),)


@router.post("/v1/responses", responses=COMPLETION_RESPONSES)
async def create_response(body: ResponsesRequest, request: Request) -> Response:
    """Answers an input; a stored response can be continued with `previous_response_id`."""
    service = service_of(request)
    before = [] if body.previous_response_id is None else _stored(request, body.previous_response_id).messages
    messages = [*before, *to_messages(body.input)]
    request_id = f"resp_{secrets.token_hex(16)}"
    chat_body = to_chat(body, messages)
    reported = reported_stream(service, request, chat_body, request_id)
    with naming_fields(FIELD_NAMES):
        chat = await start_chat(service, request, chat_body, request_id, reported)
    name = reported or StreamName("", request_id, int(service.clock.wall()))
    keeper = Keeper(None if body.store is False else service.stored_responses, _owner(request), messages)
    answer = ResponseAnswer(body, chat, service.llm.get_tokenizer(), name, keeper)
    return await generation.respond(
        request, chat.generation, answer, request_id, is_stream=bool(body.stream), reported=reported
    )


@router.get("/v1/responses/{response_id}", responses=ERRORS)
async def retrieve_response(response_id: str, request: Request) -> Response:
    """Returns a stored response."""
    translate(request.query_params, _QUERY_FIELDS, known=())
    return JSONResponse(_stored(request, response_id).body)


@router.delete("/v1/responses/{response_id}", responses=ERRORS)
async def delete_response(response_id: str, request: Request) -> Response:
    """Deletes a response; responses that continue it remain complete."""
    if not service_of(request).stored_responses.remove(_owner(request), response_id):
        raise _unknown(response_id)
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


def _stored(request: Request, response_id: str) -> StoredResponse:
    stored = service_of(request).stored_responses.get(_owner(request), response_id)
    if stored is None:
        raise _unknown(response_id)
    return stored


def _unknown(response_id: str) -> NotFoundError:
    message = f"there is no response {response_id[:100]!r} here: it was not stored, or has been forgotten"
    return NotFoundError(message, "previous_response_id", "previous_response_not_found")


def _owner(request: Request) -> Any:
    """Returns the API key of a request; None if the server has none."""
    return request.scope.get("api_key")
