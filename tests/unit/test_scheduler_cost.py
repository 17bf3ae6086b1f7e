"""The cost of a step of the scheduler: it visits neither all waiting requests nor all loads."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.config.engine import SchedulerConfig
from penstock.core import block_hash
from penstock.core.kv_cache_manager import KVCacheManager
from penstock.core.remote_kv import KVTransfer
from penstock.core.request_queue import RequestQueue
from penstock.core.scheduler import Scheduler
from penstock.kv_transfer.connector import NO_MATCH, PENDING, Match
from penstock.kv_transfer.null import NullSchedulerConnector
from penstock.messages.kv_cache_spec import KVCacheConfig, KVCacheGroup, KVCacheSpec
from penstock.messages.requests import EngineRequest
from penstock.messages.runner_output import ModelRunnerOutput
from penstock.messages.sampling_params import SamplingParams
from penstock.messages.scheduler_output import SchedulerOutput
from penstock.utils.clock import ManualClock

BLOCK_SIZE = 4


class LoadsEverything(NullSchedulerConnector):
    """Promises a block of every prompt, which never arrives."""

    has_pending_work = True

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Match:
        return Match(BLOCK_SIZE, is_async=True)

    def update_state_after_alloc(self, *_: Any) -> None: ...


def make(max_num_seqs: int, transfer: KVTransfer | None = None, enable_prefix_caching: bool = True) -> Scheduler:
    group = KVCacheGroup(("layer",), KVCacheSpec.keys_and_values(1, 1, "float32"))
    config = SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=max_num_seqs, max_model_len=64)
    kv = KVCacheManager(KVCacheConfig(2000, BLOCK_SIZE, (group,)), enable_prefix_caching)
    return Scheduler(config, kv, None, *([transfer] if transfer else []))


def add(scheduler: Scheduler, count: int) -> None:
    params = SamplingParams(max_tokens=4)
    for number in range(count):
        prompt = tuple(range(7 * number, 7 * number + 6))
        request = EngineRequest(
            request_id=str(number), prompt_token_ids=prompt, sampling_params=params, max_tokens=4, seed=0
        )
        scheduler.add_request(request)


def watch(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list that grows by the index of every waiting or running request that is looked at."""
    looked_at: list[int] = []
    original = RequestQueue.__getitem__

    def look(self: RequestQueue, index: int) -> Any:
        looked_at.append(index)
        return original(self, index)

    monkeypatch.setattr(RequestQueue, "__getitem__", look)
    return looked_at


def test_a_full_engine_looks_at_no_waiting_request(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make(max_num_seqs=2)
    add(scheduler, 1000)
    looked_at = watch(monkeypatch)
    plan = scheduler.schedule()
    assert [new.request_id for new in plan.new_requests] == ["0", "1"]
    assert len(looked_at) == 3
    monkeypatch.setattr(scheduler._waiting, "snapshot", None)
    monkeypatch.setattr(RequestQueue, "__iter__", None)
    looked_at.clear()
    assert scheduler.schedule() is None
    assert not looked_at


class NeverIterated(dict[str, Any]):
    """A table that allows only access to single entries."""

    def _refuse(self) -> Any:
        raise AssertionError("all loads are visited for one request")

    values = items = keys = __iter__ = _refuse


def test_loads_are_not_counted_for_every_request() -> None:
    scheduler = make(300, KVTransfer(LoadsEverything()))
    add(scheduler, 200)
    scheduler._remote._loads = NeverIterated()
    scheduler._remote.give_up_overdue = lambda: ()
    plan: SchedulerOutput = scheduler.schedule()
    assert plan.num_scheduled_tokens == {}
    assert scheduler.stats().num_waiting_for_remote_kv == 200
    assert scheduler._remote.num_waiting == 200


def test_the_prefix_of_a_preempted_request_is_counted_once() -> None:
    """Two requests grow to four blocks each, and there are six: what the second finds again of its own is no hit."""
    group = KVCacheGroup(("layer",), KVCacheSpec.keys_and_values(1, 1, "float32"))
    config = SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=2, max_model_len=16)
    scheduler = Scheduler(config, KVCacheManager(KVCacheConfig(7, BLOCK_SIZE, (group,)), True), None)
    for number in range(2):
        prompt = tuple(range(100 * number, 100 * number + 8))
        scheduler.add_request(
            EngineRequest(
                request_id=str(number),
                prompt_token_ids=prompt,
                sampling_params=SamplingParams(max_tokens=8),
                max_tokens=8,
                seed=0,
            )
        )
    while scheduler.has_unfinished_requests:
        plan = scheduler.schedule()
        assert plan is not None
        sampled = dict.fromkeys(plan.num_scheduled_tokens, (7,))
        scheduler.update_from_output(plan, ModelRunnerOutput(sampled_token_ids=sampled))
    stats = scheduler.stats()
    assert stats.num_preemptions > 0
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (16, 0)


class StillFetches(NullSchedulerConnector):
    """Fetches the KV of all prompts but one from a slow tier."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Match:
        return NO_MATCH if request.request_id == "299" else PENDING


@pytest.fixture
def fetching(monkeypatch: pytest.MonkeyPatch) -> tuple[Scheduler, ManualClock, list[str]]:
    """A scheduler with 299 pending requests before one that is not, its clock, and the requests that it looks up."""
    clock = ManualClock()
    looked_up: list[str] = []
    scheduler = make(300, KVTransfer(StillFetches(), clock=clock))
    add(scheduler, 300)
    find_prefix = scheduler._kv.find_prefix

    def look_up(request: Any) -> Any:
        looked_up.append(request.request_id)
        return find_prefix(request)

    monkeypatch.setattr(scheduler._kv, "find_prefix", look_up)
    return scheduler, clock, looked_up


def test_pending_requests_take_turns_and_hold_back_none_behind_them(
    fetching: tuple[Scheduler, ManualClock, list[str]],
) -> None:
    scheduler, _, looked_up = fetching
    plan = scheduler.schedule()
    assert [new.request_id for new in plan.new_requests] == ["299"]
    assert len(looked_up) == 300, "a new request is looked up at once"
    looked_up.clear()
    for number in range(1, 9):
        assert scheduler.schedule() is None
        assert len(looked_up) <= 64 * number
    assert sorted(looked_up, key=int) == [str(number) for number in range(299)], "each has one turn in eight"


def test_requests_that_were_pending_for_too_long_are_admitted(
    fetching: tuple[Scheduler, ManualClock, list[str]],
) -> None:
    scheduler, clock, _ = fetching
    scheduler.schedule()
    clock.advance(31.0)
    for _ in range(50):
        scheduler.schedule()
    assert scheduler.stats().num_waiting == 0
    assert scheduler.stats().remote_kv.num_timeouts == 299


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_blocks_are_hashed_only_for_the_prefix_cache(
    enable_prefix_caching: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[bytes] = []
    original = block_hash.hashlib.sha256
    monkeypatch.setattr(block_hash.hashlib, "sha256", lambda data: hashed.append(data) or original(data))
    add(make(4, enable_prefix_caching=enable_prefix_caching), 3)
    # The start of each request's chain, and one block of four of its six tokens.
    assert len(hashed) == (6 if enable_prefix_caching else 3)
