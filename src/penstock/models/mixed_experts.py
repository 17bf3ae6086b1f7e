"""Experts of one layer that are quantized in several ways.

A rank packs its experts alike (`GroupedExperts`). If they are of several kinds, all take the values that they stand
for, which gives the same bits and needs the memory of the model's dtype. Ranks may have experts of different kinds
where these stay; an expert that moves needs the same kind of memory on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from penstock.kernels.quantized import LayerWeight, QuantizedWeight
from penstock.models.weights import Weights, are_alike
from penstock.utils.errors import ConfigError

ExpertKinds = tuple[int, LayerWeight, LayerWeight]
"""An expert's number, and its gate_up and down, which may be without rows."""


def check_alike(of_layer: str, weights: Weights, first: ExpertKinds, others: Iterable[ExpertKinds]) -> bool:
    """Returns whether the experts of a layer, which errors call `of_layer`, are quantized in one way.

    Raises ConfigError if they are not, and either move, or one of them quantizes its inputs: then its values alone give
    other bits.
    """
    parallel, is_alike = weights.expert_parallel, True
    moves = parallel is not None and parallel.balancing is not None
    for expert, *parts in others:
        for name, one, other in zip(("gate_up", "down"), first[1:], parts, strict=True):
            if are_alike(one, other):
                continue
            is_alike = False
            if moves:
                reason = "enable_eplb moves experts of one kind alone: leave it out, or"
            elif any(isinstance(each, QuantizedWeight) and each.quantizes_inputs for each in (one, other)):
                reason = "if inputs are quantized, experts must be alike: leave quantize_activations out, or"
            else:
                continue
            raise ConfigError(
                f"{of_layer} are quantized in several ways, {name} of experts.{first[0]} in {_in_words(one)} and of "
                f"experts.{expert} in {_in_words(other)}; {reason} quantize all experts of a layer alike"
            )
    return is_alike


def _in_words(weight: LayerWeight) -> str:
    if not isinstance(weight, QuantizedWeight):
        return str(weight.dtype).removeprefix("torch.")
    codebook = weight.codebook.nan_to_num()
    numbers = "integers" if torch.equal(codebook, codebook.round()) else "floats"
    zeros = " and zero points" if weight.zeros is not None else ""
    inputs = " times 8-bit inputs" if weight.quantizes_inputs else ""
    return f"{weight.bits}-bit {numbers} with scales{zeros} of {weight.group} inputs{inputs}"
