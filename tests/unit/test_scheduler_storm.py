"""Random traffic on the scheduler with a simulated rank: whatever is preempted, aborted, shared or in flight,
every request gets the tokens that only its prompt determines, and every block is free when the engine is idle.
"""

from __future__ import annotations

import random

import pytest

from penstock.config.engine import SchedulerConfig
from penstock.core.kv_cache_manager import KVCacheManager
from penstock.core.kv_cache_planning import blocks_for_one_request
from penstock.core.kv_events import KVEventRecorder, StepKVEventRecorder
from penstock.core.scheduler import Scheduler
from penstock.engine.engine_core import EngineCore
from penstock.engine.kv_events import EventPublisher
from penstock.kv_transfer.null import NullWorkerConnector
from penstock.messages.outputs import FinishReason
from penstock.messages.requests import EngineRequest
from penstock.messages.sampling_params import SamplingParams
from penstock.simulation.oracle import NUM_HEADS, VOCAB_SIZE, Answers, cache_config, make_layers
from penstock.simulation.ranks import Devices, RankConfig
from penstock.simulation.sim_engine import make_executor
from penstock.worker.messages import InitializeWorker
from tests.grids import grid

BLOCK_SIZE = 4
MAX_MODEL_LEN = 80


def make_core(
    rng: random.Random,
    windows: tuple[int, ...],
    depth: int,
    drafts: int = 0,
    publisher: EventPublisher | None = None,
    num_stages: int = 1,
    reports_kv_events: bool = False,
) -> tuple[EngineCore, Devices]:
    has_drafter = drafts > 0 and rng.random() < 0.5
    layers = make_layers(windows, 1, has_drafter)
    config = SchedulerConfig(
        max_num_batched_tokens=rng.choice([3, 8, 33, 200]),
        max_num_seqs=rng.choice([4, 20]),
        max_model_len=MAX_MODEL_LEN,
        policy=rng.choice(["fcfs", "priority"]),
        num_stages=num_stages,
        max_num_in_flight=depth,
        drafts=((2, drafts), (rng.choice([3, 100]), max(0, drafts - 1))) if drafts else (),
        num_lookahead_tokens=drafts if any(layer.is_draft for layer in layers) else 0,
    )
    # The smallest pool is what one request needs according to planning: less would be refused at start.
    in_flight = depth * config.max_num_batched_tokens + config.num_lookahead_tokens
    groups = cache_config(layers, 2, BLOCK_SIZE, NUM_HEADS).groups
    smallest = 1 + blocks_for_one_request(groups, BLOCK_SIZE, MAX_MODEL_LEN, in_flight)
    cache = cache_config(layers, smallest + rng.choice([0, 0, 3, 40]), BLOCK_SIZE, NUM_HEADS)
    recorder = StepKVEventRecorder(cache) if publisher else KVEventRecorder()
    kv = KVCacheManager(cache, rng.random() < 0.7, recorder)
    scheduler = Scheduler(config, kv)
    ranks = RankConfig(
        layers=layers,
        acceptance=rng.choice([0.0, 0.5, 0.9, 1.0]),
        tells_gaps=rng.random() < 0.5,
        runs_ahead=rng.random() < 0.5,
    )
    devices = Devices(ranks, Answers(layers), rng)
    executor = make_executor(devices, {(0, 0): NullWorkerConnector()})
    executor.load()
    executor.initialize(InitializeWorker(cache=cache, limits=config))
    core = EngineCore(scheduler, executor, depth, publisher, debug=True, reports_kv_events=reports_kv_events)
    return core, devices


def make_request(rng: random.Random, number: int, stems: list[list[int]], answers: Answers) -> EngineRequest:
    stem = rng.choice(stems)[: rng.randrange(0, 40)]
    prompt = (stem + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 20))])[:60]
    max_tokens = rng.randrange(1, MAX_MODEL_LEN - len(prompt))
    output = answers.of(tuple(prompt)).output(max_tokens)
    return EngineRequest(
        request_id=f"r{number % 40}" if rng.random() < 0.1 else f"u{number}",
        prompt_token_ids=tuple(prompt),
        sampling_params=SamplingParams(
            temperature=0.0, max_tokens=max_tokens, num_speculative_tokens=rng.choice([None, None, None, 0, 2])
        ),
        max_tokens=max_tokens,
        seed=0,
        stop_token_ids=frozenset([rng.choice(output)]) if rng.random() < 0.3 else frozenset(),
        priority=rng.randrange(3),
        cache_salt=rng.choice([None, None, "a", "b"]),
    )


