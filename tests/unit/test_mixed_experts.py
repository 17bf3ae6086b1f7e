"""Experts of one layer that are quantized in several ways: they give the bits of their values, or are refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from penstock.config.expert_parallel import SPARE, ExpertParallelConfig
from penstock.config.model import ModelConfig
from penstock.kernels.quantized import LayerWeight, QuantizedWeight, dense, quantize_absmax
from penstock.messages.kv_transfer import ShardId
from penstock.models.experts import Experts
from penstock.models.sources.source import ALL, Part
from penstock.models.weights import LoadedSize, Weights, compare
from penstock.parallel.groups import RankLinks
from penstock.utils.errors import ConfigError
from tests.unit.rank_harness import run_ranks
from tests.unit.test_moving_experts import NUM_EXPERTS, RandomSource, inputs_of, model, needs_native, parallel_of

__all__ = ["model"]

Kind = Callable[[torch.Tensor], LayerWeight]


def int4(weight: torch.Tensor) -> LayerWeight:
    return quantize_absmax(weight, 4, 32)


def int8(weight: torch.Tensor) -> LayerWeight:
    return quantize_absmax(weight, 8, 0)


def rounding(weight: torch.Tensor) -> LayerWeight:
    stored = quantize_absmax(weight, 8, 0)
    return QuantizedWeight(stored.codes, stored.codebook, stored.scales, stored.group, 8, quantizes_inputs="by row")


def bfloat16(weight: torch.Tensor) -> LayerWeight:
    return weight


class MixedSource(RandomSource):
    """Expert e is of kind e % len(kinds); with `takes_values` it has the values of that kind."""

    def __init__(self, *kinds: Kind, takes_values: bool = False) -> None:
        self.kinds = kinds
        self.takes_values = takes_values

    def has(self, name: str) -> bool:
        return super().has(name) or "mlp.experts.0.up_proj" in name

    def read(self, name: str, shape: Sequence[int], part: Part = ALL) -> Any:
        expert = re.search(r"experts\.(\d+)", name)
        weight = self.kinds[int(expert[1]) % len(self.kinds)](super().read(name, shape)) if expert else None
        if weight is None or self.takes_values or not isinstance(weight, QuantizedWeight):
            return super().read(name, shape, part) if weight is None else dense(weight)[part]
        return weight.part(rows=part[0] if part else slice(None))


def experts_of(model: ModelConfig, source: MixedSource, **weights: Any) -> Experts:
    with torch.inference_mode():
        return Experts(model, Weights(source, torch.bfloat16, torch.device("cpu"), check=compare, **weights) / "layer")


@torch.inference_mode()
def outputs(experts: Experts) -> list[torch.Tensor]:
    return [experts(inputs_of(step)).clone() for step in range(4)]


MIXTURES = [(int4, bfloat16), (bfloat16, int4), (int4, int8, int8), (int8, int4, bfloat16)]


@pytest.mark.parametrize("kinds", MIXTURES)
def test_experts_of_a_rank_give_the_bits_of_their_values(model: ModelConfig, kinds: tuple[Kind, ...]) -> None:
    sizes = LoadedSize(), LoadedSize()
    found, wanted = (
        outputs(experts_of(model, MixedSource(*kinds, takes_values=takes_values), size=size))
        for takes_values, size in zip((False, True), sizes, strict=True)
    )
    assert all(map(torch.equal, found, wanted))
    assert sizes[0] == sizes[1], "all experts take the values, and each of them is counted once"


@pytest.mark.parametrize("kinds", [(int4, int4, int4, int8, int8, int8), (int4, int4, bfloat16)])
def test_experts_that_stay_give_the_bits_of_their_values(model: ModelConfig, kinds: tuple[Kind, ...]) -> None:
    """With kinds of their own on each of four ranks, and with several kinds on each."""
    parallel = ExpertParallelConfig(num_experts=NUM_EXPERTS, num_redundant=0, num_ranks=4)

    def body(links: RankLinks, shard: ShardId) -> list[torch.Tensor]:
        return outputs(experts_of(model, MixedSource(*kinds), group=links.group, expert_parallel=parallel))

    wanted = outputs(experts_of(model, MixedSource(*kinds, takes_values=True)))
    for found in run_ranks(1, 4, body).values():
        assert all(map(torch.equal, found, wanted))


@needs_native
@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        (
            (int4,) * 6 + (bfloat16,) * 6,
            r"the experts of layer\.mlp are quantized in several ways, gate_up of experts\.0 in 4-bit integers with "
            r"scales of 32 inputs and of experts\.6 in bfloat16; enable_eplb .*: leave it out, or quantize all experts",
        ),
        ((bfloat16,) * 6 + (int4,) * 6, r"experts\.0 in bfloat16 and of experts\.6 in 4-bit integers"),
        ((int8,) * 6 + (rounding,) * 6, r"in 8-bit integers with .* and of experts\.6 in .* times 8-bit inputs"),
    ],
)
def test_experts_that_move_are_refused_before_there_is_memory(
    monkeypatch: pytest.MonkeyPatch, model: ModelConfig, kinds: tuple[Kind, ...], message: str
) -> None:
    monkeypatch.setattr("penstock.models.experts.create_memory", lambda num_bytes: pytest.fail(f"{num_bytes} bytes"))
    with pytest.raises(ConfigError, match=message) as raised:
        experts_of(model, MixedSource(*kinds), expert_parallel=parallel_of(2, 0), expert_group=TwoRanks())
    assert str(raised.value).startswith(f"{model.path}: ")


class TwoRanks:
    index, count = 0, 2


@needs_native
def test_experts_that_move_are_refused_if_those_of_a_rank_differ(model: ModelConfig) -> None:
    parallel = parallel_of(2, 0)
    assert SPARE in parallel.initial_placement()
    with pytest.raises(
        ConfigError, match=r"experts\.0 in 4-bit integers .* and of experts\.1 in bfloat16; enable_eplb"
    ):
        experts_of(model, MixedSource(int4, bfloat16), expert_parallel=parallel, expert_group=TwoRanks())


@pytest.mark.parametrize("kinds", [(rounding, int8), (int4, bfloat16, rounding), (bfloat16, rounding)])
def test_experts_of_which_some_quantize_their_inputs_are_refused(model: ModelConfig, kinds: tuple[Kind, ...]) -> None:
    with pytest.raises(
        ConfigError, match=r"times 8-bit inputs.*; if inputs are quantized, experts must be alike: leave"
    ):
        experts_of(model, MixedSource(*kinds))


def test_experts_that_are_alike_stay_quantized(model: ModelConfig) -> None:
    size, of_values = LoadedSize(), LoadedSize()
    experts_of(model, MixedSource(int4), size=size)
    experts_of(model, MixedSource(int4, takes_values=True), size=of_values)
    assert size.num_bytes < 0.3 * of_values.num_bytes
    assert size.num_weights == of_values.num_weights
