"""Scores pairs of texts: the prompts that a pooling engine has to encode, and the scores computed from its results.

A classifier reads each pair as one prompt and returns one number. A model that makes vectors reads every text once, and
the score is the cosine of two vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from penstock.frontend.input_processor import SECOND_TEXT, Prompt
from penstock.frontend.pooling import PoolingProcessor, Task
from penstock.messages.pooling_outputs import PoolingOutput, PoolingRequestOutput, ScoringOutput, ScoringRequestOutput
from penstock.messages.pooling_params import PoolingParams
from penstock.utils.errors import RequestError

Texts = str | Sequence[str]


@dataclass(frozen=True, slots=True)
class ScorePlan:
    """`prompts` are to be encoded, each with its parameters; `pairs` gives the prompts of every score."""

    prompts: list[tuple[Prompt, PoolingParams]]
    pairs: list[tuple[int, ...]]

    def results(self, outputs: Sequence[PoolingRequestOutput[PoolingOutput]]) -> list[ScoringRequestOutput]:
        """Computes the scores from the results of all prompts, in order."""
        return [_score([outputs[number] for number in pair]) for pair in self.pairs]


def plan_scores(pooling: PoolingProcessor, queries: Texts, documents: Texts, params: PoolingParams) -> ScorePlan:
    """Plans one query with each document, or as many queries as documents, pair by pair.

    `params.prompt_name` names the prompt before the queries. Raises RequestError naming `queries` or `documents`.
    """
    pooling.check(Task.SCORE, params)
    firsts, seconds = _texts(queries, "queries"), _texts(documents, "documents")
    if len(firsts) == 1:
        firsts = firsts * len(seconds)
    if len(firsts) != len(seconds):
        raise RequestError(
            f"there must be one query, or as many as documents: got {len(firsts)} and {len(seconds)}", "queries"
        )
    pairs = list(zip(firsts, seconds, strict=True))
    if pooling.config.head is None:
        return _plan_vectors(pairs, params)
    prompts: list[tuple[Prompt, PoolingParams]] = [
        ({"prompt": query, SECOND_TEXT: document}, params) for query, document in pairs
    ]
    return ScorePlan(prompts, [(number,) for number in range(len(prompts))])


def _plan_vectors(pairs: list[tuple[str, str]], params: PoolingParams) -> ScorePlan:
    """Plans each text once, as a query or as a document."""
    plain = replace(params, prompt_name=None)
    numbers: dict[tuple[str, PoolingParams], int] = {}
    for query, document in pairs:
        for prompt in ((query, params), (document, plain)):
            numbers.setdefault(prompt, len(numbers))
    return ScorePlan(list(numbers), [(numbers[query, params], numbers[document, plain]) for query, document in pairs])


def _texts(given: Texts, field: str) -> list[str]:
    texts: list[Any] = [given] if isinstance(given, str) else list(given)
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise RequestError(f"{field} must be a text or texts, none of them empty", field)
    return texts


def _score(outputs: list[PoolingRequestOutput[PoolingOutput]]) -> ScoringRequestOutput:
    first = outputs[0]
    if len(outputs) == 1:
        score, prompt = float(first.outputs.data[0]), first.prompt
    else:
        score, prompt = _cosine(outputs[0].outputs.data, outputs[1].outputs.data), None
    return ScoringRequestOutput(
        request_id=first.request_id,
        prompt=prompt,
        prompt_token_ids=[token for output in outputs for token in output.prompt_token_ids],
        outputs=ScoringOutput(score),
        num_cached_tokens=sum(output.num_cached_tokens for output in outputs),
    )


def _cosine(first: np.ndarray, second: np.ndarray) -> float:
    """Returns the cosine of two vectors of one size; 0 if one of them is zero."""
    a, b = first.astype(np.float64), second.astype(np.float64)
    lengths = np.sqrt(np.square(a).sum()) * np.sqrt(np.square(b).sum())
    return float((a * b).sum() / lengths) if lengths else 0.0
