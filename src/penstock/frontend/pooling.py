"""Converts a pooling engine's results to the requested form: truncated and normalised vectors, probabilities."""

from __future__ import annotations

import enum

import numpy as np

from penstock.config.pooling import HeadConfig, PoolingConfig
from penstock.config.sentence_transformers import Prompts
from penstock.messages.outputs import RequestOutput
from penstock.messages.pooling_outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
)
from penstock.messages.pooling_params import PoolingParams
from penstock.utils.errors import PenstockError, RequestError


class Task(enum.StrEnum):
    """The requested result: a vector, probabilities, the score of two texts, or whatever the model produces."""

    EMBED = "embed"
    CLASSIFY = "classify"
    SCORE = "score"
    ENCODE = "encode"


class PoolingProcessor:
    """`config` is None if the engine generates; it then refuses pooling requests."""

    def __init__(self, config: PoolingConfig | None, hidden_size: int) -> None:
        self._config = config
        self._hidden_size = hidden_size

    @property
    def config(self) -> PoolingConfig:
        """Raises RequestError if the engine generates."""
        if self._config is None:
            raise RequestError(
                "this engine generates tokens and does not pool: start it with runner=pooling, or use generate"
            )
        return self._config

    def check(self, task: Task, params: PoolingParams) -> None:
        """Raises RequestError if this engine does not support the task with these parameters."""
        head = self.config.head
        if head is None and task is Task.CLASSIFY:
            raise RequestError("this model makes vectors and has no classes: ask it for embeddings or scores")
        if head is not None and task is Task.EMBED:
            raise RequestError("this model is a classifier and makes no vectors: ask it for classes or scores")
        if head is not None and task is Task.SCORE and len(head.labels) > 1:
            raise RequestError(f"score needs a classifier with one label, and this one has {len(head.labels)}")
        if not isinstance(params, PoolingParams):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise RequestError(f"pooling_params must be PoolingParams, got {type(params).__name__}", "pooling_params")
        self._check_fields(params, head)

    def _check_fields(self, params: PoolingParams, head: HeadConfig | None) -> None:
        for name in ("use_activation",) if head is None else ("dimensions", "normalize"):
            if getattr(params, name) is not None:
                raise RequestError(
                    f"{name} belongs to {'classifiers' if head is None else 'vectors'}, which this model does not make",
                    name,
                )
        if params.dimensions is not None and params.dimensions > self._hidden_size:
            raise RequestError(
                f"dimensions must be at most {self._hidden_size}, the size of the model's vectors, got "
                f"{params.dimensions}",
                "dimensions",
            )
        prompt_text(self.config.prompts, params.prompt_name)

    def make(self, output: RequestOutput, params: PoolingParams) -> PoolingRequestOutput[PoolingOutput]:
        """Returns the result of an ended request. Raises RequestError or PenstockError if it has failed."""
        if output.pooled is None:
            kind = RequestError if output.is_request_error else PenstockError
            raise kind(output.error or "the engine failed on this request")
        return PoolingRequestOutput(
            request_id=output.request_id,
            prompt=output.prompt,
            prompt_token_ids=output.prompt_token_ids,
            outputs=PoolingOutput(self._finish(output.pooled, params)),
            num_cached_tokens=output.num_cached_tokens,
        )

    def _finish(self, pooled: np.ndarray, params: PoolingParams) -> np.ndarray:
        head = self.config.head
        if head is not None:
            return pooled if params.use_activation is False else _activated(pooled, head.activation)
        normalize = self.config.normalize if params.normalize is None else params.normalize
        vector = pooled[: params.dimensions]
        return _normalised(vector) if normalize else vector

    def as_classification(self, output: PoolingRequestOutput[PoolingOutput]) -> ClassificationRequestOutput:
        """Returns a classifier's result, with its labels."""
        head = self.config.head
        assert head is not None, "classes of an engine that makes vectors"
        probs = output.outputs.data
        answer = ClassificationOutput(probs.tolist(), head.labels[int(probs.argmax())])
        return ClassificationRequestOutput(
            output.request_id, output.prompt, output.prompt_token_ids, answer, output.num_cached_tokens
        )


def as_embedding(output: PoolingRequestOutput[PoolingOutput]) -> EmbeddingRequestOutput:
    """Returns the same, with the vector as a list."""
    answer = EmbeddingOutput(output.outputs.data.tolist())
    return EmbeddingRequestOutput(
        output.request_id, output.prompt, output.prompt_token_ids, answer, output.num_cached_tokens
    )


def prompt_text(prompts: Prompts, name: str | None) -> str:
    """Returns the prompt of this name to put before an input, by default the default one. Raises RequestError."""
    name = prompts.default if name is None else name
    if name is None:
        return ""
    if name not in prompts.texts:
        known = ", ".join(prompts.texts)
        told = f"prompt_name must be one of {known}" if known else "this model has no prompts by name"
        raise RequestError(f"{told}, got {name!r}", "prompt_name")
    return prompts.texts[name]


def _activated(logits: np.ndarray, activation: str) -> np.ndarray:
    """[n] float32 -> [n] float32."""
    wide = logits.astype(np.float64)
    if activation == "identity":
        return logits
    if activation == "sigmoid":
        # The exponent is never positive, so that it cannot overflow.
        small = np.exp(-np.abs(wide))
        return (np.where(wide >= 0, 1.0, small) / (1.0 + small)).astype(np.float32)
    assert activation == "softmax", activation
    weights = np.exp(wide - wide.max())
    return (weights / weights.sum()).astype(np.float32)


def _normalised(vector: np.ndarray) -> np.ndarray:
    """[n] float32 of Euclidean length 1; zeros stay zeros."""
    wide = vector.astype(np.float64)
    length = np.sqrt(np.square(wide).sum())
    return (wide / length).astype(np.float32) if length else vector
