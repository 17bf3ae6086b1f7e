"""One row per request for as long as it runs. Rows never move; each step maps batch rows to them (`idx_mapping`).

Token ids and exact counts live on the device and are written by its own kernels, so that a step can be prepared
before the tokens of the last one are known on the CPU. The CPU keeps what it was told: lengths at admission, and a
mirror of the scheduler's count that is overwritten every step and never incremented here.

Tables on the device end with a row that is nobody's: padding has row -1, which for torch is that one. What a captured
step does for its padding falls there.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from penstock.messages.scheduler_output import CachedRequestData, NewRequestData
from penstock.runner.buffers import TableWriter


class RequestStates:
    def __init__(
        self, max_num_reqs: int, max_model_len: int, max_num_drafts: int, device: torch.device, writer: TableWriter
    ) -> None:
        # One more than the longest request: the token sampled at its last position is stored and never computed. Drafts
        # stand behind it, a gap as token 0; `drafts` tells the gaps.
        width = max_model_len + 1 + max_num_drafts
        num_rows = max_num_reqs + 1
        self.token_ids = torch.zeros((num_rows, width), dtype=torch.int32, device=device)
        self.drafts = torch.zeros((num_rows, max_num_drafts), dtype=torch.int64, device=device)  # -1 is a gap
        self.num_computed_exact = torch.zeros((num_rows, 1), dtype=torch.int64, device=device)
        self.num_computed_np = np.zeros(max_num_reqs, dtype=np.int64)  # the scheduler's count; an upper bound
        self.prefill_len_np = np.zeros(max_num_reqs, dtype=np.int64)  # tokens known at admission
        self._rows: dict[str, int] = {}
        self._free_rows = list(range(max_num_reqs))
        self._writer = writer

    def rows(self, request_ids: Sequence[str]) -> np.ndarray:
        """[len(request_ids)] int64."""
        return np.fromiter(map(self._rows.__getitem__, request_ids), np.int64, len(request_ids))

    def remove(self, request_ids: Iterable[str]) -> list[int]:
        """Frees rows; unknown requests are passed over. Sorted, so that every rank frees in the same order."""
        rows: list[int] = []
        for request_id in sorted(request_ids):
            row = self._rows.pop(request_id, None)
            if row is not None:
                heapq.heappush(self._free_rows, row)
                rows.append(row)
        return rows

    def add(self, new: NewRequestData) -> int:
        """Takes a row for a request; visible on the device once the writer has applied it."""
        assert new.request_id not in self._rows, new.request_id
        row = heapq.heappop(self._free_rows)
        self._rows[new.request_id] = row
        self.prefill_len_np[row] = len(new.token_ids)
        self.num_computed_np[row] = new.num_computed_tokens
        self._writer.write(self.token_ids, row, 0, new.token_ids)
        self._writer.write(self.num_computed_exact, row, 0, (new.num_computed_tokens,))
        return row

    def update(self, cached: CachedRequestData) -> int:
        """Overwrites the mirror with the scheduler's count; returns the row."""
        row = self._rows[cached.request_id]
        self.num_computed_np[row] = cached.num_computed_tokens
        return row
