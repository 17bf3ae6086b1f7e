"""Decides what each step runs, and applies its result.

`schedule()` is a pure decision over counts: it never sees a tensor, and it may be called again before the results of
the last step are known (`SchedulerConfig.max_num_in_flight`). `update_from_output()` applies one result. Every rewind
is a preemption followed by a fresh admission, so the runner can never disagree with the counts here.

With several pipeline stages a step takes one of several micro-batches (`micro_batches`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from penstock.config.engine import SchedulerConfig
from penstock.core.adapter_slots import AdapterSlots
from penstock.core.containment import contained
from penstock.core.expert_balancer import ExpertBalancer
from penstock.core.kv_cache_manager import KVCacheManager, PrefixHit
from penstock.core.micro_batches import MicroBatches
from penstock.core.remote_kv import NO_TRANSFER, KVTransfer, RemoteKV
from penstock.core.request import Request, RequestStatus
from penstock.core.request_queue import RequestQueue
from penstock.core.step_plan import StepPlan
from penstock.core.step_result import SpeculationCounter, apply_counts, make_output
from penstock.core.structured_output import StructuredOutputs
from penstock.kv_transfer.connector import Match
from penstock.messages.kv_events import KVEvent
from penstock.messages.outputs import EngineOutput, FinishReason
from penstock.messages.requests import EngineRequest
from penstock.messages.runner_output import ModelRunnerOutput
from penstock.messages.scheduler_output import BlockIds, GrammarOutput, SchedulerOutput
from penstock.messages.stats import SchedulerStats
from penstock.utils.errors import GrammarError, OverloadedError, PenstockError, RequestError, RequestFailedError

# The maximum number of requests skipped in one step because another is computing their prefix. After that the step
# admits no more, because the time of each lookup is proportional to the blocks of the prompt.
_MAX_DEFERRED = 64

_LOST_KV = "KV that the request was promised could not be loaded (kv_load_failure_policy is fail)"


class Scheduler:
    """Not thread-safe: it belongs to the engine core's loop."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        grammars: StructuredOutputs | None = None,
        transfer: KVTransfer = NO_TRANSFER,
        is_warm_up: bool = False,
        experts: ExpertBalancer | None = None,
        adapters: AdapterSlots | None = None,
    ) -> None:
        """With `is_warm_up`, steps are marked as such, and no connector on any rank takes part in them."""
        self._kv = kv
        self.pool = kv.pool
        self._grammars = grammars or StructuredOutputs(None)
        self.experts = experts or ExpertBalancer()
        self.adapters = adapters or AdapterSlots(None)
        self._connector = transfer.connector
        self._remote = RemoteKV(transfer, kv)
        self._fails_on_lost_kv = transfer.load_failure_policy == "fail"
        self._config = config
        self._is_warm_up = is_warm_up
        self._requests: dict[str, Request] = {}
        self._waiting = RequestQueue(config.policy)
        self._running = MicroBatches(config)
        self._finished_request_ids: set[str] = set()
        self._rewound_request_ids: set[str] = set()
        # The outputs of requests that have failed since the last result.
        self._failed: list[EngineOutput] = []
        # By step in flight, the latest admission when it was scheduled: later admissions are not a part of it.
        self._last_admissions: dict[int, int] = {}
        self._step = 0
        self._num_arrivals = self._num_admissions = self._num_preemptions = self._num_graph_replays = 0
        self._speculation = SpeculationCounter(config.max_num_drafts)

    # ---- Adding and aborting requests ----

    def add_request(self, data: EngineRequest) -> None:
        """Queues a request. Raises RequestError, also if its id is in use, OverloadedError, or RequestFailedError."""
        if data.request_id in self._requests:
            raise RequestError(f"request id {data.request_id!r} is already in use", "request_id")
        if len(self._requests) >= self._config.max_num_queued_requests:
            raise OverloadedError(f"the engine already holds max_num_queued_requests={len(self._requests)} requests")
        try:
            with contained(data.request_id):
                request = Request(data, self._num_arrivals, self._kv.hashed_block_size, self._kv.num_tokens_ahead)
                if data.grammar is not None:
                    self._grammars.add(data.request_id, data.grammar, data.output_token_ids)
                self._connector.on_new_request(request)
        except PenstockError:
            self._grammars.remove(data.request_id)
            raise
        self._num_arrivals += 1
        self._requests[data.request_id] = request
        self.adapters.add(request)
        self._waiting.add(request)

    def abort_requests(self, request_ids: Iterable[str]) -> list[EngineOutput]:
        """Ends requests at once; unknown ones (already finished) are ignored."""
        known = [self._requests[each] for each in dict.fromkeys(request_ids) if each in self._requests]
        return [self._end(request, FinishReason.ABORT) for request in known]

    @property
    def steps_in_flight(self) -> list[int]:
        """Returns the scheduled steps whose results have not been processed, oldest first."""
        return list(self._last_admissions)

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    @property
    def has_rows_to_free(self) -> bool:
        """Returns whether the runner has yet to free the rows of ended requests."""
        return bool(self._finished_request_ids or self._rewound_request_ids)

    @property
    def has_transfers(self) -> bool:
        """Returns whether KV transfers are in progress, which need steps, with requests or without."""
        return self._connector.has_pending_work

    @property
    def needs_step(self) -> bool:
        """Returns whether there is any reason to schedule a step."""
        return self.has_unfinished_requests or self.has_rows_to_free or self.has_transfers

    def seconds_until_due(self, now: float) -> float | None:
        """Returns how long all requests only wait for KV of other engines, unless a transfer ends earlier: 0 if a step
        may do something at once, None if there is nothing to do until a call."""
        if not self._requests and not self.has_transfers:
            return None
        is_waiting = self._remote.num_waiting == len(self._requests) and self._connector.takes_waker
        return max(0.0, self._remote.earliest_deadline - now) if is_waiting and not self.has_transfers else 0.0

    def wait(self, grammar_seconds: float, transfer_seconds: float) -> None:
        """Waits until a grammar is compiled or KV is loaded, so that the next step can compute something; not for KV
        if the last step's result has ended a load or released blocks."""
        self._grammars.wait(grammar_seconds)
        if not self._remote.has_news:
            self._connector.wait(transfer_seconds)

    def shutdown(self) -> None:
        """Shuts down; no step follows."""
        self._grammars.shutdown()
        self._connector.shutdown()

    # ---- Status and cache control ----

    def take_kv_events(self) -> tuple[KVEvent, ...]:
        """Returns what the prefix cache and the connector's media have stored and removed since the last call."""
        return (*self._kv.take_events(), *self._connector.take_events())

    def reset_prefix_cache(self, reset_connector: bool) -> bool:
        """Removes all cached prefixes, and with `reset_connector` also the connector's KV; returns False on failure."""
        is_reset = not self._last_admissions and self._kv.reset_prefix_cache()
        return is_reset and (not reset_connector or self._connector.reset_cache())

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            kv_cache_usage=self._kv.usage,
            num_preemptions=self._num_preemptions,
            prefix_cache_queries=self._kv.num_queried_tokens,
            prefix_cache_hits=self._kv.num_hit_tokens,
            speculation=self._speculation.stats(),
            num_waiting_for_remote_kv=self._remote.num_waiting,
            remote_kv=self._remote.stats(),
            connector=self._connector.counters(),
            num_graph_replays=self._num_graph_replays,
            experts=self.experts.stats(),
            states=self.pool.state_counts,
        )

    # ---- Decide ----

    def schedule(self, must: bool = False) -> SchedulerOutput | None:
        """Plans one step: running requests first, then as many waiting ones as fit.

        Returns None when nothing can be computed before a step in flight is processed. Other messages to the runner
        can wait until then. If it `must`, it plans a step without tokens, for another engine that shares its experts.
        """
        num_drafts = self._config.num_drafts(len(self._running))
        plan = StepPlan(self._step + 1, self._config.max_num_batched_tokens, num_drafts, self._is_warm_up)
        self._failed += self._on_lost_loads(self._remote.poll())
        self._failed += self._on_lost_loads(self._remote.give_up_overdue())
        self._running.balance()
        self._fill(plan)
        if plan.is_empty and not plan.begins_load and self._last_admissions and not must:
            self._rewound_request_ids |= plan.preempted_request_ids
            return None
        self._step += 1
        plan.expert_orders = self.experts.next_orders(self._step)
        output = plan.finish(frozenset(self._finished_request_ids), frozenset(self._rewound_request_ids))
        self._finished_request_ids.clear()
        self._rewound_request_ids.clear()
        self._last_admissions[self._step] = self._num_admissions
        return output.with_metadata(self._connector.build_connector_meta(output))

    def grammar_masks(self, plan: SchedulerOutput) -> GrammarOutput | None:
        """Returns the masks of the plan's requests, or None. Steps up to its `barrier_step` must be processed."""
        return self._grammars.masks(plan)

    def _fill(self, plan: StepPlan) -> None:
        """Plans the next micro-batch that has something to compute, with the requests admitted to it."""
        may_admit = True
        for batch in self._running.turns():
            self._schedule_running(plan, batch)
            may_admit &= not plan.preempted_request_ids and not plan.is_blocked
            if may_admit and self._has_room(batch):
                self._schedule_waiting(plan, batch)
                may_admit = False
            if not plan.is_empty:
                self._running.end_turn(batch)
                return

    def _schedule_running(self, plan: StepPlan, batch: int) -> None:
        candidates = self._running.candidates(batch)
        for num_behind, request in zip(reversed(range(len(candidates))), candidates, strict=True):
            if plan.token_budget == 0:
                return
            # A request may have been preempted earlier in this loop, or only wait for its last token.
            if request.status is not RequestStatus.RUNNING or request.has_all_tokens_in_flight:
                continue
            num_tokens = min(request.num_tokens_to_compute, plan.token_budget)
            # Every request behind this one gets a token before this one gets drafts.
            num_drafts = max(0, min(request.num_useful_drafts, plan.token_budget - num_tokens - num_behind))
            num_slots = self._num_slots(request, num_tokens + num_drafts)
            block_ids = self._kv.grow(request, num_slots)
            if block_ids is None:
                block_ids = self._preempt_for(request, num_slots, plan)
            if block_ids is not None:
                plan.add_running(request, block_ids, num_tokens + num_drafts, num_drafts)
                self._running.on_scheduled(request, batch)

    def _num_slots(self, request: Request, num_tokens: int) -> int:
        """Returns the slots needed to compute `num_tokens` more, including the speculator's lookahead."""
        wanted = request.num_computed_tokens + num_tokens + self._config.num_lookahead_tokens
        return min(wanted, self._config.max_model_len)

    def _preempt_for(self, request: Request, num_slots: int, plan: StepPlan) -> BlockIds | None:
        """Frees blocks by preempting requests, last in line first; None when the request cannot run in this step."""
        while not self._kv.could_grow_after_steps_in_flight(request, num_slots):
            victim = self._running.last()
            self._rewind(victim)
            plan.preempted_request_ids.add(victim.request_id)
            self._num_preemptions += 1
            if victim is request:
                if not len(self._running):
                    self._remote.on_starved(request)
                return None
            block_ids = self._kv.grow(request, num_slots)
            if block_ids is not None:
                return block_ids
        # Steps in flight will free enough blocks; preempting more requests would not help this step.
        plan.is_blocked = True
        return None

    def _rewind(self, request: Request) -> None:
        """Returns a request to the queue with its tokens but without its KV, which steps in flight may still write."""
        self._running.remove(request)
        self.adapters.release(request)
        self._remote.detach(request)
        self._kv.release(request, self._step)
        request.preempt()
        self._waiting.add(request)

    def _has_room(self, batch: int) -> bool:
        """Returns whether a step of this micro-batch may admit a request."""
        num_places = self._config.max_num_seqs - len(self._running)
        num_waiting = len(self._waiting) - self._remote.num_waiting - self._grammars.num_compiling
        return num_places > 0 and self._running.has_room(batch, min(num_waiting, num_places))

    def _schedule_waiting(self, plan: StepPlan, batch: int) -> None:
        num_deferred = index = 0
        self._remote.begin_round()
        while index < len(self._waiting):
            request = self._waiting[index]
            index += 1
            if plan.token_budget < self._config.least_tokens(request.num_tokens) or not self._has_room(batch):
                return
            # Those that wait for their KV take no place from those that load nothing, as their peer may hang.
            has_place = len(self._running) + self._remote.num_waiting < self._config.max_num_seqs
            may_run = not self._grammars.is_compiling(request.request_id) and self._remote.has_turn(request, has_place)
            if not may_run or not self.adapters.has_room(request, plan):
                continue
            hit = self._kv.find_prefix(request)
            # A running request is about to publish the next block. With priorities, its priority may be lower.
            if self._config.policy == "fcfs" and self._kv.is_being_computed(request, hit):
                num_deferred += 1
                if num_deferred == _MAX_DEFERRED:
                    return
                continue
            try:
                match = self._remote.match(request, hit, has_place)
                if match.is_pending:
                    continue  # A tier may take seconds: the requests behind this one are not delayed.
                if not self._admit(request, hit, match, plan, batch):
                    return
            except RequestFailedError as error:
                self._failed.append(self._end(request, FinishReason.ERROR, str(error)))
            # A request that runs now, or has failed, has left the queue.
            index -= request.status is not RequestStatus.WAITING_FOR_REMOTE_KV

    def _admit(self, request: Request, hit: PrefixHit, match: Match, plan: StepPlan, batch: int) -> bool:
        """Lets a request run, or wait with its blocks for its KV to load; returns False when blocks are too few."""
        num_present = hit.num_tokens + match.num_tokens
        num_tokens = min(request.num_tokens - num_present, plan.token_budget)
        num_slots = num_present if match.is_async else self._num_slots(request, num_present + num_tokens)
        block_ids = self._kv.admit(request, hit, num_slots, match.num_tokens)
        if block_ids is None:
            return False
        if match.num_tokens:
            self._remote.begin(request, block_ids, hit, match)
        plan.begins_load |= match.is_async
        if not match.is_async:
            self._kv.count_hit(request, hit)
            self._waiting.remove(request)
            self._running.add(request, batch)
            self._num_admissions += 1
            request.admit(self._num_admissions, num_present)
            plan.add_new(request, block_ids, num_tokens, self.adapters.acquire(request, plan.adapter_loads))
        return True

    # ---- Apply ----

    def update_from_output(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> list[EngineOutput]:
        """Applies one step's result. Results must come in the order of the steps."""
        self.pool.on_step_processed(plan.step)
        self._num_graph_replays += result.is_replayed
        self.experts.update_from_output(plan, result)
        last_admission = self._last_admissions.pop(plan.step)
        outputs, self._failed = self._failed, []
        outputs += self._fail_without_grammar()
        outputs += self._on_lost_loads(self._remote.apply(result.kv_connector_output))
        self._grammars.set_drafts(result.draft_token_ids)
        for request_id, num_tokens in plan.num_scheduled_tokens.items():
            request = self._requests.get(request_id)
            # Results for a request that has ended, or has been preempted since, are dropped here; the preempted one
            # will compute the same tokens again.
            if request is None or request.status is not RequestStatus.RUNNING or request.admission > last_admission:
                continue
            output = self._update_request(request, num_tokens, plan.num_draft_tokens.get(request_id, 0), result)
            if output is not None:
                outputs.append(output)
        return outputs

    def _on_lost_loads(self, lost: Iterable[tuple[Request, str]]) -> Iterator[EngineOutput]:
        """Handles requests whose KV could not be loaded: by policy they fail, or compute the missing KV.

        A request that has begun its answer (and was preempted since) always continues, so that no answer is cut off.
        """
        for request, reason in lost:
            if self._fails_on_lost_kv and not request.num_output_tokens:
                yield self._end(request, FinishReason.ERROR, f"{_LOST_KV}: {reason}" if reason else _LOST_KV)
            elif request.status is RequestStatus.RUNNING:
                # The tokens sampled since are based on missing KV.
                self._rewind(request)
                self._rewound_request_ids.add(request.request_id)

    def _fail_without_grammar(self) -> list[EngineOutput]:
        """Ends the requests whose grammar turned out to be invalid."""
        invalid = [(self._requests[request_id], error) for request_id, error in self._grammars.collect().items()]
        return [self._end(request, FinishReason.ERROR, error, is_request_error=True) for request, error in invalid]

    def _update_request(
        self, request: Request, num_tokens: int, num_drafts: int, result: ModelRunnerOutput
    ) -> EngineOutput | None:
        request_id = request.request_id
        if request_id in result.failed_requests:
            return self._end(request, FinishReason.ERROR, result.failed_requests[request_id])
        verified = apply_counts(request, num_tokens, num_drafts, result)
        self._speculation.count(verified.num_drafts, verified.num_accepted)
        try:
            new_token_ids, stop_reason = request.append_until_stop(result.sampled_token_ids[request_id], self._grammars)
        except GrammarError as error:
            return self._end(request, FinishReason.ERROR, str(error), is_request_error=True)
        if request.finish_reason is None and request_id in result.unsatisfiable_requests:
            request.finish_reason = FinishReason.ERROR
        first, end = self._kv.publish(request)
        if first < end:
            self._connector.on_blocks_complete(request, self._kv.published_blocks(request), first, end)
        if not new_token_ids and request.finish_reason is None:
            return None
        params = None if request.finish_reason is None else self._finish(request, request.finish_reason)
        return make_output(request, new_token_ids, stop_reason, verified, result, params)

    def _end(
        self, request: Request, reason: FinishReason, error: str | None = None, is_request_error: bool = False
    ) -> EngineOutput:
        """Ends a request that gets no more tokens."""
        return EngineOutput(
            request_id=request.request_id,
            finish_reason=reason,
            error=error,
            is_request_error=is_request_error,
            kv_transfer_params=self._finish(request, reason),
        )

    def _finish(self, request: Request, reason: FinishReason) -> Mapping[str, Any] | None:
        """Ends every request: removes it from its queue and releases its blocks; returns its transfer parameters."""
        self._remote.detach(request)
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
            self.adapters.release(request)
            self._finished_request_ids.add(request.request_id)
        else:
            self._waiting.remove(request)
        params = self._free(request, reason)
        self.adapters.remove(request)
        self._grammars.remove(request.request_id)
        request.finish_reason = reason
        request.set_status(RequestStatus.FINISHED)
        del self._requests[request.request_id]
        return params

    def _free(self, request: Request, reason: FinishReason) -> Mapping[str, Any] | None:
        """Releases an ended request's blocks unless the connector still reads them; returns its parameters."""
        holds_blocks = request.status in (RequestStatus.RUNNING, RequestStatus.WAITING_FOR_REMOTE_KV)
        block_ids = self._kv.blocks_for_others(request) if holds_blocks else ()
        params = self._remote.finish(request, block_ids, reason)
        if holds_blocks:
            self._kv.release(request, self._step)
        return params

    # ---- Check ----

    def check_integrity(self) -> None:
        """Recomputes and compares the state of the queues, the requests and the blocks."""
        _check_queues(self._requests, self._running, self._waiting)
        self._running.check_integrity()
        self._kv.check_integrity()
        self._remote.check_integrity()
        self.experts.check_integrity()
        self.adapters.check_integrity(self._requests.values())
        assert not self._failed or self._last_admissions, "no step will report the requests that have failed"
        if not self._requests and not self._last_admissions and self._remote.is_idle:
            assert self.pool.is_unused, "blocks are missing at idle"


def _check_queues(requests: Mapping[str, Request], runs: Iterable[Request], waits: Iterable[Request]) -> None:
    """Checks that every request is in one queue, and that its counts agree."""
    running, waiting = set(runs), set(waits)
    assert not running & waiting, "a request is in two queues"
    assert running | waiting == set(requests.values()), "a request is in no queue"
    for request in requests.values():
        assert (request in running) == (request.status is RequestStatus.RUNNING), request.request_id
        assert 0 <= request.num_in_flight_tokens <= request.num_computed_tokens, request.request_id
        limit = request.num_tokens + request.num_output_placeholders
        assert request.num_computed_tokens <= limit, (request.request_id, request.num_computed_tokens, limit)
