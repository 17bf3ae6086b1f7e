"""The step under construction: the remaining token budget and the requests chosen so far."""

from __future__ import annotations

from penstock.core.request import Request
from penstock.messages.adapters import NO_SLOT, AdapterLoad
from penstock.messages.experts import ExpertOrders
from penstock.messages.requests import EngineRequest, RowRequest
from penstock.messages.scheduler_output import BlockIds, NewRequestData, SchedulerOutput


class StepPlan:
    """Collects one step's choices; `finish()` freezes them into the `SchedulerOutput`."""

    def __init__(self, step: int, token_budget: int, num_drafts_to_propose: int, is_warm_up: bool = False) -> None:
        self.step = step
        self.token_budget = token_budget
        self._max_num_tokens = token_budget
        self._is_warm_up = is_warm_up
        self.num_drafts_to_propose = num_drafts_to_propose
        self.preempted_request_ids: set[str] = set()
        self.is_blocked = False
        self.begins_load = False
        self._new: list[NewRequestData] = []
        self._new_block_ids: dict[str, BlockIds] = {}
        self._num_scheduled: dict[str, int] = {}
        self._num_computed: list[int] = []
        self._num_drafts: dict[str, int] = {}
        self._grammar_request_ids: set[str] = set()
        self._barrier_step = 0
        self._num_sampling = 0
        self.expert_orders: ExpertOrders | None = None
        self.adapter_loads: list[AdapterLoad] = []

    @property
    def is_empty(self) -> bool:
        """Returns whether the step computes nothing so far."""
        return not self._num_scheduled

    def add_new(self, request: Request, block_ids: BlockIds, num_tokens: int, adapter_slot: int = NO_SLOT) -> None:
        """Adds a request that enters (or re-enters) the runner and computes `num_tokens`."""
        self._new.append(
            NewRequestData(
                request=_row_request(request.data, adapter_slot),
                token_ids=tuple(request.token_ids),
                block_ids=block_ids,
                num_computed_tokens=request.num_computed_tokens,
            )
        )
        self._schedule(request, num_tokens, 0)

    def add_running(self, request: Request, new_block_ids: BlockIds, num_tokens: int, num_drafts: int) -> None:
        """Adds a request in the runner that computes `num_tokens` more, the last `num_drafts` of them drafts."""
        if any(new_block_ids):
            self._new_block_ids[request.request_id] = new_block_ids
        self._schedule(request, num_tokens, num_drafts)

    def _schedule(self, request: Request, num_tokens: int, num_drafts: int) -> None:
        assert num_drafts < num_tokens <= self.token_budget, (num_drafts, num_tokens, self.token_budget)
        self.token_budget -= num_tokens
        self._num_scheduled[request.request_id] = num_tokens
        self._num_computed.append(request.num_computed_tokens)
        num_new_drafts = 0
        if self.num_drafts_to_propose:
            num_new_drafts = min(self.num_drafts_to_propose, request.max_drafts)
        if num_drafts:
            self._num_drafts[request.request_id] = num_drafts
        unknown_since = request.last_sampling_step if request.num_samples_in_flight else 0
        samples = request.on_scheduled(self.step, num_tokens, num_drafts, num_new_drafts)
        self._num_sampling += samples
        if samples and request.data.grammar is not None:
            self._grammar_request_ids.add(request.request_id)
            self._barrier_step = max(self._barrier_step, unknown_since)

    def finish(self, finished_request_ids: frozenset[str], rewound_request_ids: frozenset[str]) -> SchedulerOutput:
        """Freezes the plan. Requests rewound between two steps leave their rows like preempted ones."""
        return SchedulerOutput(
            step=self.step,
            new_requests=tuple(self._new),
            new_block_ids=self._new_block_ids,
            num_scheduled_tokens=self._num_scheduled,
            num_computed_tokens=tuple(self._num_computed),
            num_draft_tokens=self._num_drafts,
            num_drafts_to_propose=self.num_drafts_to_propose,
            num_sampling=self._num_sampling,
            total_num_scheduled_tokens=self._max_num_tokens - self.token_budget,
            grammar_request_ids=frozenset(self._grammar_request_ids),
            finished_request_ids=finished_request_ids,
            preempted_request_ids=rewound_request_ids | self.preempted_request_ids,
            barrier_step=self._barrier_step,
            is_warm_up=self._is_warm_up,
            expert_orders=self.expert_orders,
            adapter_loads=tuple(self.adapter_loads),
        )


_COPIED = tuple(name for name in RowRequest.__struct_fields__ if name != "adapter_slot")


def _row_request(data: EngineRequest, adapter_slot: int) -> RowRequest:
    return RowRequest(**{name: getattr(data, name) for name in _COPIED}, adapter_slot=adapter_slot)
