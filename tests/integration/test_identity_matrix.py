"""Promise P4: nothing that an engine does to go faster changes a token.

Every cell runs the same requests on the built-in model and compares with the plain run: one request at a time, whole
prompts, no cache, no overlap. A feature that schedules, moves or reuses KV adds its row here.
"""

from __future__ import annotations

from typing import Any

import pytest

from penstock import LLM, SamplingParams
from penstock.kernels import native
from tests.grids import grid

NUM_REQUESTS = 64
MAX_TOKENS = 24
MAX_MODEL_LEN = 384

PLAIN: dict[str, Any] = {
    "max_model_len": MAX_MODEL_LEN,
    "max_num_batched_tokens": 4096,
    "enable_prefix_caching": False,
    "async_scheduling": False,
    "num_gpu_blocks_override": 1500,
}
CELLS = grid((False, True), (16, 64, 4096), strength=1)
# One request of max_model_len fits, the batch does not.
SMALL_POOL = {"num_gpu_blocks_override": MAX_MODEL_LEN // 16 + 2}


def requests() -> list[tuple[str, SamplingParams]]:
    """Returns stories, facts and sums of many lengths; a third greedy, the others seeded; many share a prefix."""
    fact = "Remember this. The key of Anna is in the red box. The key of Ben is under the old bridge. "
    openings = ("Once upon a time there was a fox", fact + "Where is the key of Ben?", "What is 12 + 30?", fact * 3)
    made = []
    for number in range(NUM_REQUESTS):
        text = openings[number % 4] + f" {number}" * (number % 7) + openings[number % 3] * (number % 5)
        temperature = 0.0 if number % 3 == 0 else 0.6 + 0.1 * (number % 5)
        params = SamplingParams(
            temperature=temperature,
            top_p=0.95 if number % 2 else 1.0,
            top_k=40 if number % 4 == 0 else 0,
            repetition_penalty=1.1 if number % 5 == 0 else 1.0,
            seed=number,
            max_tokens=MAX_TOKENS,
            ignore_eos=True,
        )
        made.append((text, params))
    return made


def run(
    one_by_one: bool = False, repeat: int = 1, count: int = NUM_REQUESTS, **engine_args: Any
) -> tuple[list[list[int]], LLM]:
    """Returns the tokens of the first `count` requests. `repeat` runs the batch again on the cache of the first run."""
    llm = LLM(**{**PLAIN, **engine_args})
    prompts, params = zip(*requests()[:count], strict=True)
    outputs = []
    for _ in range(repeat):
        if one_by_one:
            outputs = [llm.generate(p, q, use_tqdm=False)[0] for p, q in requests()[:count]]
        else:
            outputs = llm.generate(list(prompts), list(params), use_tqdm=False)
        llm.check_integrity()
    llm.shutdown()
    return [output.outputs[0].token_ids for output in outputs], llm


@pytest.fixture(scope="module")
def plain_tokens() -> list[list[int]]:
    tokens, _ = run(one_by_one=True)
    assert all(len(each) == MAX_TOKENS for each in tokens)
    return tokens


@pytest.mark.spread(1)
@pytest.mark.parametrize(("overlap", "chunk"), CELLS)
def test_batch_of_64(plain_tokens: list[list[int]], overlap: bool, chunk: int) -> None:
    tokens, _ = run(async_scheduling=overlap, max_num_batched_tokens=chunk)
    assert tokens == plain_tokens


@pytest.mark.spread(1)
@pytest.mark.parametrize(("overlap", "chunk"), CELLS)
def test_preemption(plain_tokens: list[list[int]], overlap: bool, chunk: int) -> None:
    tokens, llm = run(async_scheduling=overlap, max_num_batched_tokens=chunk, **SMALL_POOL)
    assert llm.stats().num_preemptions > 0
    assert tokens == plain_tokens


@pytest.mark.spread(1)
@pytest.mark.parametrize(("overlap", "chunk"), CELLS)
def test_prefix_hits(plain_tokens: list[list[int]], overlap: bool, chunk: int) -> None:
    tokens, llm = run(repeat=2, async_scheduling=overlap, max_num_batched_tokens=chunk, enable_prefix_caching=True)
    assert llm.stats().prefix_cache_hits > 1000
    assert tokens == plain_tokens


@pytest.mark.spread(1)
@pytest.mark.parametrize("overlap", [False, True])
def test_prefix_hits_under_preemption(plain_tokens: list[list[int]], overlap: bool) -> None:
    tokens, llm = run(async_scheduling=overlap, max_num_batched_tokens=48, enable_prefix_caching=True, **SMALL_POOL)
    assert llm.stats().num_preemptions > 0
    assert llm.stats().prefix_cache_hits > 0
    assert tokens == plain_tokens


@pytest.mark.spread(1)
@pytest.mark.parametrize("overlap", [False, True])
def test_a_worker_in_its_own_process(plain_tokens: list[list[int]], overlap: bool) -> None:
    tokens, llm = run(
        distributed_executor_backend="mp",
        async_scheduling=overlap,
        max_num_batched_tokens=48,
        enable_prefix_caching=True,
        **SMALL_POOL,
    )
    assert llm.stats().num_preemptions > 0
    assert llm.stats().prefix_cache_hits > 0
    assert tokens == plain_tokens


def test_small_blocks(plain_tokens: list[list[int]]) -> None:
    tokens, _ = run(block_size=8, enable_prefix_caching=True, num_gpu_blocks_override=3000)
    assert tokens == plain_tokens


@pytest.mark.long
def test_reference_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a native library the bits differ, but they do not depend on other rows either."""
    monkeypatch.setenv("PENSTOCK_CPU_ISA", "torch")
    native.library.cache_clear()
    try:
        plain, _ = run(one_by_one=True, count=10)
        together, llm = run(count=10, max_num_batched_tokens=48, enable_prefix_caching=True, **SMALL_POOL)
    finally:
        native.library.cache_clear()
    assert llm.stats().num_preemptions > 0
    assert together == plain
