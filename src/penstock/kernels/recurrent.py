"""The states of recurrent layers in a step: where requests read and store them, and what is left of their drafts.

A state belongs to a position: it is the one after the tokens up to it. A request's block table says where it is kept.
Entry i, if there is one, is the block for the state after the last computed token of the request's i-th block; a step
reads the state before its first token, and stores those after whole blocks that the table has, and the last one.

Drafts may be rejected, and a state cannot be taken back. So a state never contains drafts: the inputs of the drafts are
kept, and the next step of the request begins with those that were accepted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

STATE_ARGUMENTS = "ppppnpppppnnn"
"""The letters of `StateRequests.arguments` (`kernels.native`)."""


@dataclass(frozen=True, slots=True)
class StateRows:
    """What a step must know of its requests beyond their tables. The tensors are None if there are never drafts."""

    block_size: int
    rows: torch.Tensor | None = None  # [R] int64: where the inputs of a request's drafts are kept
    num_pending: torch.Tensor | None = None  # [R] int32: accepted drafts that the state does not contain yet
    num_drafts: torch.Tensor | None = None  # [R] int32: how many of the step's tokens, its last ones, are drafts


@dataclass(frozen=True, slots=True)
class StateRequests:
    """The requests of a step. Padding has no queries and a length of 0."""

    block_table: torch.Tensor  # [R, max_blocks] int32: blocks from 1 on; 0 or less is none
    query_start_loc: torch.Tensor  # [R + 1] int32: request r owns the rows from [r] to [r + 1]
    seq_lens: torch.Tensor  # [R] int32: tokens up to the last of the step's
    state_rows: StateRows
    draft_inputs: torch.Tensor | None = None  # [rows, most drafts, inputs of a token]: this layer's

    def arguments(self, out: torch.Tensor, states: torch.Tensor) -> tuple[Any, ...]:
        """Returns a native kernel's arguments from the drafts' inputs on: those, its output, states and requests."""
        assert out.is_contiguous() and states.is_contiguous(), "strided outputs"
        assert states.dtype == torch.float32, states.dtype
        drafts, given = self.draft_inputs, self.state_rows
        return (
            None if drafts is None else drafts.data_ptr(),
            out.data_ptr(),
            states.data_ptr(),
            self.block_table.data_ptr(),
            self.block_table.stride(0),
            self.query_start_loc.data_ptr(),
            self.seq_lens.data_ptr(),
            *(None if each is None else each.data_ptr() for each in (given.rows, given.num_pending, given.num_drafts)),
            len(self.seq_lens),
            given.block_size,
            0 if drafts is None else drafts.shape[1],
        )

    def spans(self) -> Iterator[StateSpan]:
        """Yields the requests that have rows in this step."""
        given = self.state_rows
        starts, lengths = self.query_start_loc.tolist(), self.seq_lens.tolist()
        for request, (first, end) in enumerate(pairwise(starts)):
            if first == end:
                continue
            row, num_pending, num_drafts = 0, 0, 0
            if given.rows is not None and given.num_pending is not None and given.num_drafts is not None:
                row, num_pending = int(given.rows[request]), int(given.num_pending[request])
                num_drafts = int(given.num_drafts[request])
            start = lengths[request] - (end - first) - num_pending
            table = self.block_table[request].tolist()
            yield StateSpan(first, end, start, num_pending, num_drafts, row, table, given.block_size)


@dataclass(frozen=True, slots=True)
class StateSpan:
    """A request's rows [first, end) of the step. Its tokens begin at position `start` with the pending ones."""

    first: int
    end: int
    start: int
    num_pending: int
    num_drafts: int
    row: int
    table: list[int]
    block_size: int

    @property
    def num_tokens(self) -> int:
        return self.end - self.first + self.num_pending

    def before(self) -> int | None:
        """Returns the number of the vector with the state before the first token; None for the state of no tokens."""
        return self._at(self.start - 1) if self.start else None

    def after(self, token: int) -> int | None:
        """Returns the number of the vector for the state after the span's `token`; None if it is not kept."""
        last = self.num_tokens - self.num_drafts - 1
        if token > last or (token < last and (self.start + token + 1) % self.block_size):
            return None
        return self._at(self.start + token)

    def _at(self, position: int) -> int | None:
        block = self.table[position // self.block_size]
        return block - 1 if block > 0 else None
