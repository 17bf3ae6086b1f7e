"""`GET /v1/models`, tokenization and detokenization."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.server.errors import JSONResponse
from penstock.server.openai.conversation import render_messages, template_options
from penstock.server.openai.prompts import Tokenizing
from penstock.server.openai.protocol import ERRORS, DetokenizeRequest, TokenizeRequest
from penstock.server.service import Service, service_of
from penstock.utils.errors import RequestError

router = APIRouter()


def _card(service: Service, name: str) -> dict[str, Any]:
    path = service.llm.loras.get(name)
    return {
        "id": name,
        "object": "model",
        "created": service.started,
        "owned_by": "penstock",
        "root": service.model_names[0] if path is None else path,
        "parent": None if path is None else service.model_names[0],
        "max_model_len": service.llm.max_model_len,
    }


@router.get("/v1/models", responses=ERRORS)
async def list_models(request: Request) -> Response:
    """Lists the names of this server's model, and its adapters."""
    service = service_of(request)
    names = (*service.model_names, *service.llm.loras)
    return JSONResponse({"object": "list", "data": [_card(service, name) for name in names]})


@router.get("/v1/models/{model:path}", responses=ERRORS)
async def retrieve_model(model: str, request: Request) -> Response:
    """Returns one of the names."""
    service = service_of(request)
    return JSONResponse(_card(service, service.check_model(model)))


@router.post("/tokenize", responses=ERRORS)
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """Returns the tokens of a text, or of messages as in a chat completion."""
    service = service_of(request)
    service.check_model(body.model)
    tokenizer = service.llm.get_tokenizer()
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("one of prompt and messages must be given", "prompt")
    if body.prompt is not None:
        # As for a completion's prompt, with the special tokens that the tokenizer adds.
        tokens = await service.llm.text_work.run(
            len(body.prompt), tokenizer.encode, body.prompt, add_special_tokens=body.add_special_tokens is not False
        )
    else:
        tokenizing = Tokenizing(add_special_tokens=body.add_special_tokens is True)
        options = template_options(body)
        tokens = await render_messages(service, body.messages or (), body.tools or (), options, tokenizing)
    texts = await asyncio.to_thread(list, map(tokenizer.decode_token, tokens)) if body.return_token_strs else None
    return JSONResponse(
        {"count": len(tokens), "max_model_len": service.llm.max_model_len, "tokens": tokens, "token_strs": texts}
    )


@router.post("/detokenize", responses=ERRORS)
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """Returns the text of tokens."""
    service = service_of(request)
    service.check_model(body.model)
    vocab_size = service.llm.config.model.vocab_size
    if any(token >= vocab_size for token in body.tokens):
        raise RequestError(f"tokens must be integers from 0 to {vocab_size - 1}", "tokens")
    decode = service.llm.get_tokenizer().decode
    return JSONResponse({"prompt": await asyncio.to_thread(decode, body.tokens, skip_special_tokens=False)})
