"""Soft caps of attention scores and attention sinks, from `config.json` and checkpoint to the attention backends."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.attention.native import NativeAttention
from penstock.attention.triton import TritonAttention
from penstock.config.model import ModelConfig, load_model_config
from penstock.kernels.triton.attention.plan import AttentionLimits
from penstock.layers.rotary import rotary_table
from penstock.models.parts import GroupedQueryAttention
from penstock.models.weights import Weights
from penstock.utils.errors import ConfigError
from tests.unit.attention_cases import MAX_MODEL_LEN, Case
from tests.unit.test_fused_decode import CONFIG, ON, RandomSource, caches_of, context_of
from tests.unit.test_weights import Member

RAW = {"model_type": "llama", "vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
       "num_attention_heads": 1}  # fmt: skip
WITH_SINKS = replace(CONFIG, has_attention_sinks=True)
LENGTHS, COUNTS = [20, 9], [3, 9]


@pytest.mark.parametrize("value", [-1.0, 0, "50", True, float("inf")])
def test_impossible_soft_caps_are_refused(tmp_path: Path, value: object) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**RAW, "attn_logit_softcapping": value}))
    with pytest.raises(ConfigError, match="attn_logit_softcapping must be a positive number, got"):
        load_model_config(tmp_path)


@pytest.mark.parametrize(("value", "expected"), [(None, 0.0), (50, 50.0)])
def test_the_soft_cap_of_a_configuration(tmp_path: Path, value: object, expected: float) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**RAW, "attn_logit_softcapping": value}))
    assert load_model_config(tmp_path).attn_logit_softcapping == expected


@pytest.mark.parametrize("counts", [(1, 2, 1), (3, 1, 40)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_triton_agrees_with_the_native_backend(counts: tuple[int, ...], deterministic: bool) -> None:
    limits = AttentionLimits(8, MAX_MODEL_LEN, 4)
    case = Case.random([7, 90, 47], counts, window=20)
    plain = case.run(NativeAttention())
    for softcap, sinks in ((1.5, None), (0.0, torch.linspace(-2, 4, 4)), (1.5, torch.linspace(-2, 4, 4))):
        case.heads = replace(case.heads, softcap=softcap, sinks=sinks)
        expected = case.run(NativeAttention())
        assert not torch.allclose(expected, plain, atol=1e-3)
        found = case.run(TritonAttention(limits, torch.device("cpu"), deterministic))
        torch.testing.assert_close(found, expected, atol=3e-6, rtol=2e-5)


def attended(config: ModelConfig = WITH_SINKS, index: int = 0, count: int = 1) -> torch.Tensor:
    """Returns what a rank's heads give for the same hidden states."""
    rotary = rotary_table(config.rope, config.rotary_dim, config.max_position_embeddings).to(ON)
    weights = Weights(RandomSource(), torch.float32, ON, group=Member(index, count))
    part = GroupedQueryAttention(config, weights / "self_attn", 0, rotary)
    x = torch.randn(sum(COUNTS), config.hidden_size, generator=torch.Generator().manual_seed(0)).to(ON)
    positions = torch.cat([torch.arange(n - c, n) for n, c in zip(LENGTHS, COUNTS, strict=True)]).to(ON)
    caches = {name: cache.fill_(0.5) for name, cache in caches_of(part, len(LENGTHS)).items()}
    return part.attend(part.qkv(x), positions, context_of(caches, LENGTHS, COUNTS))


@pytest.mark.parametrize("count", [2, 3, 4])
def test_ranks_divide_the_sinks_like_the_heads(count: int) -> None:
    """Three ranks share a KV head, and one of them has fewer query heads."""
    whole = attended()
    assert torch.equal(torch.cat([attended(index=index, count=count) for index in range(count)], 1), whole)
    assert not torch.allclose(attended(CONFIG), whole, atol=1e-3)


def test_a_layer_takes_the_soft_cap_of_its_configuration() -> None:
    assert not torch.allclose(attended(replace(CONFIG, attn_logit_softcapping=0.1)), attended(CONFIG), atol=1e-3)
