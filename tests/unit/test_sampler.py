"""Sampling features compared with their definitions, in plain Python or by statistics."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from penstock.messages.requests import EngineRequest
from penstock.messages.sampling_params import SamplingParams
from penstock.runner.cpu.sampler import draw, sample
from penstock.runner.sampling.batch import SamplingBatch
from penstock.runner.sampling.noise import Purpose, uniform

VOCAB = 1500


def make_batch(params: list[dict[str, Any]], tokens: list[list[int]], num_prompt: list[int]) -> SamplingBatch:
    requests = []
    for number, (each, known, prompt) in enumerate(zip(params, tokens, num_prompt, strict=True)):
        extra = {key: each.pop(key) for key in ("bad", "eos") if key in each}
        requests.append(
            EngineRequest(
                request_id=str(number),
                prompt_token_ids=tuple(known[:prompt]),
                sampling_params=SamplingParams(max_tokens=None, **each),
                max_tokens=100,
                seed=each.get("seed", number),
                eos_token_ids=frozenset(extra.get("eos", ())),
                bad_words_token_ids=tuple(map(tuple, extra.get("bad", ()))),
            )
        )
    width = max(map(len, tokens)) + 3
    table = torch.full((len(tokens), width), VOCAB - 1, dtype=torch.int32)
    for row, known in enumerate(tokens):
        table[row, : len(known)] = torch.tensor(known, dtype=torch.int32)
    positions = np.array([len(known) for known in tokens])
    return SamplingBatch(requests, positions, torch.arange(len(tokens)), torch.from_numpy(positions), table, {})


def sample_one(logits: torch.Tensor, params: dict[str, Any], tokens: list[int], num_prompt: int = 1) -> int:
    return int(sample(logits[None], make_batch([dict(params)], [tokens], [num_prompt])).token_ids[0])


def kept_tokens(logits: torch.Tensor, params: dict[str, Any]) -> set[int]:
    """Returns every token that can be drawn, found by drawing with many seeds."""
    count = 4000
    batch = make_batch([{**params, "seed": s} for s in range(count)], [[1]] * count, [1] * count)
    return set(sample(logits.expand(count, -1), batch).token_ids.tolist())


def test_greedy_takes_the_first_of_equal_logits() -> None:
    logits = torch.zeros(VOCAB)
    logits[[7, 900]] = 3.0
    for dtype in (torch.float32, torch.bfloat16):
        assert sample_one(logits.to(dtype), {"temperature": 0.0}, [1]) == 7


def test_top_k_top_p_and_min_p_keep_the_expected_tokens() -> None:
    logits = torch.full((VOCAB,), -40.0)
    logits[:4] = torch.tensor([0.5, 0.25, 0.15, 0.1]).log()
    assert kept_tokens(logits, {}) == {0, 1, 2, 3}
    assert kept_tokens(logits, {"top_k": 2}) == {0, 1}
    assert kept_tokens(logits, {"top_p": 0.7}) == {0, 1}
    assert kept_tokens(logits, {"top_p": 0.76}) == {0, 1, 2}
    assert kept_tokens(logits, {"min_p": 0.4}) == {0, 1}
    # top_p applies to the tokens that top_k has kept.
    assert kept_tokens(logits, {"top_k": 2, "top_p": 0.6}) == {0}


def test_top_p_over_a_flat_distribution_needs_the_whole_vocabulary() -> None:
    logits = torch.zeros(VOCAB) + torch.arange(VOCAB) * 1e-6
    kept = kept_tokens(logits, {"top_p": 0.9})
    assert min(kept) >= VOCAB * 0.1 - 2
    assert max(kept) == VOCAB - 1


@pytest.mark.parametrize("wide", [{"top_p": 0.9999}, {"top_k": VOCAB - 1}])
def test_a_row_that_keeps_most_of_the_vocabulary_costs_the_others_nothing(
    wide: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.cat([torch.randn(7, VOCAB, generator=generator) * 8, torch.randn(1, VOCAB, generator=generator)])
    params = [*({"top_k": 40, "top_p": 0.9, "seed": row} for row in range(7)), {**wide, "seed": 7}]
    alone = [int(sample(logits[row, None], make_batch([{**params[row]}], [[1]], [1])).token_ids[0]) for row in range(8)]
    ordered: list[tuple[int, int]] = []  # rows and how many numbers of each

    def counted(name: str) -> None:
        function = getattr(torch.Tensor, name)

        def call(self: torch.Tensor, *args: Any, **options: Any) -> Any:
            ordered.append((len(self), args[0] if args else self.shape[1]))
            return function(self, *args, **options)

        monkeypatch.setattr(torch.Tensor, name, call)

    counted("sort")
    counted("topk")
    found = sample(logits, make_batch(params, [[1]] * 8, [1] * 8)).token_ids.tolist()
    assert found == alone
    assert max(rows * count for rows, count in ordered) <= 8 * 1024
    assert (1, VOCAB if "top_p" in wide else VOCAB - 1) in ordered


def test_temperature_gives_the_softmax_distribution() -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(0)) * 2
    count, temperature = 40000, 0.7
    batch = make_batch([{"temperature": temperature}] * count, [[1]] * count, [1] * count)
    observed = torch.bincount(sample(logits.expand(count, -1), batch).token_ids, minlength=50)
    expected = (logits / temperature).softmax(-1) * count
    chi_square = ((observed - expected) ** 2 / expected)[expected > 5].sum().item()
    assert chi_square < 90, "49 degrees of freedom: 85 is one in a thousand"


def test_draw_never_takes_a_token_without_mass() -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(50):
        probs = torch.rand(1, 1000, generator=generator)
        probs[probs < 0.99] = 0.0
        probs /= probs.sum()
        for noise in (0.0, 0.5, 1.0 - 2.0**-53):
            token = draw(probs, torch.tensor([noise], dtype=torch.float64))
            assert probs[0, token] > 0


def test_a_row_does_not_depend_on_the_other_rows() -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(33, 151_936, generator=generator).mul_(3).bfloat16()
    params: list[dict[str, Any]] = [
        {"temperature": 0.5 + 0.1 * (i % 7), "top_p": 0.9 if i % 2 else 1.0, "top_k": 50 if i % 3 == 0 else 0}
        for i in range(33)
    ]
    tokens = [[1, 2, 3 + i] for i in range(33)]
    together = sample(logits, make_batch([dict(p) for p in params], tokens, [2] * 33)).token_ids.tolist()
    for i in range(33):
        batch = make_batch([{**params[i], "seed": i}], [tokens[i]], [2])
        assert sample(logits[i : i + 1], batch).token_ids.tolist() == [together[i]]


def test_penalties() -> None:
    logits = torch.zeros(VOCAB)
    logits[[3, 4, 5]] = torch.tensor([2.0, 1.9, 1.7])
    assert sample_one(logits, {"temperature": 0.0}, [3, 4], num_prompt=1) == 3
    # Repetition counts the prompt: 2.0 / 1.2 and 1.9 / 1.2 fall below 1.7.
    assert sample_one(logits, {"temperature": 0.0, "repetition_penalty": 1.2}, [3, 4], num_prompt=1) == 5
    # Presence and frequency count only the output: 3 is in the prompt, 4 in the output.
    assert sample_one(logits, {"temperature": 0.0, "presence_penalty": 0.5}, [4, 3], num_prompt=1) == 4
    assert sample_one(logits, {"temperature": 0.0, "presence_penalty": 0.5}, [3, 4], num_prompt=1) == 3
    assert sample_one(logits, {"temperature": 0.0, "frequency_penalty": 0.06}, [1, 3, 3], num_prompt=1) == 4
    assert sample_one(logits, {"temperature": 0.0, "presence_penalty": 0.06}, [1, 3, 3], num_prompt=1) == 3
    # A negative logit is pushed further down.
    assert sample_one(torch.tensor([-1.0, -1.1]), {"temperature": 0.0, "repetition_penalty": 1.2}, [0, 0]) == 1


def test_bias_allowed_min_tokens_and_bad_words() -> None:
    logits = torch.zeros(VOCAB)
    logits[[3, 4]] = torch.tensor([2.0, 1.0])
    greedy: dict[str, Any] = {"temperature": 0.0}
    assert sample_one(logits, {**greedy, "logit_bias": {9: 5.0}}, [1]) == 9
    assert sample_one(logits, {**greedy, "logit_bias": {3: -100.0}}, [1]) == 4
    assert sample_one(logits, {**greedy, "allowed_token_ids": [4, 70]}, [1]) == 4
    # A bias cannot bring a forbidden token back.
    assert sample_one(logits, {**greedy, "allowed_token_ids": [4], "logit_bias": {9: 100.0}}, [1]) == 4
    assert sample_one(logits, {**greedy, "min_tokens": 2, "eos": [3]}, [1, 8]) == 4
    assert sample_one(logits, {**greedy, "min_tokens": 2, "eos": [3]}, [1, 8, 8]) == 3
    assert sample_one(logits, {**greedy, "bad": [[3]]}, [1]) == 4
    assert sample_one(logits, {**greedy, "bad": [[7, 8, 3]]}, [7, 8]) == 4
    assert sample_one(logits, {**greedy, "bad": [[7, 8, 3]]}, [8, 8]) == 3
    assert sample_one(logits, {**greedy, "bad": [[1, 7, 8, 3]]}, [7, 8]) == 3


def test_rows_of_nan_are_reported() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[1] = math.nan
    output = sample(logits, make_batch([{"temperature": 0.0}, {"temperature": 0.0}], [[1], [1]], [1, 1]))
    assert output.distributions.is_valid.tolist() == [True, False]


def test_noise_is_uniform_and_a_function_of_its_key() -> None:
    positions = np.arange(20000)
    noise = uniform([5] * 20000, positions, Purpose.SAMPLE)
    assert noise.min() >= 0.0
    assert noise.max() < 1.0
    histogram = np.histogram(noise, bins=20, range=(0, 1))[0]
    assert ((histogram - 1000) ** 2 / 1000).sum() < 45
    assert uniform([5], positions[7:8], Purpose.SAMPLE)[0] == noise[7]
    assert len({*uniform([1, 2, -1, 2**62], np.zeros(4, dtype=np.int64), Purpose.SAMPLE)}) == 4
    # Neighbouring seeds at neighbouring positions are uncorrelated.
    assert abs(np.corrcoef(noise[1:], uniform([6] * 19999, positions[:-1], Purpose.SAMPLE))[0, 1]) < 0.03


@pytest.mark.parametrize("num_top", [0, 3])
def test_logprobs(num_top: int) -> None:
    from penstock.runner.sampling.logprobs import token_logprobs

    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(3))
    logprobs = logits.log_softmax(-1)
    order = logits.argsort(-1, descending=True)
    rows = token_logprobs(logits, order[:, 5], [num_top, 0])
    assert rows[0].rank == 6
    assert rows[0].token_ids == (int(order[0, 5]), *order[0, :num_top].tolist())
    assert rows[0].logprobs == pytest.approx([logprobs[0, t].item() for t in rows[0].token_ids])
    assert len(rows[1].token_ids) == 1
