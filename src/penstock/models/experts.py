"""A mixture of experts as the feed-forward part of a decoder's layer (Shazeer et al. 2017, arXiv:1701.06538).

    x -> router -> ids and weights of top_k experts -> each expert's gated MLP -> sum by weights -> + shared MLP

The router's logits and weights are float32. An expert's output is rounded to the model's dtype; the sum of a token's
experts is float32, in the order of the router's choice, and rounded once; the shared MLP's output is added to it and
the result is rounded. transformers rounds in these places too, and in others: silu(gate) before it is multiplied by up
and, for Qwen3, the logits, the weights and their products with the outputs. In float32 the two agree.

The ranks of a group divide every expert: each computes its share of the inner features, gathers the others', computes
its share of the outputs and gathers those. No rank adds partial sums of a row, so a group's size changes no bit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch

from penstock.config.experts import CLAMPED, ExpertsConfig
from penstock.config.model import ModelConfig
from penstock.kernels.dispatch import is_interpreted
from penstock.kernels.experts import ExpertsShape, GroupedExperts, ReferenceExperts, make_experts
from penstock.kernels.router import Router
from penstock.kernels.sigmoid import sigmoid
from penstock.layers.linear import Gather, Linear
from penstock.models.parts import FeedForward, GatedMLP, dense_mlp
from penstock.models.weights import Weights
from penstock.utils.errors import ConfigError


def sparse_mlp(config: ModelConfig, weights: Weights, layer: int) -> FeedForward:
    """The experts of a layer, or its MLP if it is a dense one."""
    assert config.experts is not None, f"{config.model_type} has no experts"
    if not config.experts.is_sparse(layer):
        return dense_mlp(config, weights, layer)
    return Experts(config, weights)


@dataclass(frozen=True, slots=True)
class _Names:
    """How a checkpoint calls the part, and the layers of an expert that is stored by itself."""

    part: str
    gate: str
    up: str
    down: str


# The second are Mixtral's.
_LAYOUTS = (_Names("mlp", "gate_proj", "up_proj", "down_proj"), _Names("block_sparse_moe", "w1", "w3", "w2"))


class Experts:
    """A `FeedForward`."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        """`weights` has the layer's prefix. Raises ConfigError if it lacks a router or an expert."""
        if weights.device.type != "cpu":
            raise ConfigError(f"a {config.model_type} has experts, which are computed on a CPU only (--device cpu)")
        experts, hidden = config.experts, config.hidden_size
        assert experts is not None
        names = _find_names(config, weights)
        weights = weights / names.part
        self.config = experts
        self.router_logits = _read_router(experts, hidden, weights)
        self.route = Router(experts, _read_correction(experts, weights))
        self.experts = _load_experts(experts, hidden, weights, names)
        # An expert's slot: all experts are here, in order.
        self.slots = torch.arange(experts.num_experts, dtype=torch.int32)
        self.shared = _SharedMLP(config, weights) if experts.shared_intermediate_size else None
        self._gather_inner = Gather(weights.group, weights.share.sizes(experts.intermediate_size))
        self._gather_outputs = Gather(weights.group, weights.share.sizes(hidden))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        shared = None if self.shared is None else self.shared(x)  # [T, H]
        ids, weights = self.route(self.router_logits(x).float())  # [T, H] -> [T, num_experts] -> [T, top_k]
        groups = self.experts.group(ids, self.slots)
        activated = self._gather_inner(self.experts.gate_up(x, groups))  # [T, H] -> [P, own I] -> [P, I]
        outputs = self.experts.down(activated, groups)  # -> [P, own H]
        combined = self._gather_outputs(self.experts.combine(outputs, groups, weights))  # -> [T, own H] -> [T, H]
        return combined if shared is None else combined + shared


