"""`check_weights` compares packed weights with the tensors that were read."""

from __future__ import annotations

import pytest
import torch

from penstock.config.engine import EngineArgs, resolve
from penstock.engine.build import build_engine
from penstock.kernels import native
from penstock.kernels.experts import ExpertsShape, make_experts
from penstock.kernels.linear import PackedLinear
from penstock.layers.linear import Linear
from penstock.models.weights import compare
from penstock.utils.errors import ConfigError


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_wide", [False, True])
def test_correct_weights_pass(dtype: torch.dtype, is_wide: bool) -> None:
    weight = torch.randn(70, 45, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight[0, :4] = torch.tensor([0.0, -0.0, torch.finfo(dtype).tiny / 4, -torch.finfo(dtype).tiny / 2]).to(dtype)
    compare("layer", Linear(weight, torch.randn(70).to(dtype), is_wide=is_wide), weight)


def spoil(linear: PackedLinear, weight: torch.Tensor) -> None:
    """Doubles the middle weight in the layer's own memory."""
    packed = getattr(linear._into, "_packed", None)
    double_in(linear._into._weight if packed is None else packed.packed, weight)  # pyright: ignore


def double_in(kept: torch.Tensor, weight: torch.Tensor) -> None:
    value = weight[weight.shape[0] // 2, weight.shape[1] // 2]
    elements = kept.view(value.dtype)
    index = (elements.flatten() == value).nonzero()[0]
    elements.view(-1)[index] = value * 2


def test_a_wrong_packed_weight_is_found() -> None:
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    linear = Linear(weight)
    spoil(linear._apply, weight)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"in memory of layers.3.mlp.down_proj are not those .* 1 of 4096 elements"):
        compare("layers.3.mlp.down_proj", linear, weight)


@pytest.mark.skipif(not native.instruction_sets(), reason="the reference keeps the weights in linear layers")
@pytest.mark.parametrize(("part", "name"), [("gate_up_weights", "gate_up"), ("down_weights", "down")])
def test_a_wrong_weight_of_an_expert_is_found(part: str, name: str) -> None:
    shape = ExpertsShape(3, 64, 40, 40, 64, torch.bfloat16)
    experts, random = make_experts(shape), torch.Generator().manual_seed(0)
    weights = (torch.randn(80, 64, generator=random).bfloat16(), torch.randn(64, 40, generator=random).bfloat16())
    for slot in range(3):
        experts.store(slot, *(weight * (slot == 1) for weight in weights))
    stored = dict(zip(("gate_up", "down"), zip(experts.weights(1), weights, strict=True), strict=True))
    for packed, weight in stored.values():
        compare("experts.1", packed, weight)
    packed, weight = stored[name]
    double_in(getattr(experts, part).packed, weight)
    with pytest.raises(ConfigError, match=r"in memory of experts.1 are not those .* 1 of \d+ elements"):
        compare("experts.1", packed, weight)


def test_an_engine_checks_its_weights_with_check_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    make, made = PackedLinear.__init__, []

    def faulty(self: PackedLinear, weight: torch.Tensor, *others: object, **options: object) -> None:
        make(self, weight, *others, **options)  # pyright: ignore[reportArgumentType]
        made.append(self)
        if len(made) == 6:
            spoil(self, weight)

    monkeypatch.setattr(PackedLinear, "__init__", faulty)
    build_engine(resolve(EngineArgs())).core.shutdown()
    made.clear()
    with pytest.raises(ConfigError, match=r"in memory of model.layers.1.self_attn.o_proj are not those that were read"):
        build_engine(resolve(EngineArgs(check_weights=True)))
    made.append(made[0])
    build_engine(resolve(EngineArgs(check_weights=True))).core.shutdown()
    assert len(made) > 20, "the tied head, too, is among the layers"