def expected(request: EngineRequest, answers: Answers) -> list[int]:
    tokens = answers.of(request.prompt_token_ids).output(request.max_tokens)
    stops = [i for i, token in enumerate(tokens) if token in request.stop_token_ids]
    return tokens[: stops[0] + 1] if stops else tokens


@pytest.mark.spread(2)
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("windows", [(0,), (6,), (0, 9)], ids=["full", "sliding", "hybrid"])
def test_storm(windows: tuple[int, ...], depth: int) -> None:
    preemptions = hits = 0
    for seed in range(20):
        rng = random.Random(f"{seed} {windows} {depth}")
        core, devices = make_core(rng, windows, depth)
        run_storm(rng, core, devices)
        stats = core.stats()
        preemptions += stats.num_preemptions
        hits += stats.prefix_cache_hits
    assert preemptions > 20, "the pools were meant to be too small"
    assert hits > 100, "the prompts were meant to share prefixes"


@pytest.mark.spread(1)
@pytest.mark.parametrize(("num_stages", "depth"), [(2, 2), (2, 3), (3, 3), (3, 4)])
@pytest.mark.parametrize("drafts", [0, 3])
def test_storm_with_micro_batches(num_stages: int, depth: int, drafts: int) -> None:
    preemptions = num_overlapped = 0
    for seed in range(6):
        rng = random.Random(f"{seed} {num_stages} {depth} {drafts}")
        core, devices = make_core(rng, (0,), depth, drafts, num_stages=num_stages)
        run_storm(rng, core, devices)
        preemptions += core.stats().num_preemptions
        num_overlapped += devices.max_ahead > 0
    assert preemptions > 5
    assert (num_overlapped > 0) == (drafts > 0 and depth > num_stages), "only asynchronous steps run ahead of tokens"


@pytest.mark.spread(1)
@pytest.mark.parametrize(("windows", "depth", "drafts"), grid([(0,), (0, 9)], (1, 2, 3), (1, 3, 5)))
def test_storm_with_drafts(windows: tuple[int, ...], depth: int, drafts: int) -> None:
    preemptions = num_draft_tokens = num_accepted = ahead = num_steps = 0
    for seed in range(10):
        rng = random.Random(f"{seed} {windows} {depth} {drafts}")
        core, devices = make_core(rng, windows, depth, drafts)
        num_steps += run_storm(rng, core, devices)
        stats = core.stats()
        preemptions += stats.num_preemptions
        num_draft_tokens += stats.speculation.num_draft_tokens
        num_accepted += stats.speculation.num_accepted_tokens
        ahead = max(ahead, devices.max_ahead)
    assert num_steps > 1000
    assert preemptions > 10
    assert 100 < num_accepted < num_draft_tokens
    assert ahead == 0 if depth == 1 else ahead > 0, "rejections were meant to happen before the scheduler knows of them"


def run_storm(rng: random.Random, core: EngineCore, devices: Devices) -> int:
    """Runs 25 requests to their ends; returns how many steps it took. The rank checks the counts at each step."""
    stems = [[rng.randrange(VOCAB_SIZE) for _ in range(40)] for _ in range(3)]
    live: dict[str, tuple[EngineRequest, list[int]]] = {}
    num_added, num_left, num_steps = 0, 25, 0
    while num_steps < 5000:
        num_steps += 1
        if num_left and rng.random() < 0.3:
            request = make_request(rng, num_added, stems, devices.answers)
            num_added += 1
            if request.request_id not in live:
                core.add_request(request)
                live[request.request_id] = (request, [])
                num_left -= 1
        if live and rng.random() < 0.03:
            victim = rng.choice(sorted(live))
            (output,) = core.abort_requests([victim])
            assert output.finish_reason is FinishReason.ABORT
            del live[victim]
        for output in core.step().outputs:
            request, tokens = live[output.request_id]
            tokens.extend(output.new_token_ids)
            if output.finish_reason is not None:
                assert tokens == expected(request, devices.answers)
                del live[output.request_id]
        if not live and not num_left:
            break
    assert not live, f"{len(live)} requests never ended"
    while core.has_work or core.has_rows_to_free:
        core.step()
    assert not devices.ranks[0, 0].rows, "rows were left behind"
    core.check_integrity()
    return num_steps
