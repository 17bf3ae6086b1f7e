"""Messages about experts on the ranks of a stage: who has rows for them in a step, and how they move between ranks.

A buffer is a place for one expert of a layer; those of a stage are numbered rank after rank.
"""

from __future__ import annotations

import msgspec
import numpy as np

from penstock.messages.kv_transfer import TransferId, TransferReport


class RowCounts(msgspec.Struct, frozen=True):
    """How many rows one of the engines that share experts has in the passes of a step: the tokens that it computes and
    the requests that sample, for which it proposes `num_drafts` drafts each; 0 if none samples.
    """

    num_tokens: int = 0
    num_sampling: int = 0
    num_drafts: int = 0


class ExpertMove(msgspec.Struct, frozen=True):
    """The rank of the spare buffer `target` copies the expert of buffer `source`, and reports the transfer's end."""

    transfer_id: TransferId
    source: int
    target: int


class ExpertOrders(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Orders for one layer: moves to begin, and from this very step on another placement (`ExpertParallelConfig`)."""

    layer: str
    moves: tuple[ExpertMove, ...] = ()
    placement: tuple[int, ...] = ()


class ExpertsOutput(msgspec.Struct, frozen=True, omit_defaults=True):
    """A rank's report for a step: the moves that have ended. The first rank of a stage also reports for each of its
    layers how many tokens chose each expert, [num_experts] int32.
    """

    loads: dict[str, np.ndarray] = msgspec.field(default_factory=dict[str, np.ndarray])
    reports: tuple[TransferReport, ...] = ()


NO_EXPERTS = ExpertsOutput()
