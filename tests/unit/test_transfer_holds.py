"""Blocks that a connector reads or writes after their request has ended: they are held under unique names and limited.
A request that one connector refuses is withdrawn from the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from penstock.config.engine import SchedulerConfig
from penstock.core.kv_cache_manager import KVCacheManager
from penstock.core.remote_kv import KVTransfer, RemoteKV
from penstock.core.request import Request
from penstock.core.scheduler import Scheduler
from penstock.kv_transfer.connector import (
    FREED,
    PENDING,
    ConnectorEvent,
    FinishAction,
    FinishResult,
    LoadEnded,
    Match,
    Released,
    RequestView,
)
from penstock.kv_transfer.multi import MultiScheduler
from penstock.kv_transfer.null import NullSchedulerConnector
from penstock.messages.kv_cache_spec import KVCacheConfig, KVCacheGroup, KVCacheSpec
from penstock.messages.kv_transfer import BadRange, KVConnectorOutput, TransferId
from penstock.messages.outputs import FinishReason
from penstock.messages.requests import EngineRequest
from penstock.messages.runner_output import ModelRunnerOutput
from penstock.messages.sampling_params import SamplingParams
from penstock.messages.scheduler_output import BlockIds, SchedulerOutput
from penstock.utils.clock import ManualClock
from penstock.utils.errors import RequestError


class HoldingConnector(NullSchedulerConnector):
    """Reads the blocks of every request for as long as the test wants."""

    def __init__(self) -> None:
        self.held: list[TransferId] = []
        self.to_release: list[TransferId] = []

    def request_finished(self, request: RequestView, block_ids: BlockIds, reason: FinishReason) -> FinishResult:
        self.held.append(request.hold_id)
        return FinishResult(FinishAction.HOLD)

    def update_connector_output(self, output: KVConnectorOutput) -> Sequence[ConnectorEvent]:
        released, self.to_release = self.to_release, []
        return [Released(hold_id) for hold_id in released]


def make_kv(num_blocks: int) -> KVCacheManager:
    cache = KVCacheConfig(num_blocks, 4, (KVCacheGroup(("layer.0",), KVCacheSpec.keys_and_values(1, 1, "float32")),))
    return KVCacheManager(cache, enable_prefix_caching=True)


def make_request(request_id: str, first_token: int, num_tokens: int = 4) -> EngineRequest:
    prompt = tuple(range(first_token, first_token + num_tokens))
    return EngineRequest(
        request_id=request_id, prompt_token_ids=prompt, sampling_params=SamplingParams(), max_tokens=4, seed=0
    )


CONFIG = SchedulerConfig(max_num_batched_tokens=16, max_num_seqs=4, max_model_len=20)


def test_requests_that_reuse_an_id_have_separate_holds() -> None:
    connector, kv = HoldingConnector(), make_kv(10)
    scheduler = Scheduler(CONFIG, kv, None, KVTransfer(connector))

    def run_and_abort(first_token: int) -> None:
        scheduler.add_request(make_request("again", first_token))
        plan = scheduler.schedule()
        scheduler.update_from_output(plan, ModelRunnerOutput(sampled_token_ids={"again": (1,)}))
        scheduler.abort_requests(["again"])

    def step() -> None:
        scheduler.update_from_output(scheduler.schedule(), ModelRunnerOutput())

    run_and_abort(0)
    run_and_abort(100)
    step()
    both = kv.pool.num_usable - kv.pool.num_available
    assert len(set(connector.held)) == 2
    connector.to_release = [connector.held[0], connector.held[0], TransferId("unknown", 7)]
    step()
    assert kv.pool.num_usable - kv.pool.num_available == both // 2, "one hold is released, the other is not"
    connector.to_release = [connector.held[1]]
    step()
    assert kv.pool.num_available == kv.pool.num_usable
    scheduler.check_integrity()


def test_blocks_that_several_connectors_hold_are_released_by_the_last() -> None:
    children = {name: HoldingConnector() for name in ("first", "second", "third")}
    parts = {**children, "idle": NullSchedulerConnector()}
    connector, kv = MultiScheduler(parts), make_kv(10)
    scheduler = Scheduler(CONFIG, kv, None, KVTransfer(connector))
    scheduler.add_request(make_request("r", 0))
    scheduler.update_from_output(scheduler.schedule(), ModelRunnerOutput(sampled_token_ids={"r": (1,)}))
    scheduler.abort_requests(["r"])
    unknown = TransferId("unknown", 7)
    (hold_id,) = children["first"].held
    # The second releases its blocks twice, and blocks that it has never held.
    for name, released in (("second", [hold_id, hold_id, unknown]), ("third", [hold_id]), ("first", [hold_id])):
        assert kv.pool.num_available < kv.pool.num_usable, name
        children[name].to_release = released
        scheduler.update_from_output(scheduler.schedule(), ModelRunnerOutput())
        scheduler.check_integrity()
    assert kv.pool.num_available == kv.pool.num_usable
    children["first"].to_release = [hold_id]
    assert connector.update_connector_output(KVConnectorOutput()) == [], "a late one releases nothing"


class LosingConnector(NullSchedulerConnector):
    """Promises every block, and no load ever ends."""

    def __init__(self) -> None:
        self.cancelled: list[str] = []

    def cancel_load(self, request: RequestView) -> None:
        self.cancelled.append(request.request_id)

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> Match:
        return Match((request.num_tokens - 1 - num_computed_tokens) // 4 * 4, is_async=True)

    def update_state_after_alloc(self, *_: object) -> None: ...


def test_no_load_begins_while_lost_loads_pin_a_quarter_of_the_pool() -> None:
    clock, kv = ManualClock(), make_kv(41)
    scheduler = Scheduler(CONFIG, kv, None, KVTransfer(LosingConnector(), load_timeout=1.0, clock=clock))
    plan = None
    for number in range(8):
        scheduler.add_request(make_request(f"r{number}", 100 * number, num_tokens=13))
        plan = scheduler.schedule()
        sampled = dict.fromkeys(plan.num_scheduled_tokens, (1,))
        scheduler.update_from_output(plan, ModelRunnerOutput(sampled_token_ids=sampled))
        if plan.num_scheduled_tokens:
            break
        scheduler.abort_requests([f"r{number}"])
    lost = kv.pool.num_usable - kv.pool.num_available - 4
    assert plan is not None
    assert dict(plan.num_scheduled_tokens) == {"r4": 13}, "the fifth computes what it could have loaded"
    assert lost == 4 * 3, "each lost load wrote three blocks"
    scheduler.check_integrity()


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_an_overdue_load_is_cancelled_and_its_request_treated_by_policy(policy: str) -> None:
    clock, kv, connector = ManualClock(), make_kv(20), LosingConnector()
    scheduler = Scheduler(CONFIG, kv, None, KVTransfer(connector, policy, load_timeout=1.0, clock=clock))
    scheduler.add_request(make_request("r", 0, num_tokens=13))
    scheduler.update_from_output(step_of(scheduler), ModelRunnerOutput())
    for _ in range(6):
        clock.advance(0.15)
        scheduler.update_from_output(step_of(scheduler), ModelRunnerOutput())
    assert (connector.cancelled, scheduler.stats().num_waiting_for_remote_kv) == ([], 1)
    clock.advance(0.1)
    plan = step_of(scheduler)
    assert connector.cancelled == ["r"]
    outputs = scheduler.update_from_output(plan, ModelRunnerOutput(sampled_token_ids={"r": (1,)}))
    if policy == "recompute":
        assert dict(plan.num_scheduled_tokens) == {"r": 13}
    else:
        assert dict(plan.num_scheduled_tokens) == {}
        ((_, error),) = [(each.request_id, each.error) for each in outputs]
        assert "not arrived within 1 seconds" in str(error)
    scheduler.check_integrity()


def test_a_load_has_some_steps_however_long_they_are() -> None:
    """Several steps pass until a load has begun and has been found to have ended, whatever the time of its transfer."""
    clock, connector = ManualClock(), LosingConnector()
    scheduler = Scheduler(CONFIG, make_kv(20), None, KVTransfer(connector, load_timeout=30.0, clock=clock))
    scheduler.add_request(make_request("r", 0, num_tokens=13))
    for _ in range(6):
        assert connector.cancelled == []
        scheduler.update_from_output(step_of(scheduler), ModelRunnerOutput())
        clock.advance(20.0)
    step_of(scheduler)
    assert connector.cancelled == ["r"]


class PendingConnector(LosingConnector):
    """Looks for the KV of every request for ever."""

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> Match:
        return PENDING


def test_a_match_that_was_pending_for_too_long_is_cancelled() -> None:
    clock, connector = ManualClock(), PendingConnector()
    scheduler = Scheduler(CONFIG, make_kv(20), None, KVTransfer(connector, load_timeout=1.0, clock=clock))
    scheduler.add_request(make_request("r", 0, num_tokens=13))
    for seconds in (0.9, 0.1):
        scheduler.update_from_output(step_of(scheduler), ModelRunnerOutput())
        assert connector.cancelled == []
        clock.advance(seconds)
    assert dict(step_of(scheduler).num_scheduled_tokens) == {"r": 13}
    assert connector.cancelled == ["r"]


def test_a_connector_that_cannot_cancel_a_pending_match_ends_its_request_alone() -> None:
    class Failing(PendingConnector):
        def cancel_load(self, request: RequestView) -> None:
            raise KeyError(request.request_id)

    clock = ManualClock()
    scheduler = Scheduler(CONFIG, make_kv(20), None, KVTransfer(Failing(), load_timeout=1.0, clock=clock))
    scheduler.add_request(make_request("r", 0, num_tokens=13))
    scheduler.update_from_output(step_of(scheduler), ModelRunnerOutput())
    clock.advance(1.0)
    outputs = scheduler.update_from_output(step_of(scheduler), ModelRunnerOutput())
    assert [(each.request_id, each.finish_reason) for each in outputs] == [("r", FinishReason.ERROR)]
    scheduler.check_integrity()


def test_the_load_of_a_request_that_ends_is_cancelled() -> None:
    connector = LosingConnector()
    several = MultiScheduler({"idle": NullSchedulerConnector(), "loads": connector})
    scheduler = Scheduler(CONFIG, make_kv(20), None, KVTransfer(several))
    scheduler.add_request(make_request("r", 0, num_tokens=13))
    step_of(scheduler)
    scheduler.abort_requests(["r"])
    assert connector.cancelled == ["r"]


class PickyConnector(NullSchedulerConnector):
    def __init__(self, refuses: bool) -> None:
        self._refuses = refuses
        self.requests: set[str] = set()

    def on_new_request(self, request: RequestView) -> None:
        if self._refuses:
            raise RequestError("not this one")
        self.requests.add(request.request_id)

    def request_finished(self, request: RequestView, block_ids: BlockIds, reason: FinishReason) -> FinishResult:
        assert not block_ids
        self.requests.remove(request.request_id)
        return FREED


def test_a_request_that_one_connector_refuses_is_withdrawn_from_the_others() -> None:
    children = {"first": PickyConnector(False), "second": PickyConnector(True), "third": PickyConnector(False)}
    scheduler = Scheduler(CONFIG, make_kv(10), None, KVTransfer(MultiScheduler(children)))
    with pytest.raises(RequestError, match="not this one"):
        scheduler.add_request(make_request("r", 0))
    assert not any(child.requests for child in children.values())
    assert not scheduler.has_unfinished_requests


class RemoteConnector(NullSchedulerConnector):
    """Has the KV of every prompt's first block. Peers end its loads: the test sets `ended`."""

    def __init__(self) -> None:
        self.loads: list[TransferId] = []
        self.ended: list[TransferId] = []
        self.bad_ranges: tuple[BadRange, ...] = ()
        self.has_pending_work = False

    def poll(self) -> Sequence[ConnectorEvent]:
        return [LoadEnded(transfer_id, self.bad_ranges) for transfer_id in self.ended]

    def set_waker(self, callback: Callable[[], None]) -> None: ...

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> Match:
        return Match(4 - num_computed_tokens, is_async=True)

    def update_state_after_alloc(
        self, request: RequestView, transfer_id: TransferId, block_ids: BlockIds, num_computed_tokens: int, end: int
    ) -> None:
        self.loads.append(transfer_id)


