"""`POST /score` and `/rerank`: scores of pairs of texts, in the formats of vLLM, Jina and Cohere."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.frontend.scoring import Texts, plan_scores
from penstock.server.openai.protocol import ERRORS
from penstock.server.openai.translation import naming_fields
from penstock.server.pooling.batch import Batch, Encoded, begin
from penstock.server.pooling.protocol import RerankRequest, ScoreRequest

router = APIRouter()


@router.post("/score", responses=ERRORS)
@router.post("/v1/score", responses=ERRORS)
async def score(body: ScoreRequest, request: Request) -> Response:
    """Returns scores of one query with each document, or of as many queries as documents, pair by pair."""
    batch = begin(request, body, "score", "documents")
    scores, encoded = await _score(batch, body.queries, body.documents)
    data = [{"object": "score", "index": index, "score": value} for index, value in enumerate(scores)]
    return batch.list_answer(data, encoded)


@router.post("/rerank", responses=ERRORS)
@router.post("/v1/rerank", responses=ERRORS)
@router.post("/v2/rerank", responses=ERRORS)
async def rerank(body: RerankRequest, request: Request) -> Response:
    """Returns the documents by descending score; equal ones keep their order."""
    batch = begin(request, body, "rerank", "documents")
    texts = [document if isinstance(document, str) else document.text for document in body.documents]
    with naming_fields({"queries": "query"}):
        scores, encoded = await _score(batch, body.query, texts)
    order = sorted(range(len(texts)), key=lambda index: -scores[index])
    results: list[dict[str, Any]] = []
    for index in order[: body.top_n or None]:
        document = {} if body.return_documents is False else {"document": {"text": texts[index]}}
        results.append({"index": index, "relevance_score": scores[index], **document})
    usage = batch.usage(encoded)
    # Cohere's clients read the tokens here.
    tokens = {"input_tokens": usage["prompt_tokens"], "output_tokens": 0}
    return batch.answer({"results": results, "usage": usage, "meta": {"tokens": tokens}})


async def _score(batch: Batch, queries: Texts, documents: Texts) -> tuple[list[float], Encoded]:
    """Returns the score of each pair, and all results of the engine for them."""
    params = batch.params("use_activation")
    plan = plan_scores(batch.service.llm.pooling, queries, documents, params)
    encoded = await batch.encode(plan.prompts)
    return [result.outputs.score for result in plan.results(encoded)], encoded
