"""Promise P4 for mixtures of experts: a token goes to the same experts, with the same bits, however it is scheduled.

Every cell compares with the plain run of `test_identity_matrix`, on random checkpoints: one request at a time, whole
prompts, no cache, no overlap, one rank.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from penstock.config.model_path import resolve_model_path
from penstock.messages.outputs import RequestOutput
from tests.grids import grid
from tests.integration.checkpoints import make_encoder_checkpoint
from tests.integration.test_disaggregation import complete, disaggregated, engine, pair
from tests.integration.test_disaggregation import requests as disaggregated_requests
from tests.integration.test_identity_matrix import CELLS, SMALL_POOL, run
from tests.integration.test_identity_ranks import answers, offloading, ranks

COUNT = 16
FAMILIES = ("qwen3-moe", "mixtral")
RANKS = ((2, 1), (4, 1), (3, 1), (1, 2), (2, 2))
DEMO = resolve_model_path("demo")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Family -> arguments of an engine with a random model that has the built-in model's tokens."""
    vocab_size = json.loads((DEMO / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    folder = tmp_path_factory.mktemp("models")

    def make(name: str) -> Path:
        return make_encoder_checkpoint(
            name, folder, torch.bfloat16, transformers.AutoModelForCausalLM, vocab_size=vocab_size
        )

    return {name: {"model": str(make(name)), "tokenizer": str(DEMO)} for name in FAMILIES}


@pytest.fixture(scope="module")
def plain_tokens(models: dict[str, dict[str, Any]]) -> dict[str, list[list[int]]]:
    found = {name: run(one_by_one=True, count=COUNT, **model)[0] for name, model in models.items()}
    assert all(len({tuple(each) for each in tokens}) > COUNT // 2 for tokens in found.values())
    return found


@pytest.mark.spread(2)
@pytest.mark.parametrize(("name", "overlap", "chunk"), grid(FAMILIES, (False, True), (16, 64, 4096), strength=1))
def test_batches_and_chunks(models: Any, plain_tokens: Any, name: str, overlap: bool, chunk: int) -> None:
    tokens, _ = run(count=COUNT, async_scheduling=overlap, max_num_batched_tokens=chunk, **models[name])
    assert tokens == plain_tokens[name]


@pytest.mark.spread(1)
@pytest.mark.parametrize(("overlap", "chunk"), CELLS)
def test_preemption_and_prefix_hits(models: Any, plain_tokens: Any, overlap: bool, chunk: int) -> None:
    tokens, llm = run(
        count=COUNT,
        repeat=2,
        async_scheduling=overlap,
        max_num_batched_tokens=chunk,
        enable_prefix_caching=True,
        **SMALL_POOL,
        **models["qwen3-moe"],
    )
    assert llm.stats().num_preemptions > 0
    assert llm.stats().prefix_cache_hits > 0
    assert tokens == plain_tokens["qwen3-moe"]


@pytest.mark.spread(1)
@pytest.mark.parametrize("num_drafts", [1, 4])
def test_drafts(models: Any, plain_tokens: Any, num_drafts: int) -> None:
    tokens, llm = run(
        count=COUNT,
        async_scheduling=True,
        max_num_batched_tokens=64,
        speculative_config={"method": "ngram", "num_speculative_tokens": num_drafts},
        **models["qwen3-moe"],
    )
    assert tokens == plain_tokens["qwen3-moe"]
    assert llm.stats().speculation.num_draft_tokens > 0


@pytest.mark.spread(1)
@pytest.mark.parametrize(("size", "overlap"), [((1, 1), True), ((2, 1), False)])
def test_tiers(models: Any, plain_tokens: Any, size: tuple[int, int], overlap: bool) -> None:
    tokens, llm = run(
        count=COUNT,
        repeat=2,
        async_scheduling=overlap,
        max_num_batched_tokens=48,
        enable_prefix_caching=True,
        kv_transfer_config=offloading(),
        **SMALL_POOL,
        **models["qwen3-moe"],
        **ranks(*size),
    )
    assert tokens == plain_tokens["qwen3-moe"]
    assert llm.stats().num_preemptions > 0
    assert llm.stats().remote_kv.num_tokens > 0


@pytest.mark.spread(2)
@pytest.mark.parametrize(("name", "size", "overlap"), grid(FAMILIES, RANKS, (False, True), strength=1))
def test_ranks(models: Any, plain_tokens: Any, name: str, size: tuple[int, int], overlap: bool) -> None:
    tokens, _ = run(count=COUNT, async_scheduling=overlap, max_num_batched_tokens=48, **models[name], **ranks(*size))
    assert tokens == plain_tokens[name]


@pytest.mark.long
def test_ranks_in_processes(models: Any, plain_tokens: Any) -> None:
    arguments = {**ranks(2, 2), "distributed_executor_backend": None}
    tokens, _ = run(count=COUNT, async_scheduling=True, max_num_batched_tokens=48, **models["qwen3-moe"], **arguments)
    assert tokens == plain_tokens["qwen3-moe"]


@pytest.fixture(scope="module")
def plain_answers(models: dict[str, dict[str, Any]]) -> list[RequestOutput]:
    return answers(**models["qwen3-moe"])


@pytest.mark.spread(1)
@pytest.mark.parametrize("arguments", [ranks(2, 1), ranks(2, 2), {"max_num_batched_tokens": 20}])
def test_log_probabilities(models: Any, plain_answers: list[RequestOutput], arguments: dict[str, Any]) -> None:
    found = answers(**models["qwen3-moe"], **arguments)
    for one, other in zip(plain_answers, found, strict=True):
        assert one.outputs[0].logprobs == other.outputs[0].logprobs
        assert one.prompt_logprobs == other.prompt_logprobs


@pytest.mark.spread(1)
@pytest.mark.parametrize("transport", ["shared_memory", "sockets"])
def test_disaggregation(models: Any, transport: str) -> None:
    model = models["qwen3-moe"]
    with engine(**model) as alone:
        expected = [complete(alone, *request).outputs[0].token_ids for request in disaggregated_requests()]
    with pair(transport, **model) as (prefill, decode):
        found = [disaggregated(prefill, decode, *request).outputs[0].token_ids for request in disaggregated_requests()]
        assert decode.stats().remote_kv.num_tokens > 0
    assert found == expected
