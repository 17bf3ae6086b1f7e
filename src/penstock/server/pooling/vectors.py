"""`POST /v1/embeddings`, `/classify` and `/pooling`: a vector or labels for each input."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import msgspec
import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.frontend.input_processor import Prompt
from penstock.frontend.pooling import Task
from penstock.messages.pooling_params import PoolingParams
from penstock.server.openai.protocol import ERRORS
from penstock.server.pooling.batch import Batch, Encoded, begin
from penstock.server.pooling.protocol import ClassificationRequest, EmbeddingRequest, Input, PoolingRequest

router = APIRouter()


@router.post("/v1/embeddings", responses=ERRORS)
async def create_embeddings(body: EmbeddingRequest, request: Request) -> Response:
    """Returns a vector for each input, as numbers or as base64 of float32."""
    batch = begin(request, body, "embd", "input")
    encoded = await _encode(batch, Task.EMBED, body.input, batch.params("dimensions", "normalize"))
    return batch.list_answer(await _rows(encoded, "embedding", "embedding", body.encoding_format), encoded)


@router.post("/classify", responses=ERRORS)
async def classify(body: ClassificationRequest, request: Request) -> Response:
    """Returns the probabilities of a classifier's labels for each input."""
    batch = begin(request, body, "classify", "input")
    encoded = await _encode(batch, Task.CLASSIFY, body.input, batch.params("use_activation"))
    data: list[dict[str, Any]] = []
    for index, output in enumerate(encoded):
        answer = batch.service.llm.pooling.as_classification(output).outputs
        data.append({"index": index, "label": answer.label, "probs": answer.probs, "num_classes": answer.num_classes})
    return batch.list_answer(data, encoded)


@router.post("/pooling", responses=ERRORS)
async def pool(body: PoolingRequest, request: Request) -> Response:
    """Returns the model's own kind of result for each input: a vector, or a number for each label."""
    batch = begin(request, body, "pool", "input")
    task = Task.ENCODE if body.task is None else Task(body.task)
    encoded = await _encode(batch, task, body.input, batch.params("dimensions", "normalize", "use_activation"))
    return batch.list_answer(await _rows(encoded, "pooling", "data", body.encoding_format), encoded)


async def _encode(batch: Batch, task: Task, given: Input, params: PoolingParams) -> Encoded:
    batch.service.llm.pooling.check(task, params)
    is_one = isinstance(given, str) or isinstance(given[0], int)
    prompts: list[Prompt] = [given] if is_one else list(given)  # pyright: ignore[reportAssignmentType]
    return await batch.encode([(prompt, params) for prompt in prompts])


async def _rows(encoded: Encoded, kind: str, field: str, encoding_format: str | None) -> list[dict[str, Any]]:
    """Returns the entries of an answer. Each result is encoded in a task of its own, so that other clients have their
    turn in between: an answer may be hundreds of megabytes.
    """

    async def numbers(vector: np.ndarray) -> msgspec.Raw | str:
        if encoding_format == "base64":
            return base64.b64encode(vector.astype("<f4").tobytes()).decode()
        return msgspec.Raw(msgspec.json.encode(vector.tolist()))

    return [
        {"object": kind, "index": index, field: await asyncio.create_task(numbers(output.outputs.data))}
        for index, output in enumerate(encoded)
    ]
