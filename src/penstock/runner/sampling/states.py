"""The sampling parameters of every state row."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from penstock.messages.requests import RowRequest
from penstock.runner.sampling.features import WITH_PROMPT_LOGPROBS, needs_of

_NO_ROWS = np.zeros(0, dtype=np.int64)


class SamplingStates:
    """Requests by state row, and the features that they use."""

    def __init__(self, max_num_reqs: int, vocab_size: int) -> None:
        self._requests: list[RowRequest | None] = [None] * max_num_reqs
        self._vocab_size = vocab_size
        self._needs = np.zeros(max_num_reqs, dtype=np.int64)
        self._num_scored_prompts = 0  # requests with `prompt_logprobs`; if 0, a step need not search

    def add(self, row: int, request: RowRequest) -> None:
        self._requests[row] = request
        self._needs[row] = needs_of(request, self._vocab_size)
        self._num_scored_prompts += bool(self._needs[row] & WITH_PROMPT_LOGPROBS)

    def remove(self, rows: Iterable[int]) -> None:
        for row in rows:
            self._requests[row] = None
            self._num_scored_prompts -= bool(self._needs[row] & WITH_PROMPT_LOGPROBS)

    def needs(self, rows: np.ndarray) -> int:
        """Returns the features that any of these rows uses, as bits."""
        return int(np.bitwise_or.reduce(self._needs[rows]))

    def with_prompt_logprobs(self, rows: np.ndarray) -> np.ndarray:
        """Returns which of these rows' requests have `prompt_logprobs`, as indices into `rows`."""
        return np.nonzero(self._needs[rows] & WITH_PROMPT_LOGPROBS)[0] if self._num_scored_prompts else _NO_ROWS

    def at(self, rows: np.ndarray) -> list[RowRequest]:
        found = [self._requests[row] for row in rows]
        requests = [request for request in found if request is not None]
        assert len(requests) == len(found), rows
        return requests
