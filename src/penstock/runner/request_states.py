"""The state of running requests on the device, one row per request.

Rows never move; each step maps batch rows to them (`idx_mapping`). Token ids and exact counts live on the device and
are written by its own kernels, so that a step can be prepared before the tokens of the last one are known on the CPU.
The CPU's data of the rows is in `Rows`.

The tables end with a spare row for padding, whose row number is -1, which torch interprets as the last row. A captured
step writes its padding there.
"""

from __future__ import annotations

import torch

from penstock.messages.scheduler_output import NewRequestData
from penstock.runner.buffers import TableWriter
from penstock.runner.rows import Rows


class RequestStates:
    def __init__(
        self, max_num_reqs: int, max_model_len: int, max_num_drafts: int, device: torch.device, writer: TableWriter
    ) -> None:
        # One more than the longest request: the token sampled at its last position is stored and never computed. Drafts
        # follow it, a gap as token 0; `drafts` marks the gaps.
        width = max_model_len + 1 + max_num_drafts
        num_rows = max_num_reqs + 1
        self.token_ids = torch.zeros((num_rows, width), dtype=torch.int32, device=device)
        self.drafts = torch.zeros((num_rows, max_num_drafts), dtype=torch.int64, device=device)  # -1 is a gap
        self.num_computed_exact = torch.zeros((num_rows, 1), dtype=torch.int64, device=device)
        # Tokens that the states of recurrent layers contain: without the drafts that the last step has accepted.
        self.num_in_states = torch.zeros((num_rows, 1), dtype=torch.int64, device=device)
        self.rows = Rows(max_num_reqs)
        self._writer = writer

    def add(self, new: NewRequestData) -> int:
        """Assigns a row to a request and returns it; visible on the device once the writer has applied it."""
        second_text_start, slot = new.request.second_text_start, new.request.adapter_slot
        row = self.rows.add(new.request_id, len(new.token_ids), second_text_start, slot)
        self._writer.write(self.token_ids, row, 0, new.token_ids)
        self._writer.write(self.num_computed_exact, row, 0, (new.num_computed_tokens,))
        self._writer.write(self.num_in_states, row, 0, (new.num_computed_tokens,))
        return row
