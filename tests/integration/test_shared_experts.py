"""Data parallel engines that share experts: each gives the tokens and log probabilities of an engine by itself, bit for
bit, whatever the other one does meanwhile. A step is made by all of them or fails in all of them.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from penstock import EngineDeadError, SamplingParams
from penstock.config.engine import EngineArgs, resolve
from penstock.core.expert_balancer import ExpertBalancer
from penstock.engine import engine_core
from penstock.engine.build import JointEngines, build_engines
from penstock.executor.factory import make_executor
from penstock.messages.requests import EngineRequest
from penstock.messages.scheduler_output import SchedulerOutput
from penstock.messages.structured_outputs import GrammarKind, GrammarSpec
from penstock.runner import shared_experts
from penstock.runner.shared_experts import SharedExpertStep
from tests.grids import grid
from tests.integration.raw_http import call, eventually
from tests.integration.server_probes import COMPLETIONS, is_gone
from tests.integration.server_process import serve
from tests.integration.test_data_parallel import by_engine
from tests.integration.test_disaggregation import complete, transfer_config
from tests.integration.test_identity_families import (
    EPLB,
    MTP,
    PLAIN,
    TIER,
    Answer,
    Families,
    answer,
    engine,
    families,
    models_with_text,
    requests,
)
from tests.integration.test_rank_deaths import children, rank_memory_mappings
from tests.integration.timing import check_seconds, kill_soon, retried_when_slow

__all__ = ["families", "models_with_text"]

SHARED: dict[str, Any] = {
    "data_parallel_size": 2,
    "enable_expert_parallel": True,
    "distributed_executor_backend": "uniproc",
    "num_threads": 1,
}
NUM_EXPERTS = {"qwen3-moe": 9, "deepseek-v3": 12}
CELLS: dict[str, dict[str, Any]] = {
    "chunks": {"max_num_batched_tokens": 24},
    "overlap": {"async_scheduling": True, "enable_prefix_caching": True},
    "preemption": {"num_gpu_blocks_override": 17, "max_num_batched_tokens": 48, "async_scheduling": True},
    "ranks": {"tensor_parallel_size": 2, "max_num_batched_tokens": 48, "async_scheduling": True},
    "balancing": {**EPLB, "async_scheduling": True, "max_num_batched_tokens": 48},
    "processes": {"distributed_executor_backend": "mp"},
}
LONG_CELLS: dict[str, dict[str, Any]] = {
    "stages": {"pipeline_parallel_size": 2, "async_scheduling": True, "max_num_batched_tokens": 48},
    "balanced ranks of stages": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, **EPLB},
    "three engines": {"data_parallel_size": 3, "async_scheduling": True},
    "a tier": {"kv_transfer_config": TIER, "enable_prefix_caching": True, "num_gpu_blocks_override": 17},
}
# Request number -> engine.
PLACES: dict[str, Callable[[int], int]] = {
    "both": lambda number: number % 2,
    "the first": lambda number: 0,
    "the second": lambda number: 1,
}


@dataclass
class Joint:
    """Engines that are stepped together, and the outputs of their requests."""

    engines: JointEngines
    token_ids: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    logprobs: dict[str, list[dict[int, float]]] = field(default_factory=dict[str, list[dict[int, float]]])
    transfer_params: dict[str, Any] = field(default_factory=dict[str, Any])
    pooled: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def cores(self) -> Sequence[engine_core.EngineCore]:
        return self.engines.cores.cores

    def add(self, name: str, engine: int, prompt: list[int], params: SamplingParams, **more: Any) -> None:
        number, seed = params.max_tokens or 16, params.seed or 0
        request = EngineRequest(
            request_id=name,
            prompt_token_ids=tuple(prompt),
            sampling_params=params,
            max_tokens=number,
            seed=seed,
            dp_rank=engine,
            **more,
        )
        self.cores[engine].add_request(request)

    def step(self) -> None:
        for report in self.engines.cores.step():
            for output in report.outputs:
                assert output.error is None, output.error
                self.token_ids.setdefault(output.request_id, []).extend(output.new_token_ids)
                found = [dict(zip(each.token_ids, each.logprobs, strict=True)) for each in output.logprobs or ()]
                self.logprobs.setdefault(output.request_id, []).extend(found)
                if output.pooled is not None:
                    self.pooled[output.request_id] = output.pooled
                if output.kv_transfer_params is not None:
                    self.transfer_params[output.request_id] = output.kv_transfer_params

    def finish(self) -> None:
        while any(core.has_work for core in self.cores):
            self.step()

    def answers(self, place: Callable[[int], int], steps_between: int) -> list[Answer]:
        """Answers the requests, which arrive one after another."""
        self.token_ids.clear()
        self.logprobs.clear()
        for number, (prompt, params) in enumerate(requests()):
            self.add(str(number), place(number), prompt, params)
            for _ in range(steps_between):
                self.step()
        self.finish()
        for core in self.cores:
            core.check_integrity()
        return [(self.token_ids[str(number)], self.logprobs[str(number)]) for number in range(len(requests()))]


@contextmanager
def joint(path: Path, **arguments: Any) -> Iterator[Joint]:
    engines = build_engines(resolve(EngineArgs(model=str(path), **{**PLAIN, **SHARED, **arguments})))
    try:
        yield Joint(engines)
    finally:
        engines.cores.shutdown()


def arguments_of(name: str, cell: str) -> dict[str, Any]:
    """Adds the module of a model that has one, and the redundant experts that the number of ranks needs."""
    arguments = {**CELLS, **LONG_CELLS}[cell]
    ranks = arguments.get("data_parallel_size", 2) * arguments.get("tensor_parallel_size", 1)
    if -NUM_EXPERTS[name] % ranks or "enable_eplb" in arguments:
        eplb = {"num_redundant_experts": -NUM_EXPERTS[name] % ranks, "window_size": 4, "step_interval": 3}
        arguments = {**arguments, **EPLB, "eplb_config": eplb}
    return arguments if name == "qwen3-moe" else {**arguments, "speculative_config": MTP}


@pytest.mark.parametrize(
    ("name", "cell"),
    grid(list(NUM_EXPERTS), list(CELLS), strength=1, others=pytest.mark.long)
    + [pytest.param(name, cell, marks=pytest.mark.long) for name in NUM_EXPERTS for cell in LONG_CELLS],
)
def test_tokens_are_those_of_an_engine_by_itself(families: Families, name: str, cell: str) -> None:
    arguments = arguments_of(name, cell)
    with joint(families.path(name), **arguments) as engines:
        for steps_between, place in enumerate(PLACES.values()):
            assert engines.answers(place, steps_between) == families.expected(name)
        stats = [core.stats() for core in engines.cores]
        balancer = engines.cores[0]._scheduler.experts
    if cell == "balancing":
        # All ranks have copied their experts and switched.
        assert balancer._parallel is not None
        assert set(balancer._placements.values()) != {balancer._parallel.initial_placement()}
    if cell == "preemption":
        assert all(each.num_preemptions > 0 for each in stats)
    if "enable_eplb" in arguments:
        # The first engine's scheduler balances, also while only the second one has requests.
        assert stats[0].experts.num_moved > 0
        assert stats[1].experts.num_moved == 0
    if cell == "a tier":
        assert all(each.connector["num_loads"] > 0 for each in stats)


def test_experts_that_are_rounded_when_they_are_read(tmp_path: Path) -> None:
    """Their inputs are rounded too."""
    rounded = Families(tmp_path, {"quantization": "int4", "quantize_activations": "int8"})
    with joint(rounded.path("deepseek-v3"), **rounded.arguments, **arguments_of("deepseek-v3", "balancing")) as engines:
        assert engines.answers(PLACES["both"], 1) == rounded.expected("deepseek-v3")
        assert engines.cores[0].stats().experts.num_moved > 0


def test_the_load_of_all_engines_is_counted(families: Families, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one engine is idle, its experts' load comes from the other: every choice of every pass is counted once."""
    counted: list[int] = []
    record = ExpertBalancer._record

    def record_too(self: ExpertBalancer, loads: Any) -> None:
        counted.append(sum(int(load.sum()) for name, load in loads.items()))
        record(self, loads)

    monkeypatch.setattr(ExpertBalancer, "_record", record_too)
    eplb = {**EPLB, "eplb_config": {"step_interval": 1000}}
    prompt, params = requests()[1]
    for place in ((1,), (0, 1), (0,)):
        counted.clear()
        with joint(families.path("deepseek-v3"), **eplb) as engines:
            for rank in place:
                engines.add(str(rank), rank, prompt, replace(params, max_tokens=2))
            engines.finish()
        # Two of three layers are sparse, with three choices of each token.
        assert counted == [6 * len(place) * len(prompt), 6 * len(place)], place


