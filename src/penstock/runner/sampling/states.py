"""The sampling parameters of every state row."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from penstock.messages.requests import EngineRequest


class SamplingStates:
    """Requests by state row."""

    def __init__(self, max_num_reqs: int) -> None:
        self._requests: list[EngineRequest | None] = [None] * max_num_reqs
        self._has_prompt_logprobs = np.zeros(max_num_reqs, dtype=bool)

    def add(self, row: int, request: EngineRequest) -> None:
        self._requests[row] = request
        self._has_prompt_logprobs[row] = request.sampling_params.prompt_logprobs is not None

    def with_prompt_logprobs(self, rows: np.ndarray) -> np.ndarray:
        """Which of these rows' requests want the log probabilities of their prompts, as indices into `rows`."""
        return np.nonzero(self._has_prompt_logprobs[rows])[0]

    def remove(self, rows: Iterable[int]) -> None:
        for row in rows:
            self._requests[row] = None

    def at(self, rows: np.ndarray) -> list[EngineRequest]:
        found = [self._requests[row] for row in rows]
        requests = [request for request in found if request is not None]
        assert len(requests) == len(found), rows
        return requests
