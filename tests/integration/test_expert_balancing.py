"""Experts that move between the ranks of a running engine: what is counted, what is refused, and a rank that dies."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import LLM, ConfigError, EngineDeadError, SamplingParams
from penstock.config.engine import EngineArgs, resolve
from penstock.executor.factory import make_executor
from tests.integration.checkpoints import COMMON, make_checkpoint, make_mtp_checkpoint
from tests.integration.server_probes import is_gone
from tests.integration.test_rank_deaths import children, rank_memory_mappings
from tests.integration.timing import check_seconds, kill_soon, retried_when_slow

ALWAYS = {"window_size": 1, "step_interval": 1}
OPTIONS: dict[str, Any] = {
    "max_model_len": 512,
    "num_gpu_blocks_override": 200,
    "num_threads": 1,
    "skip_tokenizer_init": True,
    "tensor_parallel_size": 2,
    "enable_expert_parallel": True,
    "enable_eplb": True,
    "eplb_config": ALWAYS,
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint("deepseek-v2", folder, torch.bfloat16)
    return folder / "deepseek-v2"


def prompts(count: int = 8) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(COMMON["vocab_size"], (20,), generator=generator).tolist() for _ in range(count)]


def generate(llm: LLM, max_tokens: int) -> list[list[int]]:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0)
    return [each.outputs[0].token_ids for each in llm.generate(prompts(), params, use_tqdm=False)]


@pytest.mark.spread(1)
@pytest.mark.alone
@retried_when_slow
def test_a_rank_that_dies_while_experts_move_ends_the_engine(path: Path) -> None:
    """vllm#39942. Plans are made in every step, so that there are always moves."""
    before, mapped = set(children(os.getpid())), rank_memory_mappings()
    llm = LLM(str(path), **OPTIONS)
    pids = sorted(set(children(os.getpid())) - before)
    assert len(pids) == 2
    generate(llm, 40)
    assert llm.stats().experts.num_moved > 4
    since_killed = kill_soon(pids[1])
    with pytest.raises(EngineDeadError, match=r"worker \(0, 1\) was killed by signal 9") as raised:
        generate(llm, 480)
    seconds = since_killed()
    llm.shutdown()
    assert all(is_gone(pid) for pid in pids)
    del llm, raised
    assert rank_memory_mappings() == mapped
    check_seconds(seconds, 1.0)


def test_a_module_for_drafts_is_balanced_apart(tmp_path: Path) -> None:
    make_mtp_checkpoint("deepseek-v3", tmp_path, torch.bfloat16)
    mtp = {"method": "mtp", "num_speculative_tokens": 2}
    common = {**OPTIONS, "distributed_executor_backend": "uniproc"}
    plain = LLM(str(tmp_path / "deepseek-v3"), **{**common, "enable_eplb": False, "eplb_config": None})
    wanted = generate(plain, 30)
    plain.shutdown()
    llm = LLM(str(tmp_path / "deepseek-v3"), speculative_config=mtp, **common)
    balancer = llm._core._scheduler.experts
    # Nothing of the warm-up is left.
    assert not any(loads.any() for loads in balancer._loads.values())
    assert generate(llm, 30) == wanted
    llm.check_integrity()
    placements = list(balancer._placements.values())
    llm.shutdown()
    # The first of three layers is dense, and the module has a layer.
    assert [name.rsplit(".", 2)[1] for name in balancer._placements] == ["1", "2", "3"]
    assert len(set(placements)) == 3
    assert balancer.stats().num_moved > 10


@pytest.mark.long
def test_a_pooling_engine_balances_too(path: Path) -> None:
    common = {**OPTIONS, "runner": "pooling", "pooler_config": {"pooling_type": "LAST"}}
    plain = LLM(str(path), **{**common, "enable_eplb": False, "eplb_config": None})
    wanted = [each.outputs.embedding for each in plain.embed(prompts(), use_tqdm=False)]
    plain.shutdown()
    llm = LLM(str(path), **{**common, "pipeline_parallel_size": 2, "max_num_batched_tokens": 24})
    for _ in range(2):
        assert [each.outputs.embedding for each in llm.embed(prompts(), use_tqdm=False)] == wanted
    stats = llm.stats().experts
    llm.shutdown()
    assert stats.num_moved > 0
    assert 0 < stats.balancedness <= 1


def test_experts_that_are_rounded_when_they_are_read_move(path: Path) -> None:
    """With their scales, and their inputs are rounded too."""
    common = {**OPTIONS, "distributed_executor_backend": "uniproc", "quantization": "int4"}
    alone: dict[str, Any] = {"enable_eplb": False, "eplb_config": None}
    found: list[list[list[int]]] = []
    for changes in (alone, {**alone, "quantize_activations": "int8"}, {"quantize_activations": "int8"}):
        llm = LLM(str(path), **{**common, **changes})
        found.append(generate(llm, 30))
        num_moved = llm.stats().experts.num_moved
        llm.check_integrity()
        llm.shutdown()
    assert num_moved > 4
    assert found[0] != found[1] == found[2]


def test_ranks_without_common_memory_are_refused(path: Path) -> None:
    executor = make_executor(resolve(EngineArgs(model=str(path), device="cpu", **OPTIONS)), shares_memory=False)
    try:
        with pytest.raises(ConfigError, match="enable_eplb needs ranks on one host that share memory"):
            executor.load()
    finally:
        executor.shutdown()
