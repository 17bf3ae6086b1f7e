"""The results that an earlier pipeline stage has not received yet.

The last stage samples. Each earlier stage needs a request's tokens, drafts and exact count before it computes the
request again, and receives them as one message per step that samples, in the order of the steps. It receives as late as
possible: before it builds a step that contains a request of the result, or when the step of the result is so old that
it can no longer be in flight. The calls of one step, in order:

    rows.remove(...), rows.add(...)             # the plan's changes
    for _ in range(awaited.num_due(plan.step, host.rows)):
        result = channel.receive()              # every field of it has a row per sampling request
        owned = awaited.take()
        states[owned.rows] = result[owned.positions]
    ...                                         # build the step's inputs, run the stage
    awaited.expect(plan.step, host)

A request may have left its row since, and another may have it: the row's generation shows this. Results that `owned`
omits must not be written anywhere. This module needs no torch, so that a simulated rank can use it as a real one does.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from penstock.runner.host_batch import HostBatch
from penstock.runner.rows import Rows


@dataclass(frozen=True, slots=True)
class OwnedRows:
    """The part of a result whose rows have had no other owner since."""

    positions: np.ndarray  # [num_owned] int64: indices into the requests that sampled in the step, in their order
    rows: np.ndarray  # [num_owned] int64: the state row of each


@dataclass(frozen=True, slots=True)
class _Awaited:
    step: int
    rows: np.ndarray  # [num_sampling] int64
    generations: np.ndarray  # [num_sampling] int64


class AwaitedResults:
    """Threading: the runner's thread. Keeps at most `max_num_in_flight` results."""

    def __init__(self, state_rows: Rows, max_num_in_flight: int) -> None:
        self._state_rows = state_rows
        self._max_num_in_flight = max_num_in_flight
        self._results: deque[_Awaited] = deque()
        self._num_expected = 0
        max_num_reqs = len(state_rows.generation)
        # By row, the number of the last result expected for it, counted from 1, and its generation.
        self._newest = np.zeros(max_num_reqs, dtype=np.int64)
        self._generation = np.zeros(max_num_reqs, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._results)

    def expect(self, step: int, host: HostBatch) -> None:
        """Called when this stage has run its part of a step; if the step samples, a result of it will arrive."""
        rows = host.sampling_rows
        if not len(rows):
            return
        generations = self._state_rows.generation[rows]
        oldest = self._results[0].step if self._results else step
        assert step - oldest < self._max_num_in_flight, f"step {step}: the result of {oldest} was never received"
        self._results.append(_Awaited(step, rows, generations))
        self._num_expected += 1
        self._newest[rows] = self._num_expected
        self._generation[rows] = generations

    def num_due(self, step: int, rows: np.ndarray) -> int:
        """Returns how many of the oldest results must be received before this step can be built.

        These are all up to the newest that concerns one of the step's `rows`, and those of steps that the engine has
        processed.
        """
        awaited = rows[self._generation[rows] == self._state_rows.generation[rows]]
        num_taken = self._num_expected - len(self._results)
        num_due = int(self._newest[awaited].max(initial=num_taken)) - num_taken
        # After the results of a warm-up, whose steps are numbered separately, there may be older ones.
        last = step - self._max_num_in_flight
        processed = (number for number, result in enumerate(self._results, 1) if result.step <= last)
        return max(num_due, max(processed, default=0))

    def take(self) -> OwnedRows:
        """Called when the oldest result has been received; returns the parts that still belong to their requests."""
        result = self._results.popleft()
        positions = np.nonzero(self._state_rows.generation[result.rows] == result.generations)[0]
        return OwnedRows(positions, result.rows[positions])
