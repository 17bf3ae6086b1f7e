"""Outputs of a pooling engine: vectors, probabilities and scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PoolingOutput:
    """The result of `encode`: a vector, [dimensions] float32, or for a classifier a number per label."""

    data: np.ndarray


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The result of `embed`: a vector as a list."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Its number of dimensions."""
        return len(self.embedding)


@dataclass(frozen=True, slots=True)
class ClassificationOutput:
    """The result of `classify`: a number per label, and the label of the largest one."""

    probs: list[float]
    label: str

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """The result of `score`: how well the two texts match."""

    score: float


@dataclass(frozen=True, slots=True)
class PoolingRequestOutput(Generic[T]):
    """A prompt and its result. `num_cached_tokens` of its tokens were found in the prefix cache. For a score that
    compares two vectors, `prompt` is None and the tokens are those of both texts.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: T
    num_cached_tokens: int = 0
    finished: bool = True


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """The output of `embed`."""

    __slots__ = ()


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """The output of `classify`."""

    __slots__ = ()


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """The output of `score`."""

    __slots__ = ()