@pytest.mark.parametrize("overlap", [False, True])
def test_engines_with_different_passes(families: Families, overlap: bool) -> None:
    """One engine drafts while the other one computes chunks of a long prompt, or drafts for another number of requests
    or with another number of drafts.
    """
    drafts = {**MTP, "num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": {"1": 3, "8": 1}}
    options = {"async_scheduling": overlap, "max_num_batched_tokens": 16, "speculative_config": drafts}
    with joint(families.path("deepseek-v3"), **options) as engines:
        for number, (prompt, params) in enumerate(requests()):
            engines.add(str(number), min(number, 1), prompt, params)
            for _ in range(number % 3):
                engines.step()
        engines.finish()
        found = [(engines.token_ids[str(number)], engines.logprobs[str(number)]) for number in range(6)]
    assert found == families.expected("deepseek-v3")


@pytest.mark.parametrize("overlap", [False, True])
def test_grammars_in_one_engine(models_with_text: dict[str, dict[str, Any]], overlap: bool) -> None:
    """A step waits for earlier results of all engines if one of them needs these for its grammar."""
    model = models_with_text["deepseek-v2"]
    tokenizer = {"tokenizer": model["tokenizer"], "skip_tokenizer_init": False, "async_scheduling": overlap}
    spec = GrammarSpec(GrammarKind.REGEX, r"[a-z]{3,9}-\d{2}")
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=3, logprobs=2)
    found: list[Any] = []
    for size in (1, 2):
        options = {**tokenizer, "data_parallel_size": size}
        with joint(Path(model["model"]), **options) as engines:
            for number in range(4):
                grammar = {"grammar": spec} if number % 2 else {}
                engines.add(str(number), number % 2 % size, [5 + number] * 9, params, **grammar)
            engines.finish()
            found.append((engines.token_ids, engines.logprobs))
    assert found[0] == found[1]


