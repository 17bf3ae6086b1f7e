"""Converts requests of other APIs to chat completions."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from penstock.server.openai.protocol import ChatCompletionRequest, PassedOnFields
from penstock.utils.errors import RequestError


def passed_on(body: PassedOnFields) -> dict[str, Any]:
    """Returns the fields of chat completions that the other APIs do not have, and that are passed on unchanged."""
    return {name: getattr(body, name) for name in PassedOnFields.model_fields}


def chat_request(fields: dict[str, Any]) -> ChatCompletionRequest:
    """Returns a validated request; fields that are None are omitted. Raises RequestValidationError."""
    given = {name: value for name, value in fields.items() if value is not None}
    try:
        return ChatCompletionRequest.model_validate(given)
    except ValidationError as error:
        errors = [{**each, "loc": ("body", *each["loc"])} for each in error.errors()]
        raise RequestValidationError(errors, body=given) from None


@contextlib.contextmanager
def naming_fields(names: Mapping[str, str]) -> Generator[None]:
    """Makes an error in a field of the chat completion name the client's field. `names` maps the one to the other."""
    try:
        yield
    except RequestError as error:
        if error.field is None or error.field not in names:
            raise
        name = names[error.field]
        raise RequestError(str(error).replace(error.field, name), name, error.code) from None


def with_system(system: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the conversation with these instructions, merged with any system message at its beginning. Many chat
    templates accept only one system message, as the first one.
    """
    count = next((place for place, message in enumerate(messages) if message["role"] != "system"), len(messages))
    texts = [text for text in (system, *(message["content"] for message in messages[:count])) if text]
    head = [{"role": "system", "content": "\n\n".join(texts)}] if texts else []
    return [*head, *messages[count:]]
