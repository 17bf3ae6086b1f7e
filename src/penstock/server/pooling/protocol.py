"""The requests for vectors, classes and scores, in the formats of OpenAI, vLLM, Jina and Cohere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, model_validator

from penstock.messages.sampling_params import MAX_COUNT
from penstock.server import limits
from penstock.server.openai.protocol import Count, EngineRequestBody, Name, RequestBody, TokenIds
from penstock.server.pooling.dialect import POOLING_FIELDS
from penstock.utils.errors import RequestError

Text = Annotated[str, StringConstraints(min_length=1)]
Texts = Annotated[list[Text], Field(min_length=1, max_length=limits.MAX_POOLING_INPUTS, fail_fast=True)]
Input = (
    Text
    | TokenIds
    | Texts
    | Annotated[list[TokenIds], Field(min_length=1, max_length=limits.MAX_POOLING_INPUTS, fail_fast=True)]
)
EncodingFormat = Literal["float", "base64"]

# The alternative field names of a score's two sides.
_SIDES = (("queries", "documents"), ("queries", "items"), ("text_1", "text_2"), ("data_1", "data_2"))


class PoolingBody(EngineRequestBody):
    """The common fields."""

    dialect = POOLING_FIELDS

    prompt_name: Name | None = None


class EmbeddingRequest(PoolingBody):
    input: Input
    encoding_format: EncodingFormat | None = "float"
    dimensions: Annotated[int, Field(ge=1, le=MAX_COUNT)] | None = None
    normalize: bool | None = None


class ClassificationRequest(PoolingBody):
    input: Input
    use_activation: bool | None = None


class PoolingRequest(PoolingBody):
    """vLLM's request for the model's own kind of result."""

    input: Input
    task: Literal["embed", "classify"] | None = None
    encoding_format: EncodingFormat | None = "float"
    dimensions: Annotated[int, Field(ge=1, le=MAX_COUNT)] | None = None
    normalize: bool | None = None
    use_activation: bool | None = None


class ScoreRequest(PoolingBody):
    """One query with each document, or as many queries as documents."""

    queries: Text | Texts
    documents: Text | Texts
    use_activation: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def name_sides(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        fields: dict[Any, Any] = {name: value for name, value in given.items() if value is not None}  # pyright: ignore[reportUnknownVariableType]
        present = {name for pair in _SIDES for name in pair} & fields.keys()
        for query, document in _SIDES:
            if present == {query, document}:
                sides = {"queries": fields.pop(query), "documents": fields.pop(document)}
                return {**fields, **sides}
        raise RequestError(f"one of these pairs must be given: {'; '.join(' and '.join(pair) for pair in _SIDES)}")


class Document(RequestBody):
    """A document as sent by clients of Jina and Cohere."""

    text: Text


class RerankRequest(PoolingBody):
    query: Text
    documents: Annotated[
        list[Text | Document], Field(min_length=1, max_length=limits.MAX_POOLING_INPUTS, fail_fast=True)
    ]
    top_n: Count | None = None
    return_documents: bool | None = True
    use_activation: bool | None = None
