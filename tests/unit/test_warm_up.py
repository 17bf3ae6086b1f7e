"""The warm-up walks the paths that traffic takes, and leaves nothing behind."""

from __future__ import annotations

import random
from concurrent.futures import Future

import pytest

from penstock.config.engine import SchedulerConfig
from penstock.engine.warm_up import warm_up
from penstock.messages.kv_cache_spec import KVCacheConfig, KVCacheGroup, KVCacheSpec
from penstock.messages.runner_output import ModelRunnerOutput
from penstock.messages.scheduler_output import GrammarOutput, SchedulerOutput
from tests.unit.oracle import OracleRunner

BLOCK_SIZE, NUM_BLOCKS, MAX_MODEL_LEN = 4, 60, 80


class Recorder:
    """An executor that remembers what it was asked to run."""

    def __init__(self, runner: OracleRunner) -> None:
        self.runner = runner
        self.plans: list[SchedulerOutput] = []

    def execute_model(self, plan: SchedulerOutput) -> None:
        self.plans.append(plan)
        self.runner.execute_model(plan)

    def sample_tokens(self, grammars: GrammarOutput) -> Future[ModelRunnerOutput]:
        return self.runner.sample_tokens(grammars)

    def shutdown(self) -> None: ...


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("drafts", [0, 1, 3])
def test_warm_up_takes_the_real_paths(drafts: int, depth: int) -> None:
    runner = OracleRunner(
        NUM_BLOCKS,
        BLOCK_SIZE,
        windows=(0,),
        acceptance=0.5,
        num_lookahead=drafts,
        max_model_len=MAX_MODEL_LEN,
        max_drafts_in_flight=drafts * (depth - 1),
        rng=random.Random(0),
    )
    recorder = Recorder(runner)
    limits = SchedulerConfig(
        max_num_batched_tokens=64,
        max_num_seqs=8,
        max_model_len=MAX_MODEL_LEN,
        max_num_in_flight=depth,
        drafts=((8, drafts),) if drafts else (),
        num_lookahead_tokens=drafts,
    )
    groups = (KVCacheGroup(("layer.0",), KVCacheSpec.keys_and_values(1, 1, "float32")),)
    warm_up(recorder, KVCacheConfig(NUM_BLOCKS, BLOCK_SIZE, groups), limits)
    prefills = [new for plan in recorder.plans for new in plan.new_requests]
    assert {len(new.token_ids) for new in prefills} == {2 + drafts}
    assert any(len(plan.new_requests) > 1 for plan in recorder.plans), "alone and in company"
    decodes = {plan.num_scheduled_tokens[each.request_id] for plan in recorder.plans for each in plan.cached_requests}
    assert 1 + drafts in decodes, "a row that verifies all its drafts"
    assert not runner.rows, "rows were left behind"
    assert any(not new.request.sampling_params.is_greedy for new in prefills)
    assert any(new.request.sampling_params.logprobs is not None for new in prefills)
