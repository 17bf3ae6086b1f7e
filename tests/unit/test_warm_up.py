"""The warm-up runs the code paths of traffic, and leaves nothing behind."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from penstock.config.engine import SchedulerConfig
from penstock.engine.warm_up import warm_up
from penstock.executor.executor import Executor
from penstock.kv_transfer.null import NullWorkerConnector
from penstock.messages.sampling_params import SamplingParams
from penstock.messages.scheduler_output import SchedulerOutput
from penstock.simulation.oracle import NUM_HEADS, Answers, cache_config, make_layers
from penstock.simulation.ranks import Devices, RankConfig, SimWorker
from penstock.worker.messages import InitializeWorker
from penstock.worker.synthetic_steps import KINDS

BLOCK_SIZE, NUM_BLOCKS, MAX_MODEL_LEN = 4, 60, 80


class Recorder(SimWorker):
    """A rank that records the plans that it runs."""

    def __init__(self, devices: Devices) -> None:
        super().__init__(devices, (0, 0), NullWorkerConnector())
        self.plans: list[SchedulerOutput] = []

    def execute_model(self, plan: SchedulerOutput) -> None:
        self.plans.append(plan)
        super().execute_model(plan)


def warmed_up(drafts: int, depth: int, compiles_kernels: bool = True) -> Recorder:
    """Returns a rank after the warm-up of an engine of its own."""
    layers = make_layers((0,), 1, has_drafter=drafts > 0)
    recorder = Recorder(Devices(RankConfig(layers=layers, acceptance=0.5), Answers(layers), random.Random(0)))
    executor = Executor([recorder])
    limits = SchedulerConfig(
        max_num_batched_tokens=64,
        max_num_seqs=8,
        max_model_len=MAX_MODEL_LEN,
        max_num_in_flight=depth,
        drafts=((8, drafts),) if drafts else (),
        num_lookahead_tokens=drafts,
    )
    cache = cache_config(layers, NUM_BLOCKS, BLOCK_SIZE, NUM_HEADS)
    executor.load()
    executor.initialize(InitializeWorker(cache=cache, limits=limits))
    warm_up(executor, [(limits, cache)], compiles_kernels)
    return recorder


@pytest.mark.parametrize("compiles_kernels", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("drafts", [0, 1, 3])
def test_warm_up_takes_the_real_paths(drafts: int, depth: int, compiles_kernels: bool) -> None:
    recorder = warmed_up(drafts, depth, compiles_kernels)
    prefills = [new for plan in recorder.plans for new in plan.new_requests]
    assert {len(new.token_ids) for new in prefills} == {2 + drafts}
    assert any(len(plan.new_requests) > 1 for plan in recorder.plans), "prompts run together"
    decodes = {
        count
        for plan in recorder.plans
        for request_id, count in plan.num_scheduled_tokens.items()
        if request_id not in [new.request_id for new in plan.new_requests]
    }
    assert 1 + drafts in decodes, "a row that verifies all its drafts"
    assert not recorder.rows, "rows were left behind"
    assert any(not new.request.sampling_params.is_greedy for new in prefills)
    assert any(new.request.sampling_params.logprobs is not None for new in prefills)


@pytest.mark.parametrize(("compiles_kernels", "num_steps"), [(False, 2), (True, 3 * len(KINDS) + 3)])
def test_a_prefill_and_a_decode_are_enough_unless_kernels_are_compiled(compiles_kernels: bool, num_steps: int) -> None:
    plans = warmed_up(0, 1, compiles_kernels).plans
    assert len([plan for plan in plans if plan.num_scheduled_tokens]) == num_steps


@pytest.mark.parametrize("compiles_kernels", [False, True])
def test_every_kind_of_sampling_runs_alone_only_if_kernels_are_compiled(compiles_kernels: bool) -> None:
    prompts = [plan.new_requests for plan in warmed_up(0, 1, compiles_kernels).plans if plan.new_requests]
    alone = [new.request.sampling_params for (new, *others) in prompts if not others]
    together = [new.request.sampling_params for new in prompts[-1]]
    kinds = [SamplingParams(**dict[str, Any](kind)) for kind in KINDS]
    most = 16 if compiles_kernels else 2
    assert together == [replace(kind, min_tokens=min(kind.min_tokens, most)) for kind in kinds]
    assert alone == (kinds if compiles_kernels else [])
