"""Drawn drafts on the real engine.

They change no greedy request and no distribution. A seeded request may get other tokens than without drafts, but they
are reproducible.
"""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from typing import Any

import pytest

from penstock import LLM, SamplingParams, StructuredOutputsParams
from penstock.config.model_path import resolve_model_path
from penstock.messages.stats import SpeculationStats
from tests.grids import exhaustive, grid
from tests.integration.test_identity_matrix import PLAIN, requests, run

COUNT = 22
SMALL_POOL = {"max_model_len": 240, "num_gpu_blocks_override": 17}
METHODS: dict[str, dict[str, Any]] = {
    "mtp": {"method": "mtp"},
    "draft_model": {"method": "draft_model", "model": str(resolve_model_path("demo"))},
}
NUM_SEEDS = 3000
PROMPT = "Once upon a time there was a"
UNDECIDED = "The code of"  # the model expects many names, and the drafter others


def config(method: str, num_drafts: int = 3) -> dict[str, Any]:
    return {**METHODS[method], "num_speculative_tokens": num_drafts, "draft_sample_method": "probabilistic"}


def is_greedy(number: int) -> bool:
    return requests()[number][1].temperature == 0.0


@pytest.fixture(scope="module")
def plain_tokens() -> list[list[int]]:
    return run(one_by_one=True, count=COUNT)[0]


@pytest.mark.spread(1)
@pytest.mark.parametrize(("method", "overlap"), grid(list(METHODS), (False, True), strength=1))
def test_greedy_requests_equal_those_of_the_plain_run(
    plain_tokens: list[list[int]], method: str, overlap: bool
) -> None:
    """Runs with preemption and prefix hits. A second run gives the same tokens, including the drawn ones."""
    results = []
    for _ in range(2):
        tokens, llm = run(
            count=COUNT,
            repeat=2,
            async_scheduling=overlap,
            max_num_batched_tokens=48,
            enable_prefix_caching=True,
            speculative_config=config(method),
            **SMALL_POOL,
        )
        assert llm.stats().num_preemptions > 0
        assert llm.stats().prefix_cache_hits > 100
        results.append(tokens)
    assert results[0] == results[1]
    for number, (plain, drafted) in enumerate(zip(plain_tokens, results[0], strict=True)):
        assert not is_greedy(number) or plain == drafted
    assert results[0] != plain_tokens, "drawn drafts give other tokens of the same distribution"


@pytest.mark.spread(1)
@pytest.mark.parametrize("method", METHODS)
def test_batches_and_chunks_change_nothing_if_the_windows_are_the_same(method: str) -> None:
    alone, _ = run(one_by_one=True, count=COUNT, speculative_config=config(method))
    together, _ = run(count=COUNT, speculative_config=config(method))
    cached, _ = run(count=COUNT, repeat=2, enable_prefix_caching=True, speculative_config=config(method))
    chunked, _ = run(one_by_one=True, count=COUNT, max_num_batched_tokens=16, speculative_config=config(method))
    assert alone == together == cached == chunked


@pytest.mark.spread(1)
@pytest.mark.parametrize("overlap", [False, True])
def test_drafts_of_the_target_itself_are_always_accepted(overlap: bool) -> None:
    """The distributions are bit-identical. Rows change owners, so a draft verified by other logits would show."""
    count = 40
    llm = LLM(**{**PLAIN, **SMALL_POOL, "async_scheduling": overlap}, speculative_config=config("draft_model"))
    params = [
        SamplingParams(temperature=0.5 + number % 3 / 2, seed=number, max_tokens=20 + number, ignore_eos=True)
        for number in range(count)
    ]
    llm.generate([f"{PROMPT} {number}" for number in range(count)], params, use_tqdm=False)
    stats = llm.stats()
    llm.shutdown()
    assert stats.num_preemptions > 0
    assert stats.speculation.num_draft_tokens > 500
    assert stats.speculation.num_accepted_tokens == stats.speculation.num_draft_tokens


def count_beginnings(first_seed: int, **engine_args: Any) -> tuple[Counter[tuple[int, ...]], SpeculationStats]:
    """Counts the first three tokens of many completions of one prompt."""
    llm = LLM(**{**PLAIN, "max_num_seqs": 64, **engine_args})
    seeds = range(first_seed, first_seed + NUM_SEEDS)
    # Not only top_k rejects drafts: some probabilities of the drafter exceed the model's.
    asked = {"temperature": 1.0, "top_k": 4, "max_tokens": 4, "ignore_eos": True}
    params = [SamplingParams(seed=seed, **asked) for seed in seeds]
    outputs = llm.generate([UNDECIDED] * NUM_SEEDS, params, use_tqdm=False)
    stats = llm.stats().speculation
    llm.shutdown()
    return Counter(tuple(output.outputs[0].token_ids[:3]) for output in outputs), stats