def test_an_engine_whose_requests_all_wait_for_kv_needs_no_step() -> None:
    clock = ManualClock()
    connector = RemoteConnector()
    scheduler = Scheduler(CONFIG, make_kv(10), None, KVTransfer(connector, load_timeout=30.0, clock=clock))
    assert scheduler.seconds_until_due(clock.now()) is None
    scheduler.add_request(make_request("waits", 0, 8))
    assert scheduler.seconds_until_due(clock.now()) == 0.0
    scheduler.update_from_output(step_of(scheduler), ModelRunnerOutput())
    assert len(connector.loads) == 1
    clock.advance(10.0)
    assert scheduler.seconds_until_due(clock.now()) == 20.0
    scheduler.add_request(make_request("new", 50, 4))
    assert scheduler.seconds_until_due(clock.now()) == 0.0, "a new request is scheduled at once"
    scheduler.abort_requests(["new"])
    connector.has_pending_work = True
    assert scheduler.seconds_until_due(clock.now()) == 0.0
    connector.has_pending_work = False
    clock.advance(25.0)
    assert scheduler.seconds_until_due(clock.now()) == 0.0, "the load is overdue"
    for _ in range(5):
        scheduler.update_from_output(step_of(scheduler), ModelRunnerOutput())
        assert scheduler.seconds_until_due(clock.now()) == 0.0
    assert step_of(scheduler).num_scheduled_tokens == {"waits": 8}


