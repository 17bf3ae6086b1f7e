"""The assignment of state rows to requests. A request keeps its row for as long as it runs.

`Rows` keeps no counts: the scheduler's counts come with every step. It needs no torch, so that a simulated rank can use
it as a real one does.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

import numpy as np

from penstock.messages.adapters import NO_SLOT


class Rows:
    """Threading: the runner's thread."""

    def __init__(self, max_num_reqs: int) -> None:
        self.prefill_len = np.zeros(max_num_reqs, dtype=np.int64)  # tokens known at admission
        self.generation = np.zeros(max_num_reqs, dtype=np.int64)  # number of requests that the row has had
        self.second_text_start = np.zeros(max_num_reqs, dtype=np.int64)  # in a pair of texts, else 0
        self.adapter_slot = np.zeros(max_num_reqs, dtype=np.int32)  # -1 without an adapter
        self._rows: dict[str, int] = {}
        self._free_rows = list(range(max_num_reqs))

    def row(self, request_id: str) -> int:
        return self._rows[request_id]

    def rows(self, request_ids: Sequence[str]) -> np.ndarray:
        """[len(request_ids)] int64."""
        return np.fromiter(map(self._rows.__getitem__, request_ids), np.int64, len(request_ids))

    def remove(self, request_ids: Iterable[str]) -> list[int]:
        """Frees rows and returns them, sorted, so that all ranks free alike; unknown requests are ignored."""
        rows: list[int] = []
        for request_id in sorted(request_ids):
            row = self._rows.pop(request_id, None)
            if row is not None:
                heapq.heappush(self._free_rows, row)
                rows.append(row)
        return rows

    def add(
        self, request_id: str, num_known_tokens: int, second_text_start: int = 0, adapter_slot: int = NO_SLOT
    ) -> int:
        """Assigns the lowest free row to a request and returns it."""
        assert request_id not in self._rows, request_id
        row = self._rows[request_id] = heapq.heappop(self._free_rows)
        self.prefill_len[row] = num_known_tokens
        self.generation[row] += 1
        self.second_text_start[row] = second_text_start
        self.adapter_slot[row] = adapter_slot
        return row
