"""Which state row each request has, and how many of its tokens are computed as far as the CPU knows.

A request keeps its row for as long as it runs. `Rows` is told everything and counts nothing itself: the scheduler's
count is overwritten every step. It needs no torch, so that a simulated rank can drive it as a real one does.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

import numpy as np


class Rows:
    """Threading: the runner's thread."""

    def __init__(self, max_num_reqs: int) -> None:
        self.num_computed_upper_bound = np.zeros(max_num_reqs, dtype=np.int64)  # the scheduler's count
        self.prefill_len = np.zeros(max_num_reqs, dtype=np.int64)  # tokens known at admission
        self._rows: dict[str, int] = {}
        self._free_rows = list(range(max_num_reqs))

    def rows(self, request_ids: Sequence[str]) -> np.ndarray:
        """[len(request_ids)] int64."""
        return np.fromiter(map(self._rows.__getitem__, request_ids), np.int64, len(request_ids))

    def remove(self, request_ids: Iterable[str]) -> list[int]:
        """Frees rows and returns them; unknown requests are ignored. Sorted, so that every rank frees alike."""
        rows: list[int] = []
        for request_id in sorted(request_ids):
            row = self._rows.pop(request_id, None)
            if row is not None:
                heapq.heappush(self._free_rows, row)
                rows.append(row)
        return rows

    def add(self, request_id: str, num_known_tokens: int, num_computed_tokens: int) -> int:
        """Gives the lowest free row to a request and returns it."""
        assert request_id not in self._rows, request_id
        row = self._rows[request_id] = heapq.heappop(self._free_rows)
        self.prefill_len[row] = num_known_tokens
        self.num_computed_upper_bound[row] = num_computed_tokens
        return row

    def update(self, request_id: str, num_computed_tokens: int) -> int:
        """Overwrites the count with the scheduler's; returns the request's row."""
        row = self._rows[request_id]
        self.num_computed_upper_bound[row] = num_computed_tokens
        return row
