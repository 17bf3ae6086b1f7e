"""A step's results sent by the last stage to the earlier ones: tokens, drafts and exact counts of rows that sampled.

A step in which no row samples sends nothing. The messages are sent in the order of the steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from penstock.parallel.groups import TensorChannel
from penstock.runner.awaited_results import OwnedRows
from penstock.runner.buffers import to_device
from penstock.runner.input_batch import InputBatch
from penstock.runner.request_states import RequestStates


class ResultsSender:
    """The last stage's side."""

    def __init__(self, states: RequestStates, channels: Sequence[TensorChannel]) -> None:
        """`channels`: one for each earlier stage; none without a pipeline."""
        self._states = states
        self._channels = channels

    def send(self, batch: InputBatch) -> None:
        """Sends the results of a step, whose tokens and drafts are in the rows' tables."""
        if not self._channels or not len(batch.host.sampling):
            return
        states, rows = self._states, batch.tensors.sampling_rows
        counts = states.num_computed_exact[rows]
        tokens = states.token_ids[rows[:, None], _columns(states, counts)]
        for channel in self._channels:
            channel.send(counts, tokens, states.drafts[rows])


class ResultsReceiver:
    """An earlier stage's side."""

    def __init__(self, states: RequestStates, channel: TensorChannel) -> None:
        self._states = states
        self._channel = channel

    def receive(self, owned: OwnedRows) -> None:
        """Waits for the next result, and applies the part of it that is `owned`."""
        states, device = self._states, self._states.token_ids.device
        positions, rows = to_device(owned.positions, device), to_device(owned.rows, device)
        counts, tokens, drafts = (part[positions] for part in self._channel.receive())
        states.num_computed_exact[rows] = counts
        states.token_ids[rows[:, None], _columns(states, counts)] = tokens
        states.drafts[rows] = drafts


def _columns(states: RequestStates, counts: torch.Tensor) -> torch.Tensor:
    """Returns [n, width] int64: the places of the tokens that a step may have written, and of the drafts after them.

    `counts` [n, 1] int64 are the exact counts after the step, which are also the places of the last known tokens.
    """
    num_drafts = states.drafts.shape[1]
    width = min(1 + 2 * num_drafts, states.token_ids.shape[1])
    first = (counts - num_drafts).clamp(0, states.token_ids.shape[1] - width)
    return first + torch.arange(width, device=counts.device)
