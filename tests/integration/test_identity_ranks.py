"""Promise P4 for ranks: dividing the model among them changes no token and no bit of a log probability.

Every cell compares with the plain run of `test_identity_matrix`, which one rank computes. Ranks are threads here
(`uniproc`); a few cells start processes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, ConfigError, SamplingParams, StructuredOutputsParams
from penstock.messages.outputs import RequestOutput
from tests.grids import exhaustive, grid
from tests.integration.test_identity_matrix import PLAIN, SMALL_POOL, requests, run
from tests.integration.test_identity_speculation import METHODS, config

COUNT = 22
RANKS = ((2, 1), (4, 1), (3, 1), (1, 2), (1, 3), (2, 2))


def offloading(**extra: Any) -> dict[str, Any]:
    return {
        "kv_connector": "OffloadingConnector",
        "kv_connector_extra_config": {"load_policy": "always", **extra},
    }


def ranks(tp: int, pp: int, backend: str = "uniproc") -> dict[str, Any]:
    return {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, "distributed_executor_backend": backend}


@pytest.fixture(scope="module")
def plain_tokens() -> list[list[int]]:
    tokens, _ = run(one_by_one=True, count=COUNT)
    return tokens


@pytest.mark.spread(1)
@pytest.mark.parametrize(("size", "overlap", "chunk"), grid(RANKS, (False, True), (16, 4096), strength=1))
def test_a_batch(plain_tokens: list[list[int]], size: tuple[int, int], overlap: bool, chunk: int) -> None:
    tokens, _ = run(count=COUNT, async_scheduling=overlap, max_num_batched_tokens=chunk, **ranks(*size))
    assert tokens == plain_tokens


@pytest.mark.spread(1)
@pytest.mark.parametrize(("size", "overlap"), grid(RANKS, (False, True), strength=1))
def test_prefix_hits_and_preemption(plain_tokens: list[list[int]], size: tuple[int, int], overlap: bool) -> None:
    tokens, llm = run(
        count=COUNT,
        repeat=2,
        async_scheduling=overlap,
        max_num_batched_tokens=48,
        enable_prefix_caching=True,
        **SMALL_POOL,
        **ranks(*size),
    )
    assert tokens == plain_tokens
    assert llm.stats().num_preemptions > 0
    assert llm.stats().prefix_cache_hits > 0


@pytest.mark.spread(2)
@pytest.mark.parametrize(("method", "size", "overlap"), grid(list(METHODS), RANKS, (False, True)))
def test_drafts(plain_tokens: list[list[int]], method: str, size: tuple[int, int], overlap: bool) -> None:
    tokens, llm = run(
        count=COUNT,
        async_scheduling=overlap,
        max_num_batched_tokens=64,
        speculative_config=config(method, 3),
        **ranks(*size),
    )
    assert tokens == plain_tokens
    speculation = llm.stats().speculation
    assert 0 < speculation.num_accepted_tokens < speculation.num_draft_tokens


@pytest.fixture(scope="module")
def plain_drafts() -> dict[str, int]:
    return {method: accepted(speculative_config=config(method, 3)) for method in METHODS}


def accepted(**arguments: Any) -> int:
    _, llm = run(count=COUNT, one_by_one=True, **arguments)
    return llm.stats().speculation.num_accepted_tokens


@pytest.mark.long
@pytest.mark.parametrize(("method", "size"), grid(list(METHODS), ((2, 1), (1, 2)), strength=1))
def test_the_same_number_of_drafts_is_accepted(
    plain_drafts: dict[str, int], method: str, size: tuple[int, int]
) -> None:
    assert accepted(speculative_config=config(method, 3), **ranks(*size)) == plain_drafts[method]


def answers(**arguments: Any) -> list[RequestOutput]:
    """Returns answers with log probabilities of prompts and outputs, and with grammars."""
    llm = LLM(**{**PLAIN, **arguments})
    prompts, params = zip(*requests()[:8], strict=True)
    grammar = StructuredOutputsParams(regex=r"[a-z]{3,9}-\d{2}")
    asked = [
        SamplingParams(
            temperature=each.temperature,
            seed=each.seed,
            max_tokens=each.max_tokens,
            logprobs=3,
            prompt_logprobs=2 if number % 2 else None,
            structured_outputs=grammar if number % 4 == 3 else None,
        )
        for number, each in enumerate(params)
    ]
    outputs = llm.generate(list(prompts), asked, use_tqdm=False)
    llm.shutdown()
    return outputs


@pytest.fixture(scope="module")
def plain_answers() -> list[RequestOutput]:
    return answers()


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("size", "arguments"),
    [
        ((2, 1), {}),
        ((1, 2), {}),
        ((2, 2), {"async_scheduling": True, "speculative_config": config("mtp", 2)}),
        exhaustive((4, 1), {"speculative_config": config("eagle3", 2)}),
        exhaustive((1, 3), {"async_scheduling": True}),
    ],
)
def test_log_probabilities_and_grammars(
    plain_answers: list[RequestOutput], size: tuple[int, int], arguments: dict[str, Any]
) -> None:
    found = answers(**arguments, **ranks(*size))
    for one, other in zip(plain_answers, found, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[0].logprobs == other.outputs[0].logprobs
        assert one.prompt_logprobs == other.prompt_logprobs


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("size", "overlap", "method"), [((2, 1), True, "mtp"), ((1, 2), False, "eagle3"), ((2, 2), True, "ngram")]
)
def test_ranks_in_processes(plain_tokens: list[list[int]], size: tuple[int, int], overlap: bool, method: str) -> None:
    tokens, llm = run(
        count=COUNT,
        repeat=2,
        async_scheduling=overlap,
        max_num_batched_tokens=48,
        enable_prefix_caching=True,
        speculative_config=config(method, 3),
        **{**ranks(*size), "distributed_executor_backend": None},
        **SMALL_POOL,
    )
    assert tokens == plain_tokens
    assert llm.stats().num_preemptions > 0
    assert llm.stats().prefix_cache_hits > 0


@pytest.mark.spread(1)
@pytest.mark.parametrize(("size", "overlap"), grid(RANKS, (False, True), strength=1))
def test_tiers(plain_tokens: list[list[int]], size: tuple[int, int], overlap: bool) -> None:
    tokens, llm = run(
        count=COUNT,
        repeat=2,
        async_scheduling=overlap,
        max_num_batched_tokens=48,
        enable_prefix_caching=True,
        speculative_config=config("mtp", 2),
        kv_transfer_config=offloading(),
        **SMALL_POOL,
        **ranks(*size),
    )
    assert tokens == plain_tokens
    assert llm.stats().num_preemptions > 0
    assert llm.stats().remote_kv.num_tokens > 0


@pytest.mark.long
@pytest.mark.parametrize(("writer", "reader"), [((2, 1), (1, 1)), ((1, 1), (1, 2)), ((1, 3), (4, 1)), ((2, 2), (3, 1))])
def test_kv_stored_by_some_ranks_is_loaded_by_others(
    plain_tokens: list[list[int]], writer: tuple[int, int], reader: tuple[int, int], tmp_path: Path
) -> None:
    for size, loads in ((writer, False), (reader, True)):
        tokens, llm = run(
            count=COUNT,
            enable_prefix_caching=True,
            speculative_config=config("mtp", 2),
            kv_transfer_config=offloading(disk_path=str(tmp_path)),
            **ranks(*size),
        )
        assert tokens == plain_tokens
        assert (llm.stats().remote_kv.num_tokens > 100) is loads


def test_uneven_layers(plain_tokens: list[list[int]]) -> None:
    tokens, _ = run(count=COUNT, pipeline_layers="1,4,1", **ranks(1, 3))
    assert tokens == plain_tokens


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tensor_parallel_size": 5}, "tensor_parallel_size=5 is more than the 4 attention heads of"),
        ({"pipeline_parallel_size": 7}, "pipeline_parallel_size=7 is more than the 6 layers of"),
        ({"pipeline_parallel_size": 2, "pipeline_layers": "3"}, "must be the number of layers of each of the 2 stages"),
        ({"pipeline_parallel_size": 2, "pipeline_layers": "3,x"}, "pipeline_layers must be the number of layers"),
        ({"pipeline_parallel_size": 2, "pipeline_layers": "3,2"}, "has 5 layers, and .* has 6"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be at least 1"),
    ],
)
def test_indivisible_models_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(**arguments)