def test_vectors_of_a_pooling_engine(families: Families) -> None:
    found: list[dict[str, list[float]]] = []
    for size in (1, 2):
        options = {"runner": "pooling", "pooler_config": {"pooling_type": "LAST"}, "max_num_batched_tokens": 24}
        with joint(families.path("deepseek-v3"), **options, data_parallel_size=size) as engines:
            for number, (prompt, _) in enumerate(requests()):
                # The second engine has the longest prompts.
                engines.add(str(number), (number > 2) % size, prompt, SamplingParams(max_tokens=1))
            engines.finish()
            found.append({name: vector.tolist() for name, vector in engines.pooled.items()})
    assert found[0] == found[1]
    assert len(found[0]) == len(requests())


def test_an_aborted_request_leaves_its_engine_running_along(families: Families) -> None:
    with joint(families.path("deepseek-v3"), speculative_config=MTP, async_scheduling=True) as engines:
        (first, params), (second, other) = requests()[:2]
        engines.add("0", 0, first, params)
        engines.add("1", 1, second, other)
        for _ in range(4):
            engines.step()
        engines.cores[0].abort_requests(["0"])
        engines.finish()
        assert engines.token_ids["1"] == families.expected("deepseek-v3")[1][0]
        assert engines.cores[0].reset_prefix_cache()


# ---- What goes wrong ----


def omit_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine without tokens does not run along."""
    monkeypatch.setattr(shared_experts, "_run_along", lambda layers: None)


def omit_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs along with the model, but not with the module for drafts."""

    def end(self: SharedExpertStep) -> Any:
        self._ranks.barrier()
        return self._inner.end()

    monkeypatch.setattr(SharedExpertStep, "end", end)


def omit_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The core does not tell the second engine that the first one has rows."""
    plan_together = engine_core._plan_together

    def plan(cores: Any) -> list[SchedulerOutput]:
        plans = plan_together(cores)
        return [*plans[:1], *(replaced(each, rows_by_engine=()) for each in plans[1:])]

    monkeypatch.setattr(engine_core, "_plan_together", plan)


def miscount_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The core expects one row too many of the first engine."""
    row_counts = SchedulerOutput.row_counts.fget
    assert row_counts is not None
    more = lambda plan: replaced(row_counts(plan), num_tokens=plan.total_num_scheduled_tokens + 1)  # noqa: E731
    monkeypatch.setattr(SchedulerOutput, "row_counts", property(more))


def replaced(message: Any, **changes: Any) -> Any:
    return engine_core.replace(message, **changes)


@pytest.mark.uniproc
@pytest.mark.timeout(60)
@pytest.mark.parametrize("bug", [omit_passes, omit_drafts, omit_rows, miscount_rows], ids=lambda bug: bug.__name__)
def test_an_engine_out_of_step_ends_the_step(
    families: Families, monkeypatch: pytest.MonkeyPatch, bug: Callable[[pytest.MonkeyPatch], None]
) -> None:
    """It is noticed at once: nothing waits for a pass that another engine does not make."""
    prompt, params = requests()[1]
    with joint(families.path("deepseek-v3"), speculative_config=MTP) as engines:
        engines.add("0", 0, prompt, params)
        engines.step()
        bug(monkeypatch)
        with pytest.raises(EngineDeadError, match=r"AssertionError|another rank of this engine has ended"):
            engines.finish()
        for core in engines.cores:
            with pytest.raises(EngineDeadError):
                core.step()