class _SharedMLP:
    """The MLP of every token; with a gate its result is multiplied by a sigmoid of the token's own."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        experts = config.experts
        assert experts is not None
        name = "shared_expert" if experts.has_shared_gate else "shared_experts"
        self.mlp = GatedMLP(config, weights / name, experts.shared_intermediate_size)
        self.gate: Linear | None = None
        if experts.has_shared_gate:
            weight = weights.tensor("shared_expert_gate.weight", 1, config.hidden_size)
            self.gate = weights.linear_of("shared_expert_gate", weight, is_wide=True)
        self._is_divided = weights.group.count > 1

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns a tensor that no other layer overwrites."""
        out = self.mlp(x)
        if self.gate is not None:
            return (out.float() * sigmoid(self.gate(x).float())).to(out.dtype)
        return out.clone() if self._is_divided else out


def _find_names(config: ModelConfig, weights: Weights) -> _Names:
    for names in _LAYOUTS:
        if weights.has(f"{names.part}.gate.weight"):
            return names
    routers = " or ".join(f"{weights.prefix}{names.part}.gate.weight" for names in _LAYOUTS)
    raise ConfigError(f"{config.path} has no router {routers}: the checkpoint is incomplete or another model's")


def _read_router(experts: ExpertsConfig, hidden: int, weights: Weights) -> Linear:
    bias = weights.tensor("gate.bias", experts.num_experts) if experts.has_router_bias else None
    return weights.linear_of("gate", weights.tensor("gate.weight", experts.num_experts, hidden), bias, is_wide=True)


def _read_correction(experts: ExpertsConfig, weights: Weights) -> torch.Tensor | None:
    if not experts.has_correction_bias:
        return None
    return replace(weights, dtype=torch.float32).tensor("gate.e_score_correction_bias", experts.num_experts)


def _load_experts(experts: ExpertsConfig, hidden: int, weights: Weights, names: _Names) -> GroupedExperts:
    """Reads and packs one expert after another, so that no second copy of all of them is in memory."""
    count, inner, own = experts.num_experts, experts.intermediate_size, weights.share.part
    shape = ExpertsShape(
        num_slots=count,
        in_features=hidden,
        own_inner=len(own(inner)),
        inner=inner,
        out_features=len(own(hidden)),
        dtype=weights.dtype,
        is_clamped=experts.activation == CLAMPED,
    )
    made = _make_grouped(shape, weights)
    is_fused = not weights.has(f"experts.0.{names.gate}.weight") and weights.has("experts.gate_up_proj")
    read = _read_fused if is_fused else _read_single
    for expert in range(count):
        gate_up, down = read(experts, hidden, weights, names, expert)
        made.store(expert, gate_up, down)
        for name, stored, weight in zip(("gate_up", "down"), made.weights(expert), (gate_up, down), strict=True):
            weights.check(f"{weights.prefix}experts.{expert}.{name}", stored, weight)
    return made


def _make_grouped(shape: ExpertsShape, weights: Weights) -> GroupedExperts:
    if is_interpreted():
        return ReferenceExperts(shape, partial(Linear, deterministic=weights.deterministic))
    return make_experts(shape)


def _read_single(
    experts: ExpertsConfig, hidden: int, weights: Weights, names: _Names, expert: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns this rank's gate and up rows, [2 own I, H], and its rows of down, [own H, I]."""
    inner, own = experts.intermediate_size, weights / "experts" / expert
    gate_up = own.tensors({f"{names.gate}.weight": inner, f"{names.up}.weight": inner}, hidden)
    return gate_up, own.tensors({f"{names.down}.weight": hidden}, inner)


def _read_fused(
    experts: ExpertsConfig, hidden: int, weights: Weights, names: _Names, expert: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Does the same for tensors that hold all experts, each gate first and then up."""
    count, inner = experts.num_experts, experts.intermediate_size
    gate = weights.share.part(inner)
    rows = [gate, range(inner + gate.start, inner + gate.stop)]
    gate_up = weights.of_expert("experts.gate_up_proj", expert, (count, 2 * inner, hidden), rows)
    own = [weights.share.part(hidden)]
    return gate_up, weights.of_expert("experts.down_proj", expert, (count, hidden, inner), own)
