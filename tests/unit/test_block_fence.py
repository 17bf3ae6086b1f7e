"""Blocks that steps in flight may still write are not reallocated before the last of these steps is processed."""

from __future__ import annotations

from collections import deque

import pytest

from penstock.config.engine import SchedulerConfig
from penstock.core.kv_cache_manager import KVCacheManager
from penstock.core.scheduler import Scheduler
from penstock.messages.kv_cache_spec import KVCacheConfig, KVCacheGroup, KVCacheSpec
from penstock.messages.requests import EngineRequest
from penstock.messages.runner_output import ModelRunnerOutput
from penstock.messages.sampling_params import SamplingParams
from penstock.messages.scheduler_output import SchedulerOutput

BLOCK_SIZE = 4
PROMPT = tuple(range(6))  # two blocks, with room for two tokens of the answer
DEPTH = 3


class Engine:
    """A scheduler that runs `DEPTH` steps ahead, with a pool of five blocks besides the null block."""

    def __init__(self) -> None:
        group = KVCacheGroup(("layer",), KVCacheSpec.keys_and_values(1, 1, "float32"))
        config = SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=4, max_model_len=32, max_num_in_flight=DEPTH)
        self.scheduler = Scheduler(config, KVCacheManager(KVCacheConfig(6, BLOCK_SIZE, (group,)), False))
        self.in_flight: deque[SchedulerOutput] = deque()

    def add(self, *request_ids: str) -> None:
        params = SamplingParams(max_tokens=20)
        for request_id in request_ids:
            request = EngineRequest(
                request_id=request_id, prompt_token_ids=PROMPT, sampling_params=params, max_tokens=20, seed=0
            )
            self.scheduler.add_request(request)

    def schedule(self) -> SchedulerOutput:
        plan = self.scheduler.schedule()
        assert plan is not None
        self.in_flight.append(plan)
        return plan

    def process(self) -> int:
        """Processes the oldest step in flight; returns its number."""
        plan = self.in_flight.popleft()
        tokens: dict[str, tuple[int, ...]] = dict.fromkeys(plan.num_scheduled_tokens, (7,))
        self.scheduler.update_from_output(plan, ModelRunnerOutput(sampled_token_ids=tokens))
        return plan.step


def begins(plan: SchedulerOutput, request_id: str) -> bool:
    return request_id in [request.request_id for request in plan.new_requests]


@pytest.fixture
def engine() -> Engine:
    """Returns an engine with the maximum of steps in flight, all of two requests that fill four of the five blocks."""
    engine = Engine()
    engine.add("a", "b")
    for _ in range(DEPTH):
        assert set(engine.schedule().num_scheduled_tokens) == {"a", "b"}
    return engine


def test_blocks_of_a_preempted_request_wait_for_its_last_step(engine: Engine) -> None:
    engine.process()
    plan = engine.schedule()
    assert set(plan.num_scheduled_tokens) == {"a"}, "the last free block is for the first request"
    assert plan.preempted_request_ids == {"b"}
    while engine.process() < DEPTH:
        assert not begins(engine.schedule(), "b"), "a step in flight writes its blocks"
    assert begins(engine.schedule(), "b")


def test_blocks_of_an_aborted_request_wait_for_its_last_step(engine: Engine) -> None:
    engine.scheduler.abort_requests(["b"])
    engine.add("c")
    while engine.process() < DEPTH:
        assert not begins(engine.schedule(), "c"), "a step in flight writes the blocks"
    assert begins(engine.schedule(), "c")
