"""Which requests wait for another one's KV, and for how long: those with a common prefix, and those that find the pool
full of loads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from penstock.config.engine import SchedulerConfig
from penstock.core.kv_cache_manager import KVCacheManager
from penstock.core.remote_kv import MAX_FAILED_LOADS, SHARED_LOAD_PATIENCE, KVTransfer
from penstock.core.scheduler import Scheduler
from penstock.kv_transfer.connector import NO_MATCH, ConnectorEvent, LoadEnded, Match, RequestView
from penstock.kv_transfer.null import NullSchedulerConnector
from penstock.messages.kv_cache_spec import KVCacheConfig, KVCacheGroup, KVCacheSpec
from penstock.messages.kv_transfer import BadRange, KVConnectorOutput, TransferId
from penstock.messages.requests import EngineRequest
from penstock.messages.runner_output import ModelRunnerOutput
from penstock.messages.sampling_params import SamplingParams
from penstock.messages.scheduler_output import SchedulerOutput
from penstock.utils.clock import ManualClock

CONFIG = SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=8, max_model_len=32)
TIMEOUT = 30.0


class LoadingConnector(NullSchedulerConnector):
    """Loads the whole prompt of the requests whose parameters say so; a load ends when the test says so."""

    def __init__(self, is_async: bool) -> None:
        self._is_async = is_async
        self.num_lookups = 0
        self.loads: dict[str, TransferId] = {}
        self.ended: list[LoadEnded] = []

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> Match:
        self.num_lookups += 1
        if not request.kv_transfer_params:
            return NO_MATCH
        return Match((request.num_tokens - 1 - num_computed_tokens) // 4 * 4, is_async=self._is_async)

    def update_state_after_alloc(self, request: RequestView, transfer_id: TransferId, *_: object) -> None:
        self.loads[request.request_id] = transfer_id

    def update_connector_output(self, output: KVConnectorOutput) -> Sequence[ConnectorEvent]:
        ended, self.ended = self.ended, []
        return ended


@dataclass
class Engine:
    scheduler: Scheduler
    connector: LoadingConnector
    clock: ManualClock
    kv: KVCacheManager

    def add(self, request_id: str, *, is_remote: bool, prompt: range = range(13), output: tuple[int, ...] = ()) -> None:
        params = SamplingParams(kv_transfer_params={"remote": True} if is_remote else None)
        self.scheduler.add_request(
            EngineRequest(
                request_id=request_id,
                prompt_token_ids=tuple(prompt),
                output_token_ids=output,
                sampling_params=params,
                max_tokens=4,
                seed=0,
            )
        )

    def step(self) -> dict[str, int]:
        """Runs a step to its end; returns how many tokens of each request it computed."""
        plan = self.scheduler.schedule()
        assert plan is not None
        self.scheduler.check_integrity()
        self.process(plan)
        return dict(plan.num_scheduled_tokens)

    def process(self, plan: SchedulerOutput) -> None:
        sampled = dict.fromkeys(plan.num_scheduled_tokens, (100,))
        self.scheduler.update_from_output(plan, ModelRunnerOutput(sampled_token_ids=sampled))
        self.scheduler.check_integrity()

    def end_load(self, request_id: str, bad_ranges: tuple[BadRange, ...] = ()) -> None:
        self.connector.ended.append(LoadEnded(self.connector.loads[request_id], bad_ranges))


def make_engine(
    is_async: bool = True,
    num_blocks: int = 80,
    num_groups: int = 1,
    config: SchedulerConfig = CONFIG,
    policy: str = "recompute",
) -> Engine:
    group = KVCacheGroup(("layer",), KVCacheSpec.keys_and_values(1, 1, "float32"))
    kv = KVCacheManager(KVCacheConfig(num_blocks, 4, (group,) * num_groups), enable_prefix_caching=True)
    connector, clock = LoadingConnector(is_async), ManualClock()
    scheduler = Scheduler(config, kv, None, KVTransfer(connector, policy, TIMEOUT, clock))
    return Engine(scheduler, connector, clock, kv)


@pytest.mark.parametrize("num_groups", [1, 2])
def test_a_request_that_loads_nothing_does_not_wait_for_another_ones_load(num_groups: int) -> None:
    engine = make_engine(num_groups=num_groups)
    engine.add("lost", is_remote=True)
    assert engine.step() == {}
    engine.add("here", is_remote=False)
    assert engine.step() == {"here": 13}, "it waits for a load that may be lost"
    engine.end_load("lost")
    assert engine.step() == {"here": 1}
    assert engine.step() == {"here": 1, "lost": 1}, "the load is published beside the same blocks computed here"


def test_a_request_waits_for_the_prefix_that_a_running_one_computes() -> None:
    engine = make_engine(config=replace(CONFIG, max_num_batched_tokens=16, max_num_in_flight=2))
    engine.add("first", is_remote=False, prompt=range(25))
    engine.add("second", is_remote=False, prompt=range(25))
    first = engine.scheduler.schedule()
    assert first is not None
    assert dict(first.num_scheduled_tokens) == {"first": 16}
    second = engine.scheduler.schedule()
    assert second is not None
    assert dict(second.num_scheduled_tokens) == {"first": 9}
    engine.scheduler.update_from_output(first, ModelRunnerOutput(sampled_token_ids={"first": ()}))
    engine.process(second)
    assert engine.step() == {"first": 1, "second": 1}


@pytest.mark.parametrize(("num_deferred", "runs"), [(63, True), (64, False)])
def test_few_requests_that_wait_for_a_prefix_hold_back_none_behind_them(num_deferred: int, runs: bool) -> None:
    """With more of them a step would take too long."""
    engine = make_engine(config=replace(CONFIG, max_num_batched_tokens=16, max_num_in_flight=2))
    engine.add("first", is_remote=False, prompt=range(25))
    assert engine.scheduler.schedule() is not None
    for number in range(num_deferred):
        engine.add(f"same {number}", is_remote=False, prompt=range(25))
    engine.add("other", is_remote=False, prompt=range(50, 54))
    plan = engine.scheduler.schedule()
    assert plan is not None
    assert dict(plan.num_scheduled_tokens) == {"first": 9, **({"other": 4} if runs else {})}


def test_requests_with_the_same_prompt_share_one_load() -> None:
    engine = make_engine()
    names = [f"r{number}" for number in range(4)]
    for name in names:
        engine.add(name, is_remote=True)
    assert engine.step() == {}
    assert list(engine.connector.loads) == ["r0"]
    engine.end_load("r0")
    engine.step()
    assert engine.step() == dict.fromkeys(names, 1)
    assert list(engine.connector.loads) == ["r0"]


def test_a_lost_load_delays_requests_with_loads_of_their_own_only_briefly() -> None:
    engine = make_engine()
    names = [f"r{number}" for number in range(4)]
    for name in names:
        engine.add(name, is_remote=True)
    engine.step()
    engine.clock.advance(TIMEOUT * SHARED_LOAD_PATIENCE)
    assert engine.step() == {}
    assert list(engine.connector.loads) == names, "none of them waits for the next one's load in turn"
    for name in names[1:]:
        engine.end_load(name)
    engine.step()
    assert engine.step() == dict.fromkeys(names[1:], 1), "the same blocks are published three times"
    engine.end_load("r0")
    engine.step()
    engine.scheduler.abort_requests(names)
    engine.step()
    assert engine.kv.pool.num_available == engine.kv.pool.num_usable


def test_a_request_whose_shared_load_has_failed_loads_itself() -> None:
    engine = make_engine()
    engine.add("first", is_remote=True)
    engine.add("second", is_remote=True, prompt=range(10))
    engine.step()
    engine.end_load("first", (BadRange(0, 0, 12),))
    engine.step()
    engine.scheduler.abort_requests(["first"])
    engine.step()
    assert list(engine.connector.loads) == ["first", "second"]


def test_the_failure_of_a_load_before_a_preemption_does_not_end_the_request() -> None:
    engine = make_engine(
        is_async=False, num_blocks=8, config=replace(CONFIG, max_num_in_flight=2, max_num_seqs=2), policy="fail"
    )
    engine.add("first", is_remote=False, prompt=range(100, 111))
    engine.step()
    engine.add("second", is_remote=True)
    plan = engine.scheduler.schedule()
    assert plan is not None
    assert dict(plan.num_scheduled_tokens) == {"first": 1, "second": 1}
    # The first one needs another block.
    engine.scheduler.schedule()
    assert engine.scheduler.stats().num_preemptions == 1
    engine.end_load("second", (BadRange(0, 0, 4),))
    outputs = engine.scheduler.update_from_output(plan, ModelRunnerOutput(sampled_token_ids={"first": (100,)}))
    assert [output.request_id for output in outputs] == ["first"]
    assert engine.scheduler.stats().num_waiting == 1


def test_nothing_waits_for_a_load_that_was_abandoned() -> None:
    engine = make_engine()
    engine.add("first", is_remote=True)
    engine.step()
    engine.scheduler.abort_requests(["first"])
    engine.add("second", is_remote=True)
    engine.step()
    assert list(engine.connector.loads) == ["first", "second"]


def test_blocks_loaded_in_the_step_that_computes_the_rest_are_waited_for() -> None:
    engine = make_engine(is_async=False, config=replace(CONFIG, max_num_in_flight=2))
    engine.add("first", is_remote=True)
    engine.add("second", is_remote=False)
    plan = engine.scheduler.schedule()
    assert plan is not None
    assert dict(plan.num_scheduled_tokens) == {"first": 1}
    engine.end_load("first")
    engine.process(plan)
    assert engine.step() == {"first": 1, "second": 1}


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_request_whose_loaded_kv_is_always_evicted_computes_it(policy: str) -> None:
    """While it loads, those behind it take the blocks that it needs to run, and more when it has loaded."""
    engine = make_engine(num_blocks=6, policy=policy)
    engine.add("loads", is_remote=True)
    loads: dict[TransferId, None] = {}
    for number in range(100, 2000, 100):
        engine.add(f"behind {number}", is_remote=False, prompt=range(number, number + 7))
        for _ in range(4):
            computed = engine.step()
            if "loads" in computed:
                assert len(loads) == MAX_FAILED_LOADS
                assert computed["loads"] > 1, "the last load was evicted too"
                return
            if engine.connector.loads["loads"] not in loads:
                loads[engine.connector.loads["loads"]] = None
                engine.end_load("loads")
    pytest.fail(f"it has loaded {len(loads)} times and never run")


def test_loads_leave_blocks_for_requests_that_run() -> None:
    """A peer that hangs would hold them for as long as a load may take."""
    engine = make_engine(num_blocks=12)
    for number in range(4):
        engine.add(f"loads {number}", is_remote=True, prompt=range(20 * number, 20 * number + 13))
    assert engine.step() == {}
    assert list(engine.connector.loads) == ["loads 0", "loads 1"], "6 of 11 blocks"
    engine.add("here", is_remote=False, prompt=range(100, 113))
    for _ in range(3):
        assert engine.step()["here"]
    engine.end_load("loads 0")
    assert engine.step()["here"]
    engine.step()
    assert list(engine.connector.loads) == ["loads 0", "loads 1", "loads 2"], "not in the order of arrival"


def test_loads_leave_places_for_requests_that_load_nothing() -> None:
    """A peer that hangs would hold them for as long as a load may take."""
    engine = make_engine(config=replace(CONFIG, max_num_seqs=2))
    for number in range(3):
        engine.add(f"loads {number}", is_remote=True, prompt=range(20 * number, 20 * number + 13))
    engine.add("here", is_remote=False, prompt=range(100, 113))
    assert engine.step() == {"here": 13}
    assert list(engine.connector.loads) == ["loads 0", "loads 1"]
    before = engine.connector.num_lookups
    engine.end_load("loads 0")
    assert engine.step() == {"here": 1}
    assert engine.step() == {"here": 1, "loads 0": 1}
    assert engine.connector.num_lookups == before + 1, "the one that waits for a place was looked at"
    engine.scheduler.abort_requests(["here", "loads 0"])
    engine.clock.advance(TIMEOUT - 1)
    engine.step()
    assert list(engine.connector.loads) == ["loads 0", "loads 1", "loads 2"]


def test_requests_that_wait_for_the_end_of_a_load_are_not_looked_at_before() -> None:
    engine = make_engine(num_blocks=12)
    for number in range(200):
        engine.add(f"loads {number}", is_remote=True, prompt=range(20 * number, 20 * number + 13))
    engine.step()
    assert engine.connector.num_lookups == 200
    for number in range(2, 10):
        engine.end_load(f"loads {number - 2}")
        engine.step()
        before = engine.connector.num_lookups
        engine.step()
        assert list(engine.connector.loads)[-1] == f"loads {number}", "not in the order of arrival"
        engine.scheduler.abort_requests([f"loads {number - 2}"])
        engine.step()
        assert engine.connector.num_lookups - before <= 2, "the one whose load has ended, and the next"


def test_an_answer_that_has_begun_does_not_wait_for_loads() -> None:
    engine = make_engine(num_blocks=12)
    for number in range(3):
        engine.add(f"loads {number}", is_remote=True, prompt=range(20 * number, 20 * number + 13))
    engine.add("begun", is_remote=True, prompt=range(100, 110), output=(1, 2))
    assert engine.step() == {"begun": 12}
    assert list(engine.connector.loads) == ["loads 0", "loads 1"]


def test_a_request_waits_for_the_end_of_loads_no_longer_than_one_may_take() -> None:
    engine = make_engine(num_blocks=26, config=replace(CONFIG, max_num_seqs=40))
    for number in range(30):
        engine.add(f"loads {number}", is_remote=True, prompt=range(20 * number, 20 * number + 13))
    assert engine.step() == {}
    assert len(engine.connector.loads) == 5, "15 of 25 blocks"
    engine.clock.advance(TIMEOUT - 1)
    for number in range(4):
        engine.end_load(f"loads {number}")
    engine.step()
    engine.scheduler.abort_requests([f"loads {number}" for number in range(4)])
    assert engine.step() == {}
    assert len(engine.connector.loads) == 9
    engine.clock.advance(1)
    assert engine.step() == {"loads 9": 13, "loads 10": 13}


def test_a_request_that_ran_and_waits_again_is_looked_at() -> None:
    """Whatever it waited for before."""
    engine = make_engine(num_blocks=12)
    for number in range(3):
        engine.add(f"loads {number}", is_remote=True, prompt=range(20 * number, 20 * number + 13))
    engine.step()
    request = engine.scheduler._requests["loads 2"]
    assert request.waits_for_loads
    engine.scheduler.abort_requests(["loads 0", "loads 1"])
    assert engine.step() == {"loads 2": 13}, "too many blocks are in quarantine to load"
    assert not request.waits_for_loads


def test_a_load_of_more_than_half_of_the_pool_begins() -> None:
    engine = make_engine(num_blocks=9)
    engine.add("loads", is_remote=True, prompt=range(29))
    engine.step()
    assert list(engine.connector.loads) == ["loads"]
    engine.add("next", is_remote=True, prompt=range(100, 105))
    engine.step()
    assert list(engine.connector.loads) == ["loads"]
    engine.end_load("loads")
    assert engine.step() == {}
    assert engine.step() == {"loads": 1}
