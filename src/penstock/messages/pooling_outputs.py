"""What a caller of a pooling engine receives: vectors, probabilities and scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PoolingOutput:
    """What `encode` answers: a vector, [dimensions] float32, or of a classifier a number per label."""

    data: np.ndarray


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """What `embed` answers: a vector as a list."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Its number of dimensions."""
        return len(self.embedding)


@dataclass(frozen=True, slots=True)
class ClassificationOutput:
    """What `classify` answers: a number per label, and the label of the largest one."""

    probs: list[float]
    label: str

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """What `score` answers: how well the two texts belong together."""

    score: float


@dataclass(frozen=True, slots=True)
class PoolingRequestOutput(Generic[T]):
    """A prompt and what was made of it. `num_cached_tokens` of its tokens were found in the prefix cache.

    Of a score that compares two vectors, `prompt` is None and the tokens are those of both texts.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: T
    num_cached_tokens: int = 0
    finished: bool = True


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """Of `embed`."""

    __slots__ = ()


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """Of `classify`."""

    __slots__ = ()


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """Of `score`."""

    __slots__ = ()
