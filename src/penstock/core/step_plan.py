"""The step under construction: the token budget that is left and what has been chosen so far."""

from __future__ import annotations

from penstock.core.request import Request
from penstock.messages.scheduler_output import BlockIds, CachedRequestData, NewRequestData, SchedulerOutput


class StepPlan:
    """Collects one step's choices; `finish()` freezes them into the `SchedulerOutput`."""

    def __init__(self, step: int, token_budget: int) -> None:
        self.step = step
        self.token_budget = token_budget
        self.preempted_request_ids: set[str] = set()
        self.is_blocked = False
        self._new: list[NewRequestData] = []
        self._cached: list[CachedRequestData] = []
        self._num_scheduled: dict[str, int] = {}

    def add_new(self, request: Request, block_ids: BlockIds, num_tokens: int) -> None:
        """A request enters (or re-enters) the runner and computes `num_tokens`."""
        self._new.append(
            NewRequestData(
                request=request.data,
                token_ids=tuple(request.token_ids),
                block_ids=block_ids,
                num_computed_tokens=request.num_computed_tokens,
            )
        )
        self._schedule(request, num_tokens)

    def add_running(self, request: Request, new_block_ids: BlockIds, num_tokens: int) -> None:
        """A request that the runner knows computes `num_tokens` more."""
        self._cached.append(
            CachedRequestData(
                request_id=request.request_id,
                new_block_ids=new_block_ids,
                num_computed_tokens=request.num_computed_tokens,
            )
        )
        self._schedule(request, num_tokens)

    def _schedule(self, request: Request, num_tokens: int) -> None:
        assert 0 < num_tokens <= self.token_budget, (num_tokens, self.token_budget)
        self._num_scheduled[request.request_id] = num_tokens
        self.token_budget -= num_tokens
        request.on_scheduled(num_tokens)

    def finish(self, finished_request_ids: frozenset[str]) -> SchedulerOutput:
        return SchedulerOutput(
            step=self.step,
            new_requests=tuple(self._new),
            cached_requests=tuple(self._cached),
            num_scheduled_tokens=self._num_scheduled,
            total_num_scheduled_tokens=sum(self._num_scheduled.values()),
            finished_request_ids=finished_request_ids,
            preempted_request_ids=frozenset(self.preempted_request_ids),
        )