def test_a_load_that_a_peer_ends_is_applied_before_the_next_plan() -> None:
    child = RemoteConnector()
    connector = MultiScheduler({"idle": NullSchedulerConnector(), "remote": child})
    scheduler = Scheduler(CONFIG, make_kv(10), None, KVTransfer(connector))
    scheduler.add_request(make_request("waits", 0, 8))
    scheduler.update_from_output(step_of(scheduler), ModelRunnerOutput())
    child.ended = child.loads
    assert step_of(scheduler).num_scheduled_tokens == {"waits": 4}, "the other four have been loaded"
    assert scheduler.schedule() is None, "a repeated end has no effect"
    scheduler.check_integrity()


@pytest.mark.parametrize("bad", [(0, 1), (1, 3), (3, 4)])
def test_a_block_of_which_a_part_is_missing_is_not_used(bad: tuple[int, int]) -> None:
    """A peer with smaller blocks reports parts of one."""
    connector = RemoteConnector()
    scheduler = Scheduler(CONFIG, make_kv(10), None, KVTransfer(connector))
    scheduler.add_request(make_request("waits", 0, 8))
    scheduler.update_from_output(step_of(scheduler), ModelRunnerOutput())
    connector.ended, connector.bad_ranges = connector.loads[:], (BadRange(0, *bad),)
    assert not step_of(scheduler).num_scheduled_tokens
    assert len(connector.loads) == 2, "the block is not in the cache, and is loaded again"