@pytest.mark.alone
@retried_when_slow
def test_a_rank_that_dies_ends_all_engines(families: Families) -> None:
    before, mapped = set(children(os.getpid())), rank_memory_mappings()
    options = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", "max_model_len": 512}
    with joint(families.path("deepseek-v3"), **{**options, "num_gpu_blocks_override": 200}) as engines:
        pids = sorted(set(children(os.getpid())) - before)
        assert len(pids) == 4
        prompt, params = requests()[0]
        # Only the first engine has work, and a rank of the other one dies.
        engines.add("0", 0, prompt, replace(params, max_tokens=480))
        engines.step()
        since_killed = kill_soon(pids[3])
        with pytest.raises(EngineDeadError, match=r"worker \(0, 1\) of engine 1 was killed by signal 9"):
            engines.finish()
        seconds = since_killed()
    assert all(is_gone(pid) for pid in pids)
    del engines
    assert rank_memory_mappings() == mapped
    check_seconds(seconds, 1.0)


# ---- Ranks that connect by address, and KV that leaves an engine ----


@pytest.mark.long
def test_ranks_that_meet_at_an_address(families: Families, monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.engine import build

    monkeypatch.setattr(build, "make_executor", partial(make_executor, shares_memory=False))
    options = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", "speculative_config": MTP}
    with joint(families.path("deepseek-v3"), **options) as engines:
        assert engines.answers(PLACES["both"], 1) == families.expected("deepseek-v3")


@contextmanager
def serving_others(engines: Joint) -> Iterator[None]:
    """Makes steps on a thread, by which other engines read the KV of these ones."""
    is_over = threading.Event()

    def serve() -> None:
        while not is_over.wait(0.002):
            if any(core.has_transfers for core in engines.cores):
                engines.step()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def test_prompts_of_both_engines_are_answered_by_another(families: Families) -> None:
    path, common = families.path("deepseek-v3"), {"enable_prefix_caching": True, "speculative_config": MTP}
    decode = engine(path, **common, kv_transfer_config=transfer_config("kv_consumer"))
    with joint(path, **common, kv_transfer_config=transfer_config("kv_producer")) as engines:
        for number, (prompt, params) in enumerate(requests()[:4]):
            asked = replace(params, max_tokens=1, kv_transfer_params={"do_remote_decode": True})
            engines.add(str(number), number % 2, prompt, asked)
            engines.finish()
            handoff = json.loads(json.dumps(engines.transfer_params[str(number)]))
            with serving_others(engines):
                found = complete(decode, prompt, replace(params, kv_transfer_params=handoff))
            assert answer(found) == families.expected("deepseek-v3")[number]
            assert found.num_cached_tokens == (len(prompt) - 1) // 16 * 16
        assert engines.transfer_params["0"]["remote_engine_id"] != engines.transfer_params["1"]["remote_engine_id"]
    decode.shutdown()


# ---- The server ----


def test_the_header_chooses_an_engine_and_both_answer_alike(models_with_text: dict[str, dict[str, Any]]) -> None:
    model = models_with_text["qwen3-moe"]
    flags = (
        "--tokenizer",
        model["tokenizer"],
        "--max-model-len",
        "224",
        "--num-gpu-blocks-override",
        "50",
    )
    shared = ("--data-parallel-size", "2", "--enable-expert-parallel", "--enable-eplb", "--num-threads", "1")
    eplb = ("--eplb-config", '{"num_redundant_experts": 1}')
    body = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0, "logprobs": 2}
    with serve(model["model"], *flags, *shared, *eplb) as server:
        assert any("2 that share the experts" in line for line in server.log)
        found: list[Any] = []
        for rank in ("1", "0"):
            before = by_engine(server, "vllm:request_success_total")
            reply = call(server.url, "POST", COMPLETIONS, body, {"X-data-parallel-rank": rank})
            (choice,) = reply.json()["choices"]
            found.append((choice["text"], choice["logprobs"]["token_logprobs"]))
            after = by_engine(server, "vllm:request_success_total")
            assert {each: after[each] - before[each] for each in after} == {each: each == rank for each in ("0", "1")}
        assert found[0] == found[1]
        assert by_engine(server, "vllm:cache_config_info") == {"0": 1.0, "1": 1.0}
        assert call(server.url, "POST", COMPLETIONS, body, {"X-data-parallel-rank": "2"}).status == 400
        assert call(server.admin_url, "POST", "/reset_prefix_cache").status == 200
        assert call(server.admin_url, "POST", "/check_integrity").status == 200
        # One process has both engines.
        os.kill(server.core_pid, signal.SIGKILL)
        eventually(lambda: server.process.poll() is not None, 30)
        assert server.process.returncode == 1
