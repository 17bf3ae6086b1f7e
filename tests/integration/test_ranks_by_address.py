"""Ranks on CPUs that connect as on GPUs: processes that meet at an address and use gloo instead of NCCL."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import pytest

from penstock import LLM, EngineDeadError, SamplingParams
from penstock.engine import build
from penstock.executor import factory
from tests.integration.server_probes import is_gone
from tests.integration.test_identity_matrix import run
from tests.integration.test_rank_deaths import SMALL, children
from tests.integration.timing import check_seconds, kill_soon, retried_when_slow

COUNT = 12
DRAFTS = {"method": "mtp", "num_speculative_tokens": 2}


@pytest.fixture(autouse=True)
def by_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "make_executor", partial(factory.make_executor, shares_memory=False))
    monkeypatch.delattr(factory, "create_rank_memory")


def ranks(pp: int, tp: int) -> dict[str, Any]:
    return {"pipeline_parallel_size": pp, "tensor_parallel_size": tp, "device": "cpu"}


@pytest.mark.spread(2)
@pytest.mark.parametrize(("pp", "tp", "overlap"), [(1, 2, False), (1, 3, False), (2, 1, True), (2, 2, True)])
def test_the_tokens_are_those_of_one_rank(pp: int, tp: int, overlap: bool) -> None:
    options: dict[str, Any] = {"count": COUNT, "max_num_batched_tokens": 64, "speculative_config": DRAFTS}
    expected, _ = run(**options)
    tokens, llm = run(async_scheduling=overlap, **ranks(pp, tp), **options)
    assert tokens == expected
    assert llm.stats().speculation.num_accepted_tokens > 0


@pytest.mark.spread(1)
@pytest.mark.alone
@pytest.mark.parametrize(("pp", "tp", "victim"), [(1, 2, 1), (2, 2, 0), (1, 2, 0)])
@retried_when_slow
def test_a_killed_rank_ends_every_request_and_every_rank(pp: int, tp: int, victim: int) -> None:
    before = set(children(os.getpid()))
    llm = LLM(**ranks(pp, tp), **SMALL)
    pids = sorted(set(children(os.getpid())) - before)
    assert len(pids) == pp * tp
    since_killed = kill_soon(pids[victim])
    endless = SamplingParams(max_tokens=480, ignore_eos=True)
    with pytest.raises(EngineDeadError, match=rf"worker \({victim // tp}, {victim % tp}\) was killed by signal 9"):
        llm.generate(["Once upon a time"] * 8, endless, use_tqdm=False)
    seconds = since_killed()
    llm.shutdown()
    assert all(is_gone(pid) for pid in pids)
    check_seconds(seconds, 3.0)