@pytest.mark.parametrize("output", [(), (5,)])
def test_a_request_that_has_begun_its_answer_continues_without_its_kv(output: tuple[int, ...]) -> None:
    connector = RemoteConnector()
    scheduler = Scheduler(CONFIG, make_kv(10), None, KVTransfer(connector, "fail"))
    scheduler.add_request(replace(make_request("waits", 0, 8), output_token_ids=output))
    scheduler.update_from_output(step_of(scheduler), ModelRunnerOutput())
    connector.ended, connector.bad_ranges = connector.loads[:], (BadRange(0, 0, 4),)
    step_of(scheduler)
    assert scheduler.has_unfinished_requests == bool(output)


class UndecidedConnector(NullSchedulerConnector):
    """Does not know whether it has a prompt, until a test says so."""

    answer = PENDING

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> Match:
        return self.answer


def test_a_request_whose_match_was_pending_for_too_long_does_not_ask_again() -> None:
    """It is computed, even if it has to wait for blocks first."""
    clock, kv = ManualClock(), make_kv(10)
    remote = RemoteKV(KVTransfer(UndecidedConnector(), load_timeout=1.0, clock=clock), kv)
    request = Request(make_request("r", 0, 8), 0, kv.hashed_block_size)
    found: list[bool] = []
    for _ in range(4):
        found.append(remote.match(request, kv.find_prefix(request), has_place=True).is_pending)
        clock.advance(0.5)
    assert found == [True, True, False, False]


