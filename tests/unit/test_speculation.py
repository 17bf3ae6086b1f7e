"""Drafts: verification changes no distribution, prompt lookup finds n-grams, and configurations are checked."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.config.model import load_model_config
from penstock.config.model_path import resolve_model_path
from penstock.config.speculative import SpeculativeConfig, parse_speculative_config
from penstock.runner.cpu.drafts import count_accepted
from penstock.runner.cpu.ngram import NgramSpeculator
from penstock.runner.cpu.sampler import draw
from penstock.runner.sampling.noise import Purpose, uniform
from penstock.utils.errors import ConfigError

NUM_DRAWS = 100_000
SYNTHETIC: dict[str, object] = {
    "method": "mtp",
    "num_speculative_tokens": 2,
    "rejection_sample_method": "synthetic",
    "synthetic_acceptance_rates": [0.5, 1],
}


def test_accepted_drafts_are_those_before_the_first_wrong_one() -> None:
    # Windows of 3, 0, 2 and 2 drafts: all correct, none to check, the first wrong, a gap after a correct one.
    num_drafts = np.array([3, 0, 2, 2])
    drafts = torch.tensor([[5, 6, 7], [9, 9, 9], [1, 2, 0], [3, -1, 0]])
    sampled = torch.tensor([5, 6, 7, 8, 4, 9, 2, 3, 3, 4, 5])
    num_accepted, num_real_drafts = count_accepted(sampled, drafts, torch.arange(4), num_drafts)
    assert num_accepted.tolist() == [3, 0, 0, 1]
    assert num_real_drafts.tolist() == [3, 0, 2, 1]


def test_a_gap_is_never_accepted() -> None:
    """It is rejected even if the sampler returns -1, as it might with nothing to draw."""
    num_accepted, _ = count_accepted(torch.tensor([-1, 4]), torch.tensor([[-1]]), torch.arange(1), np.array([1]))
    assert num_accepted.tolist() == [0]


@pytest.mark.parametrize("quality", [0.0, 0.5, 1.0], ids=["never", "sometimes", "always"])
def test_drafts_change_no_distribution(quality: float) -> None:
    """The output has the target's distribution, and drafts are accepted as often as with rejection sampling.

    Leviathan et al. 2023: a draft x of a drafter that proposes x for certain is accepted with probability p(x).
    """
    probs = torch.tensor([0.02, 0.3, 0.08, 0.2, 0.1, 0.05, 0.25, 0.0])
    rng = random.Random(7)
    likely, never = int(probs.argmax()), 7
    drafted = np.array([likely if rng.random() < quality else never for _ in range(NUM_DRAWS)])
    noise = torch.from_numpy(uniform(range(NUM_DRAWS), np.full(NUM_DRAWS, 3), Purpose.SAMPLE))
    behind = torch.from_numpy(uniform(range(NUM_DRAWS), np.full(NUM_DRAWS, 4), Purpose.SAMPLE))
    many = probs.expand(NUM_DRAWS, -1)
    sampled = torch.stack((draw(many, noise), draw(many, behind)), 1)
    one_each = np.ones(NUM_DRAWS, dtype=np.int64)
    drafts, rows = torch.from_numpy(drafted)[:, None], torch.arange(NUM_DRAWS)
    accepted = count_accepted(sampled.view(-1), drafts, rows, one_each)[0].bool()
    expected = quality * float(probs[likely])
    deviation = (expected * (1 - expected) / NUM_DRAWS) ** 0.5
    assert abs(accepted.float().mean().item() - expected) <= 4 * deviation + 1e-9
    for tokens in (sampled[:, 0], sampled[accepted, 1]):
        if len(tokens):
            assert chi_square(tokens, probs) < 24.3, (
                "beyond the 99.9th percentile of 6 degrees of freedom, with a margin"
            )


def chi_square(tokens: torch.Tensor, probs: torch.Tensor) -> float:
    counts = torch.bincount(tokens, minlength=len(probs)).float()
    assert counts[probs == 0].sum() == 0
    wanted = probs[probs > 0] * len(tokens)
    return ((counts[probs > 0] - wanted) ** 2 / wanted).sum().item()


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 4, 1, 2, 3], [4, 1, 2]),  # the longest suffix that occurred before
        ([1, 2, 9, 1, 2, 8, 1, 2], [8, 1, 2]),  # the latest of two
        ([5, 1, 2, 7, 6, 1, 2, 8, 5, 1, 2], [7, 6, 1]),  # a longer match before a later one
        ([7, 7, 7, 7], [7]),  # a match may overlap the suffix; one token follows it
        ([1, 2, 3, 4], []),
        ([3, 1, 3], []),  # one token is less than the minimum
        ([4], []),
    ],
)
def test_prompt_lookup(tokens: list[int], expected: list[int]) -> None:
    assert NgramSpeculator(2, 4)._lookup(np.array(tokens), 3).tolist() == expected


def test_prompt_lookup_finds_what_a_plain_search_finds() -> None:
    rng = random.Random(1)
    for _ in range(500):
        tokens = [rng.randrange(3) for _ in range(rng.randrange(1, 30))]
        assert NgramSpeculator(2, 4)._lookup(np.array(tokens), 3).tolist() == plain_search(tokens, 2, 4, 3)


def plain_search(tokens: list[int], shortest: int, longest: int, count: int) -> list[int]:
    for length in range(longest, shortest - 1, -1):
        for end in range(len(tokens) - 1, length - 1, -1):
            if length < len(tokens) and tokens[end - length : end] == tokens[-length:]:
                return tokens[end:][:count]
    return []


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{", "not JSON"),
        ("[]", "must be an object"),
        ({"method": "magic", "num_speculative_tokens": 2}, "method"),
        ({"method": "ngram"}, "num_speculative_tokens"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "from 1 to 32"),
        ({"method": "ngram", "num_speculative_tokens": True}, "num_speculative_tokens"),
        ({"method": "ngram", "num_speculative_token": 3}, "did you mean 'num_speculative_tokens'"),
        ({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 9}, "prompt_lookup_max"),
        ({"method": "draft_model", "num_speculative_tokens": 3}, "needs a model"),
        ({"method": "eagle3", "num_speculative_tokens": 3}, "needs a model"),
        ({"method": "mtp", "model": "x", "num_speculative_tokens": 3}, "for no other"),
        ({"method": "mtp", "num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": {"4": 5}}, "4"),
        ({"method": "mtp", "num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": {"x": 1}}, "'x'"),
        ({"method": "mtp", "num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": {"4": True}}, "True"),
        # More than a message, or than `int`, can hold.
        ({"method": "mtp", "num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": {"9" * 20: 1}}, "99"),
        ({"method": "mtp", "num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": {"9" * 5000: 1}}, "9"),
        ({"method": "mtp", "num_speculative_tokens": 2, "draft_sample_method": "gumbel"}, "greedy, probabilistic"),
        ({"method": "ngram", "num_speculative_tokens": 2, "draft_sample_method": "probabilistic"}, "method=ngram"),
        ({"method": "mtp", "num_speculative_tokens": 2, "rejection_sample_method": ["x"]}, "standard, synthetic"),
        ({"method": "mtp", "num_speculative_tokens": 2, "rejection_sample_method": "synthetic"}, "need each other"),
        ({"method": "mtp", "num_speculative_tokens": 2, "synthetic_acceptance_rates": [1, 1]}, "need each other"),
        (SYNTHETIC | {"synthetic_acceptance_rates": [0.5]}, "num_speculative_tokens=2 numbers"),
        (SYNTHETIC | {"synthetic_acceptance_rates": [0.5, 1.5]}, "from 0 to 1"),
        (SYNTHETIC | {"synthetic_acceptance_rates": [0.5, True]}, "from 0 to 1"),
        (SYNTHETIC | {"synthetic_acceptance_rates": "ab"}, "from 0 to 1"),
        (SYNTHETIC | {"draft_sample_method": "probabilistic"}, "not rejection_sample_method=synthetic"),
    ],
)
def test_invalid_configurations_are_refused(value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_speculative_config(value, load_model_config(resolve_model_path("demo")))


def test_a_draft_model_needs_the_target_s_vocabulary(tmp_path: Path) -> None:
    shape = (resolve_model_path("demo") / "config.json").read_text(encoding="utf-8")
    (tmp_path / "config.json").write_text(shape.replace('"vocab_size": 4096', '"vocab_size": 4000'), encoding="utf-8")
    with pytest.raises(ConfigError, match="4000 tokens and the target one of 4096"):
        parse_speculative_config(
            {"model": str(tmp_path), "num_speculative_tokens": 2}, load_model_config(resolve_model_path("demo"))
        )


EAGLE3_HEAD = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "eagle_aux_hidden_state_layer_ids": [1, 3, 5],
}
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


def eagle3_config(folder: Path, **changed: Any) -> SpeculativeConfig:
    """Returns the configuration of a head for the built-in model, described with these changes."""
    (folder / "config.json").write_text(json.dumps({**EAGLE3_HEAD, **changed}), encoding="utf-8")
    return parse_speculative_config(
        {"model": str(folder), "num_speculative_tokens": 2}, load_model_config(resolve_model_path("demo"))
    )


def test_an_eagle3_head_is_recognised_in_both_layouts(tmp_path: Path) -> None:
    plain = eagle3_config(tmp_path, **{LAYER_IDS: None, "eagle_config": {LAYER_IDS: [6, 0]}})
    assert plain.method == "eagle3"
    assert plain.num_lookahead_tokens == 2
    assert plain.eagle3 is not None
    assert plain.eagle3.aux_layers == (0, 6)
    assert not plain.eagle3.norm_before_residual
    assert plain.eagle3.shape.dtype == "bfloat16"
    shape = {**EAGLE3_HEAD, "num_attention_heads": 8}
    nested = eagle3_config(
        tmp_path, architectures=["Eagle3Speculator"], transformer_layer_config=shape, num_attention_heads=None
    )
    assert nested.eagle3 is not None
    assert nested.eagle3.shape.num_attention_heads == 8
    assert nested.eagle3.norm_before_residual


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"vocab_size": 4000}, "vocab_size 4000 and the target model 4096"),
        ({"hidden_size": 128}, "target_hidden_size 128 and the target model 256"),
        ({"target_hidden_size": 512}, "target_hidden_size 512 and the target model 256"),
        ({"num_hidden_layers": 2}, "num_hidden_layers 1"),
        ({"model_type": "qwen3"}, "'qwen3'"),
        ({"draft_vocab_size": 5000}, "draft_vocab_size must be 1 to 4096, got 5000"),
        ({"draft_vocab_size": "all"}, "draft_vocab_size"),
        ({"norm_before_fc": True}, "norm_before_fc, which is not supported"),
        ({"transformer_layer_config": [1]}, r"config\.json: transformer_layer_config must be an object, got \[1\]"),
        ({LAYER_IDS: [1, 3, 7]}, f"{LAYER_IDS} .*from 0 to 6"),
        ({LAYER_IDS: [1, 1]}, f"{LAYER_IDS} .*different"),
        ({LAYER_IDS: ["1"]}, LAYER_IDS),
        ({LAYER_IDS: 3}, LAYER_IDS),
        # For six layers the usual choice is 2, 3 and 3.
        ({LAYER_IDS: None}, f"does not say .*{LAYER_IDS}"),
    ],
)
def test_an_eagle3_head_must_fit_its_target(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        eagle3_config(tmp_path, **changed)


def test_the_table_is_sorted_by_batch_size() -> None:
    table = {"16": 1, "4": 3}
    target = load_model_config(resolve_model_path("demo"))
    config = parse_speculative_config(
        {"method": "ngram", "num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": table}, target
    )
    assert config.drafts == ((4, 3), (16, 1))