@pytest.fixture(scope="module")
def plain_beginnings() -> Counter[tuple[int, ...]]:
    return count_beginnings(0)[0]


@pytest.mark.long
@pytest.mark.parametrize("overlap", [exhaustive(False), True])
def test_the_distribution_equals_that_of_the_plain_run(
    plain_beginnings: Counter[tuple[int, ...]], overlap: bool
) -> None:
    """Compares counts of the first one, two and three tokens in two samples of equal size with different seeds."""
    beginnings, stats = count_beginnings(NUM_SEEDS, speculative_config=config("mtp"), async_scheduling=overlap)
    assert NUM_SEEDS / 8 < stats.num_accepted_tokens < stats.num_draft_tokens - NUM_SEEDS / 8
    for length in (1, 2, 3):
        plain, drafted = (shortened(each, length) for each in (plain_beginnings, beginnings))
        cells = {key for key in plain | drafted if plain[key] + drafted[key] > 10}
        statistic = sum((plain[key] - drafted[key]) ** 2 / (plain[key] + drafted[key]) for key in cells)
        assert len(cells) >= 4**length / 4
        # The 99.99th percentile by Wilson and Hilferty's approximation.
        degrees = len(cells) - 1
        limit = degrees * (1 - 2 / (9 * degrees) + 3.72 * math.sqrt(2 / (9 * degrees))) ** 3
        assert statistic < limit, (length, statistic, limit)


def shortened(counts: Counter[tuple[int, ...]], length: int) -> Counter[tuple[int, ...]]:
    found: Counter[tuple[int, ...]] = Counter()
    for key, count in counts.items():
        found[key[:length]] += count
    return found


def test_sampling_parameters_of_a_request() -> None:
    """Logprobs are the model's for the sampled tokens; opting out gives the plain run; a grammar is obeyed."""
    seeded: dict[str, Any] = {"temperature": 1.0, "max_tokens": 24, "ignore_eos": True}
    llm = LLM(**PLAIN)
    plain = llm.generate([PROMPT], SamplingParams(seed=5, **seeded), use_tqdm=False)[0].outputs[0]
    llm.shutdown()
    llm = LLM(**{**PLAIN, "async_scheduling": True}, speculative_config=config("mtp"))
    asked = [
        SamplingParams(seed=5, num_speculative_tokens=0, **seeded),
        SamplingParams(seed=6, logprobs=2, **seeded),
        *(
            SamplingParams(seed=seed, max_tokens=24, structured_outputs=StructuredOutputsParams(regex="(ab|c){3,6}"))
            for seed in range(8)
        ),
    ]
    out, with_logprobs, *constrained = llm.generate([PROMPT] * len(asked), asked, use_tqdm=False)
    assert out.num_draft_tokens == 0
    assert out.outputs[0].token_ids == plain.token_ids
    for each in constrained:
        assert re.fullmatch("(ab|c){3,6}", each.outputs[0].text), each.outputs[0].text
    assert with_logprobs.num_accepted_tokens > 0
    logprobs = with_logprobs.outputs[0].logprobs
    whole = with_logprobs.prompt_token_ids + with_logprobs.outputs[0].token_ids
    scored = llm.generate(
        [{"prompt_token_ids": whole}], SamplingParams(max_tokens=1, prompt_logprobs=2), use_tqdm=False
    )[0].prompt_logprobs
    assert logprobs is not None
    assert scored is not None
    assert logprobs == scored[len(with_logprobs.prompt_token_ids) :]
    llm.check_integrity()
    llm.shutdown()


@pytest.mark.long
@pytest.mark.parametrize("overlap", [exhaustive(False), True])
def test_synthetic_acceptance(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, overlap: bool) -> None:
    rates = [0.9, 0.5, 0.2]
    synthetic = {
        "method": "mtp",
        "num_speculative_tokens": 3,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": rates,
    }
    monkeypatch.setattr(logging.getLogger("penstock"), "propagate", True)
    llm = LLM(**{**PLAIN, "async_scheduling": overlap}, speculative_config=synthetic)
    assert "the outputs are not the model's" in caplog.text
    params = [
        SamplingParams(temperature=number % 2, seed=number, max_tokens=200, ignore_eos=True) for number in range(32)
    ]
    llm.generate([f"{PROMPT} {number}" for number in range(32)], params, use_tqdm=False)
    stats: SpeculationStats = llm.stats().speculation
    llm.shutdown()
    reached = stats.num_drafts
    for rate, accepted in zip(rates, stats.num_accepted_per_position, strict=True):
        # The last windows of a request are cut short by max_tokens.
        assert abs(accepted / reached - rate) < 4 * math.sqrt(rate * (1 - rate) / reached) + 0.01
        reached = accepted
