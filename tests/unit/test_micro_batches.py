"""Micro-batches are balanced, stable and fair, and no empty step is launched."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from penstock.core.request import Request
from penstock.core.structured_output import StructuredOutputs
from penstock.messages.scheduler_output import GrammarOutput, SchedulerOutput
from penstock.messages.structured_outputs import GrammarSpec
from tests.unit.pipeline_fakes import make_config, make_core, make_request

PIPELINES = [(2, False), (2, True), (3, False), (4, True)]


def sizes(plans: list[SchedulerOutput]) -> list[int]:
    return [len(plan.num_scheduled_tokens) for plan in plans]


def test_with_one_stage_every_step_takes_all_requests() -> None:
    for is_async in (False, True):
        core, _, stages = make_core(make_config(1, is_async))
        for number in range(7):
            core.add_request(make_request(f"r{number}"))
        for _ in range(6):
            core.step()
        assert set(sizes(stages.plans)) == {7}


@pytest.mark.parametrize(("num_stages", "is_async"), PIPELINES)
def test_a_burst_of_short_prompts_is_divided(num_stages: int, is_async: bool) -> None:
    config = make_config(num_stages, is_async)
    core, _, stages = make_core(config)
    for number in range(4 * config.num_micro_batches):
        core.add_request(make_request(f"r{number}"))
    for _ in range(20):
        core.step()
    assert set(sizes(stages.plans)) == {4}
    assert [len(plan.new_requests) for plan in stages.plans[: config.num_micro_batches]] == [4] * (
        config.num_micro_batches
    )


def test_a_step_of_prompts_may_be_as_large_as_the_budget() -> None:
    core, _, stages = make_core(make_config(2))
    for number in range(8):
        core.add_request(make_request(f"r{number}", num_prompt_tokens=32))
    core.step()
    assert [plan.total_num_scheduled_tokens for plan in stages.plans] == [64, 64]


@pytest.mark.parametrize(("num_stages", "is_async"), PIPELINES)
def test_requests_keep_their_micro_batch_until_the_imbalance_is_large(num_stages: int, is_async: bool) -> None:
    config = make_config(num_stages, is_async)
    core, scheduler, stages = make_core(config)
    count = 8 * config.num_micro_batches
    for number in range(count):
        core.add_request(make_request(f"r{number}", max_tokens=500))
    for _ in range(3 * config.num_micro_batches):
        core.step()
    first = [set(plan.num_scheduled_tokens) for plan in stages.plans[-config.num_micro_batches :]]
    core.abort_requests(sorted(first[0])[:1])
    for _ in range(3 * config.num_micro_batches):
        core.step()
    later = [set(plan.num_scheduled_tokens) for plan in stages.plans[-config.num_micro_batches :]]
    assert sorted(map(len, later)) == [7] + [8] * (config.num_micro_batches - 1)
    assert all(any(each <= before for before in first) for each in later), "a request has moved"
    core.abort_requests(sorted(first[0])[1:])
    for _ in range(5 * config.num_micro_batches):
        core.step()
    sizes_now = sizes(stages.plans[-config.num_micro_batches :])
    assert sum(sizes_now) == count - 8
    assert min(sizes_now) > 0.75 * max(sizes_now) - 1
    scheduler.check_integrity()


def test_the_lightest_micro_batch_gets_the_next_request() -> None:
    core, _, stages = make_core(make_config(3))
    for number in range(8):
        core.add_request(make_request(f"r{number}"))
    for _ in range(9):
        core.step()
    assert sorted(sizes(stages.plans[-3:])) == [2, 3, 3]
    core.add_request(make_request("new"))
    for _ in range(9):
        core.step()
    assert sizes(stages.plans[-3:]) == [3, 3, 3]


@pytest.mark.parametrize(("num_stages", "is_async"), PIPELINES)
def test_every_request_is_scheduled_in_each_round(num_stages: int, is_async: bool) -> None:
    config = make_config(num_stages, is_async)
    core, _, stages = make_core(config)
    for number in range(5 * config.num_micro_batches + 1):
        core.add_request(make_request(f"r{number}", max_tokens=60))
    for _ in range(40 * config.num_micro_batches):
        core.step()
    settled = stages.plans[config.num_micro_batches :]
    all_requests = {name for plan in settled for name in plan.num_scheduled_tokens}
    for start in range(len(settled) - config.num_micro_batches):
        of_round = settled[start : start + config.num_micro_batches]
        assert {name for plan in of_round for name in plan.num_scheduled_tokens} == all_requests


@pytest.mark.spread(1)
@pytest.mark.parametrize(("num_stages", "is_async"), PIPELINES)
def test_random_traffic_is_served_fairly(num_stages: int, is_async: bool) -> None:
    for seed in range(8):
        rng = random.Random(f"{seed} {num_stages} {is_async}")
        config = make_config(num_stages, is_async, policy=rng.choice(["fcfs", "priority"]))
        core, scheduler, stages = make_core(config)
        last_seen: dict[str, int] = {}
        number = num_plans = longest = 0
        for _ in range(200):
            for _ in range(rng.choice([0, 0, 0, 1, 6])):
                core.add_request(make_request(f"{'x' * rng.randrange(3)}{number}", rng.randrange(1, 9), 30))
                number += 1
            running = [request.request_id for request in scheduler._running]
            core.abort_requests([name for name in running if rng.random() < 0.02])
            core.step()
            for plan in stages.plans[num_plans:]:
                num_plans += 1
                for name in plan.num_scheduled_tokens:
                    longest = max(longest, num_plans - last_seen.get(name, num_plans))
                    last_seen[name] = num_plans
        # A request that moves to another micro-batch, or reaches the end of its prompt, may wait one more round.
        assert longest < 2 * config.num_micro_batches
        assert number > 100


def test_a_request_is_not_computed_before_its_token_is_known() -> None:
    """With asynchronous scheduling one step may be ahead of it, for any number of stages."""
    for num_stages, is_async in PIPELINES:
        core, _, stages = make_core(make_config(num_stages, is_async))
        core.add_request(make_request("only", max_tokens=10))
        most = 0
        while core.has_work:
            core.step()
            most = max(most, core.num_in_flight)
        assert most == is_async
        assert sizes(stages.plans) == [1] * 10


@pytest.mark.parametrize(("num_stages", "is_async"), [(1, False), (1, True), *PIPELINES])
def test_only_the_last_step_which_frees_rows_is_empty(num_stages: int, is_async: bool) -> None:
    core, _, stages = make_core(make_config(num_stages, is_async))
    for number in range(3):
        core.add_request(make_request(f"r{number}", max_tokens=5 + number))
    while core.has_work or core.has_rows_to_free:
        core.step()
    *steps, last = stages.plans
    assert last.is_empty
    assert last.finished_request_ids
    assert not any(plan.is_empty for plan in steps)
    assert sum(sizes(steps)) == 5 + 6 + 7


class OneMask(StructuredOutputs):
    """Grammars that allow everything; records how many tokens of a request were unknown when its mask was requested."""

    def __init__(self) -> None:
        super().__init__(None)
        self.requests: dict[str, Request] = {}
        self.unknown: list[int] = []

    def add(self, request_id: str, spec: GrammarSpec, output_token_ids: Sequence[int] = ()) -> None: ...

    def advance(self, request_id: str, token_id: int) -> bool:
        return False

    def masks(self, plan: SchedulerOutput) -> GrammarOutput | None:
        live = [self.requests[name] for name in plan.grammar_request_ids if name in self.requests]
        self.unknown += [each.num_samples_in_flight - 1 for each in live]
        return GrammarOutput({each.request_id: np.zeros((1, 1), np.int32) for each in live}) if live else None


@pytest.mark.parametrize(("num_stages", "is_async"), [(1, True), *PIPELINES])
@pytest.mark.parametrize("count", [1, 12])
def test_a_mask_waits_for_the_steps_of_its_own_requests_only(num_stages: int, is_async: bool, count: int) -> None:
    grammars = OneMask()
    config = make_config(num_stages, is_async)
    core, scheduler, stages = make_core(config, grammars=grammars)
    for number in range(count):
        spec = GrammarSpec("json_schema", "{}") if number % 2 == 0 else None
        core.add_request(make_request(f"r{number}", num_prompt_tokens=20, max_tokens=30, grammar=spec))
    grammars.requests = scheduler._requests
    depths: list[int] = []
    while core.has_work:
        depths.append(core.num_in_flight)
        core.step()
    assert grammars.unknown
    assert not any(grammars.unknown), "a mask was made before the token before it was known"
    if count > 1 and num_stages > 1:
        assert sum(depths[5:-5]) / len(depths[5:-5]) >= config.max_num_in_flight - 1, "the pipeline was emptied"
    # A chunk inside a prompt samples nothing and waits for nothing.
    chunks = [plan for plan in stages.plans if plan.new_requests and not plan.grammar_request_ids]
    assert all(plan.barrier_step == 0 for plan in chunks)
