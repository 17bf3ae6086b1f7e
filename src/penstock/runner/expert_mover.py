"""A rank's part in balancing its experts: counts, copies and switches, as the plans order them.

Copies run on a thread beside the steps, from the memory of the rank that has the expert into a buffer that no step
reads, with pauses that leave the cores to the steps. Their ends are reported with the results of later steps.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch

from penstock.messages.experts import NO_EXPERTS, ExpertMove, ExpertsOutput
from penstock.messages.kv_transfer import ShardId, TransferReport, TransferStatus
from penstock.messages.scheduler_output import SchedulerOutput
from penstock.models.experts import PlacedExperts
from penstock.utils import logging
from penstock.utils.shared_memory import attach_memory

logger = logging.get_logger(__name__)

_PIECE_BYTES = 1 << 20
# A copy takes at most this share of a core's time, because the steps need all cores. Pauses are no longer than this, in
# seconds: a process that was stopped for a minute within a piece would otherwise pause for a third of an hour.
_SHARE_OF_TIME, _LONGEST_PAUSE = 0.05, 1.0


class ExpertStep(Protocol):
    """Lifecycle: one is built with the runner. Threading: the runner's thread."""

    def begin(self, plan: SchedulerOutput) -> None:
        """Called before the model's pass: applies the plan's orders."""
        ...

    def skip(self) -> None:
        """Called instead of the model's pass in a step without tokens."""
        ...

    def end(self) -> ExpertsOutput:
        """Called after the step's last pass: returns its counts, and the moves that have ended."""
        ...

    def shutdown(self) -> None:
        """Waits for copies; no step follows."""
        ...


class NoExpertStep:
    """Experts stay where they are, or there are none (`ExpertStep`)."""

    def begin(self, plan: SchedulerOutput) -> None: ...

    def skip(self) -> None: ...

    def end(self) -> ExpertsOutput:
        return NO_EXPERTS

    def shutdown(self) -> None: ...


class ExpertMover:
    """An `ExpertStep`. `memories` are the names of each layer's arrays on the ranks of this stage, in their order.

    This rank is `shard`: its stage, and its place among these ranks.
    """

    def __init__(
        self, experts: Mapping[str, PlacedExperts], memories: Mapping[str, Sequence[Sequence[str]]], shard: ShardId
    ) -> None:
        self._experts = experts
        self._memories = memories
        self._shard = shard
        self._is_counted = False
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        self._ended: deque[TransferReport] = deque()

    def begin(self, plan: SchedulerOutput) -> None:
        self._is_counted = not plan.is_warm_up
        orders = plan.expert_orders
        if orders is None or orders.layer not in self._experts:
            return
        experts = self._experts[orders.layer]
        if orders.placement:
            experts.place(orders.placement)
        moves = [move for move in orders.moves if move.target // experts.num_buffers == experts.rank]
        if moves:
            # The last ones have ended: the core orders no moves before all are reported. A process that ends does not
            # wait for a copy.
            self._thread = threading.Thread(
                target=self._copy, args=(orders.layer, moves), name="penstock-experts", daemon=True
            )
            self._thread.start()

    def skip(self) -> None: ...

    def end(self) -> ExpertsOutput:
        # A step without tokens reports zeros, which add nothing.
        loads = {name: experts.take_loads() for name, experts in self._experts.items()}
        reports = tuple(self._ended.popleft() for _ in range(len(self._ended)))
        return ExpertsOutput(loads if self._is_counted and self._shard[1] == 0 else {}, reports)

    def shutdown(self) -> None:
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()

    def _copy(self, layer: str, moves: Sequence[ExpertMove]) -> None:
        """Makes copies, one after the other."""
        experts, memories = self._experts[layer], self._memories[layer]
        for move in moves:
            rank, source = divmod(move.source, experts.num_buffers)
            target, status = move.target % experts.num_buffers, TransferStatus.DONE
            try:
                copy_expert(experts.experts.arrays(), memories[rank], source, target, self._pause)
            except Exception:
                logger.exception("an expert of %s was not copied from rank %d", layer, rank)
                status = TransferStatus.FAILED
            self._ended.append(TransferReport(move.transfer_id, self._shard, status))

    def _pause(self, seconds: float) -> None:
        self._is_over.wait(min(seconds * (1 / _SHARE_OF_TIME - 1), _LONGEST_PAUSE))


def copy_expert(
    arrays: Sequence[torch.Tensor],
    names: Sequence[str],
    source: int,
    target: int,
    pause: Callable[[float], object] = lambda seconds: None,
) -> None:
    """Copies an expert from the rank whose arrays have these names, and calls `pause` with the time of each piece.

    Raises OSError if that rank has ended, or has experts of another size.
    """
    for name, array in zip(names, arrays, strict=True):
        if (num_bytes := os.stat(name).st_size) != array.nbytes:
            raise OSError(f"{name} has {num_bytes} bytes, and the memory of this rank {array.nbytes}")
        other = attach_memory(name, array.nbytes, writable=False)
        there, here = np.frombuffer(other.view, np.uint8).reshape(array.shape)[source], array.numpy()[target]
        for first in range(0, len(here), _PIECE_BYTES):
            begun = time.perf_counter()
            # Releases the interpreter lock.
            np.copyto(here[first : first + _PIECE_BYTES], there[first : first + _PIECE_BYTES])
            pause(time.perf_counter() - begun)