def test_a_match_that_was_found_ends_the_wait_for_it() -> None:
    """The request may have to wait for blocks, and the connector have lost the match again meanwhile."""
    clock, kv, connector = ManualClock(), make_kv(10), UndecidedConnector()
    remote = RemoteKV(KVTransfer(connector, load_timeout=1.0, clock=clock), kv)
    request = Request(make_request("r", 0, 8), 0, kv.hashed_block_size)
    found: list[Match] = []
    for answer in (PENDING, Match(4), PENDING, PENDING):
        connector.answer = answer
        found.append(remote.match(request, kv.find_prefix(request), has_place=True))
        clock.advance(0.9 if answer == Match(4) else 0.5)
    assert found == [PENDING, Match(4), PENDING, PENDING]
    assert not remote.match(request, kv.find_prefix(request), has_place=True).is_pending


def test_a_request_that_reuses_an_id_has_a_deadline_of_its_own() -> None:
    clock = ManualClock()
    scheduler = Scheduler(CONFIG, make_kv(10), None, KVTransfer(UndecidedConnector(), load_timeout=1.0, clock=clock))
    for number in range(2):
        scheduler.add_request(make_request("again", 100 * number, 8))
        scheduler.update_from_output(step_of(scheduler), ModelRunnerOutput())
        clock.advance(0.9)
        plan = step_of(scheduler)
        assert not plan.num_scheduled_tokens, number
        scheduler.update_from_output(plan, ModelRunnerOutput())
        scheduler.abort_requests(["again"])


def test_a_request_for_which_holds_leave_too_few_blocks_waits_for_the_end_of_one() -> None:
    """It is not admitted and preempted again in every step."""
    connector, kv = HoldingConnector(), make_kv(7)
    config = SchedulerConfig(max_num_batched_tokens=8, max_num_seqs=4, max_model_len=24)
    scheduler = Scheduler(config, kv, None, KVTransfer(connector))
    scheduler.add_request(make_request("held", 0, 8))
    scheduler.update_from_output(step_of(scheduler), ModelRunnerOutput(sampled_token_ids={"held": (1,)}))
    scheduler.abort_requests(["held"])
    # Nothing of it is found in the cache after a preemption.
    starves = replace(make_request("starves", 100, 20), sampling_params=SamplingParams(prompt_logprobs=0))
    scheduler.add_request(starves)
    for _ in range(10):
        plan = scheduler.schedule()
        if plan is not None:
            scheduler.update_from_output(plan, ModelRunnerOutput(sampled_token_ids={"starves": ()}))
    assert scheduler.stats().num_preemptions == 1
    connector.to_release = connector.held[:]
    scheduler.update_from_output(step_of(scheduler), ModelRunnerOutput())
    assert step_of(scheduler).num_scheduled_tokens == {"starves": 8}
    scheduler.check_integrity()


@pytest.mark.parametrize("is_aborted", [False, True])
def test_loads_begin_again_when_the_request_that_lacked_blocks_has_ended(
    is_aborted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    connector, kv = HoldingConnector(), make_kv(9)
    config = SchedulerConfig(max_num_batched_tokens=8, max_num_seqs=4, max_model_len=32)
    scheduler = Scheduler(config, kv, None, KVTransfer(connector))
    scheduler.add_request(make_request("held", 0, 8))
    scheduler.update_from_output(step_of(scheduler), ModelRunnerOutput(sampled_token_ids={"held": (1,)}))
    scheduler.abort_requests(["held"])
    starves = replace(make_request("starves", 100, 28), sampling_params=SamplingParams(prompt_logprobs=0))
    scheduler.add_request(starves)
    for _ in range(10):
        plan = scheduler.schedule()
        if plan is not None:
            scheduler.update_from_output(plan, ModelRunnerOutput(sampled_token_ids={"starves": ()}))
    assert scheduler.stats().num_preemptions == 1
    if is_aborted:
        scheduler.abort_requests(["starves"])
    lookups: list[str] = []

    def look_up(request: RequestView, _: int) -> Match:
        lookups.append(request.request_id)
        return Match()

    monkeypatch.setattr(connector, "get_num_new_matched_tokens", look_up)
    scheduler.add_request(make_request("loads", 200, 8))
    scheduler.schedule()
    assert lookups == ["loads"] * is_aborted


def step_of(scheduler: Scheduler) -> SchedulerOutput:
    plan = scheduler.schedule()
    assert plan is not None
    return plan
