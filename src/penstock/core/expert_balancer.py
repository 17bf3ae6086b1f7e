"""Moves experts between the ranks of a stage, one layer at a time, while steps go on as before.

    counts of every step -> (every step_interval steps) a target for each layer that would gain from it, a layer a step

    for each of these layers, until it has its target:
        moves      a step's plan orders copies into buffers that no rank uses
        reports    ranks report each copy by its id, with the results of later steps
        switch     when all are reported, a later plan names the step from which the layer has its new placement
        switched   the result of that step: the buffers that became free may be written

A copy that fails ends the layer's change, and its old placement stays valid. Steps are those that the scheduler makes
anyway: an idle engine moves nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.config.expert_parallel import SPARE, EPLBConfig, ExpertParallelConfig
from penstock.core.expert_placement import Target, experts_of, next_round, plan_target, rank_loads
from penstock.kv_transfer.ledger import TransferLedger
from penstock.messages.experts import ExpertMove, ExpertOrders
from penstock.messages.kv_transfer import TransferId, TransferStatus
from penstock.messages.runner_output import ModelRunnerOutput
from penstock.messages.scheduler_output import SchedulerOutput
from penstock.messages.stats import ExpertLoads, ExpertMap, ExpertStats
from penstock.utils.logging import get_logger

logger = get_logger(__name__)

# Of `ExpertLoads.cells`.
_LEVELS_OF_MEAN, _HIGHEST_LEVEL = 8, 25


@dataclass(frozen=True, slots=True)
class BalancedLayer:
    """A layer with experts, by the name that its ranks, those of `stage`, have for it."""

    name: str
    stage: int


@dataclass(slots=True)
class _Round:
    """Some moves of one layer, and the placement after them."""

    layer: BalancedLayer
    placement: tuple[int, ...]
    num_failed: int = 0
    switch_step: int | None = None


class ExpertBalancer:
    """Without layers it does nothing. Not thread-safe: it belongs to the scheduler."""

    def __init__(self, layers: Sequence[BalancedLayer] = (), parallel: ExpertParallelConfig | None = None) -> None:
        self._layers = tuple(layers) if parallel is not None and parallel.balancing is not None else ()
        self._parallel = parallel
        self._config = EPLBConfig() if parallel is None or parallel.balancing is None else parallel.balancing
        self._num_groups = 1 if parallel is None else parallel.num_groups
        initial = () if parallel is None else parallel.initial_placement()
        self._placements = {layer.name: initial for layer in self._layers}
        self._window: deque[dict[str, np.ndarray]] = deque()
        self._loads = {layer.name: np.zeros(max(initial) + 1, np.int64) for layer in self._layers}
        # The first time, experts move early.
        self._num_steps_to_go = max(1, self._config.step_interval // 4)
        # Layers that are still to be planned, one a step: a plan takes milliseconds. Then the one that changes.
        self._unplanned: deque[BalancedLayer] = deque()
        self._target: tuple[BalancedLayer, Target] | None = None
        self._ledger = TransferLedger[ExpertMove]()
        self._round: _Round | None = None
        self._last_number = 0
        self._num_moved = 0
        self._num_failed = 0
        self._balancedness = 1.0

    def stats(self) -> ExpertStats:
        return ExpertStats(self._balancedness, self._num_moved, self._num_failed)

    def map(self) -> ExpertMap:
        """Returns the loads of the window by layer and slot."""
        if not self._layers:
            return ExpertMap()
        assert self._parallel is not None
        initial = dict.fromkeys(self._placements, self._parallel.initial_placement())
        before, now = self._map_loads(initial), self._map_loads(self._placements)
        return ExpertMap(tuple(self._placements), self._num_ranks, before, now)

    def _map_loads(self, placements: Mapping[str, Sequence[int]]) -> ExpertLoads:
        cells: list[str] = []
        peaks: list[float] = []
        for name, placement in placements.items():
            slots = np.array([expert for expert in placement if expert != SPARE])
            loads = self._loads[name][slots] / np.bincount(slots)[slots]
            mean = loads.mean() or 1.0  # no load yet: all levels and peaks are 0
            levels = np.minimum(np.rint(loads / mean * _LEVELS_OF_MEAN), _HIGHEST_LEVEL).astype(np.uint8)
            cells.append((levels + ord("a")).tobytes().decode())
            peaks.append(float(loads.reshape(self._num_ranks, -1).mean(1).max() / mean))
        return ExpertLoads(tuple(cells), tuple(peaks))

    # ---- Decide ----

    def next_orders(self, step: int) -> ExpertOrders | None:
        """Returns the orders of a step that is being scheduled."""
        if self._round is None:
            if self._target is None and self._unplanned:
                self._plan_next()
            return None if self._target is None else self._begin_round(*self._target)
        if len(self._ledger) or self._round.switch_step is not None:
            return None
        self._round.switch_step = step
        return ExpertOrders(layer=self._round.layer.name, placement=self._round.placement)

    def _begin_round(self, layer: BalancedLayer, target: Target) -> ExpertOrders:
        placement, copies = next_round(self._placements[layer.name], target)
        assert copies, f"{layer.name} has its target"
        self._round = _Round(layer, placement)
        moves: list[ExpertMove] = []
        for each in copies:
            self._last_number += 1
            move = ExpertMove(TransferId("", self._last_number), each.source, each.target)
            self._ledger.open(move.transfer_id, [(layer.stage, self._rank_of(each.target))], move)
            moves.append(move)
        return ExpertOrders(layer=layer.name, moves=tuple(moves))

    def _rank_of(self, buffer: int) -> int:
        assert self._parallel is not None
        return buffer // self._parallel.num_buffers

    # ---- Apply ----

    def update_from_output(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """Applies the result of a step."""
        if not self._layers:
            return
        for report in result.experts.reports:
            if self._ledger.apply(report) is not None and self._round is not None:
                is_done = report.status is TransferStatus.DONE
                self._num_moved += is_done
                self._num_failed += not is_done
                self._round.num_failed += not is_done
        self._end_round(plan.step)
        if not plan.uses_experts:
            return
        self._record(result.experts.loads)
        self._num_steps_to_go -= 1
        if self._num_steps_to_go <= 0 and self._target is None and not self._unplanned:
            self._num_steps_to_go = self._config.step_interval
            self._plan()

    def _end_round(self, step: int) -> None:
        """Ends the round if all ranks have switched in this step, or if no rank copies any more and one has failed."""
        current = self._round
        if current is None or len(self._ledger):
            return
        if current.num_failed:
            logger.warning("%d experts of %s could not be moved: they stay", current.num_failed, current.layer.name)
            self._round = None
            self._end_layer()
        elif current.switch_step == step:
            self._placements[current.layer.name] = current.placement
            self._round = None
            if (current.layer, experts_of(current.placement, self._num_ranks)) == self._target:
                self._end_layer()

    def _record(self, loads: dict[str, np.ndarray]) -> None:
        self._window.append(loads)
        for name, load in loads.items():
            self._loads[name] += load
        if len(self._window) > self._config.window_size:
            for name, load in self._window.popleft().items():
                self._loads[name] -= load

    def _plan(self) -> None:
        """Begins to balance all layers."""
        self._measure("before")
        self._unplanned.extend(self._layers)

    def _plan_next(self) -> None:
        """Chooses the next layer's target from the loads in the window."""
        layer = self._unplanned.popleft()
        current = experts_of(self._placements[layer.name], self._num_ranks)
        loads = self._loads[layer.name].tolist()
        target = plan_target(loads, current, self._num_groups, self._config.num_nodes)
        self._end_layer(None if target is None else (layer, target))

    def _end_layer(self, following: tuple[BalancedLayer, Target] | None = None) -> None:
        self._target = following
        if following is None and not self._unplanned:
            self._measure("after")

    def _measure(self, when: str) -> None:
        """Computes the balancedness of the window's loads in the current placement, as vLLM does: sums over layers."""
        loads = [
            rank_loads(self._loads[name].tolist(), experts_of(placement, self._num_ranks))
            for name, placement in self._placements.items()
        ]
        highest = sum(map(max, loads))
        self._balancedness = sum(map(sum, loads)) / self._num_ranks / highest if highest else 1.0
        if self._config.log_balancedness:
            logger.info("experts have balancedness %.3f %s moves", self._balancedness, when)

    @property
    def _num_ranks(self) -> int:
        assert self._parallel is not None
        return self._parallel.num_ranks

    # ---- Check ----

    def check_integrity(self) -> None:
        """Recomputes the loads, and checks all placements."""
        self._ledger.check_integrity()
        assert not len(self._ledger) or self._round is not None, "moves without a round"
        for name, placement in self._placements.items():
            assert self._parallel is not None
            ranks = experts_of(placement, self._num_ranks)
            assert [len(rank) for rank in ranks] == [self._parallel.num_slots] * len(ranks), f"{name}: {placement}"
            assert frozenset().union(*ranks) == frozenset(range(self._parallel.num_experts)), f"{name}: {placement}"
            total = sum((loads[name] for loads in self._window if name in loads), np.zeros_like(self._loads[name]))
            assert (total == self._loads[name]).all(), f"{name}: {total} {self._loads[name]}"
