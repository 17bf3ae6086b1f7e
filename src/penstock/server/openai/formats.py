"""The constraint on an answer's format, under any of the field names that clients use."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

from penstock.messages.structured_outputs import GrammarKind, StructuredOutputsParams
from penstock.server.openai.protocol import GenerationRequest, JsonObjectFormat, JsonSchemaFormat
from penstock.utils.errors import RequestError

_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_json_object")
_FORM_FIELDS = (*GrammarKind, "structured_outputs")


def structured_outputs(body: GenerationRequest) -> StructuredOutputsParams | None:
    """Returns the format requested by `response_format`, `structured_outputs` or one of the `guided_` fields.

    Raises RequestError, naming the client's field, if it is invalid or if there are several.
    """
    wanted = _form_fields(body)
    if len(wanted) > 1:
        raise RequestError(f"{wanted[0]} and {wanted[1]} exclude each other", wanted[1])
    with naming_the_field(body):
        if body.structured_outputs is not None:
            return StructuredOutputsParams(**body.structured_outputs.model_dump(by_alias=True, exclude_none=True))
        if isinstance(body.response_format, JsonSchemaFormat):
            return StructuredOutputsParams(json=body.response_format.json_schema.schema_)
        if isinstance(body.response_format, JsonObjectFormat):
            return StructuredOutputsParams(json_object=True)
        guided: dict[str, Any] = {name.removeprefix("guided_"): getattr(body, name) for name in wanted}
        return StructuredOutputsParams(**guided) if guided else None


@contextlib.contextmanager
def naming_the_field(body: GenerationRequest) -> Generator[None]:
    """Makes an error in the format name the field that the client used."""
    try:
        yield
    except RequestError as error:
        # A forced call is constrained by the schema of its tool.
        fields = _form_fields(body) or (["tools"] if getattr(body, "tools", None) else [])
        if error.field not in _FORM_FIELDS or not fields or error.field == fields[0]:
            raise
        raise RequestError(f"{fields[0]}: {error}", fields[0], error.code) from None


def _form_fields(body: GenerationRequest) -> list[str]:
    """Returns the client's fields that request a format."""
    fields = [name for name in _GUIDED if getattr(body, name) not in (None, False)]
    if body.structured_outputs is not None:
        fields.append("structured_outputs")
    if body.response_format is not None and body.response_format.type != "text":
        fields.append("response_format")
    return fields
