"""The kinds of norm that decoders have, read from a checkpoint (`ReadNorm`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from penstock.layers.norm import LayerNorm, Norm, RMSNorm
from penstock.models.weights import Weights

ReadNorm = Callable[[Weights, str, int, float], Norm]
"""Reads the norm `name` of so many features, with an epsilon."""


def rms_norm(weights: Weights, name: str, size: int, eps: float) -> RMSNorm:
    """The quotient is rounded to the model's dtype, then multiplied by the weight and rounded again."""
    return RMSNorm(weights.tensor(f"{name}.weight", size), eps)


def rms_norm_rounded_once(weights: Weights, name: str, size: int, eps: float) -> RMSNorm:
    """The quotient is multiplied by the weight in float32 and then rounded (OLMo 2, gpt-oss)."""
    return RMSNorm(_float_weight(weights, name, size), eps)


def rms_norm_from_one(weights: Weights, name: str, size: int, eps: float) -> RMSNorm:
    """The checkpoint stores the weight less one; the product is rounded once (Gemma)."""
    return RMSNorm(1.0 + _float_weight(weights, name, size), eps)


def layer_norm(weights: Weights, name: str, size: int, eps: float) -> LayerNorm:
    """A layer norm without bias."""
    weights.check_on_cpu("layer norms")
    weight = weights.tensor(f"{name}.weight", size)
    return LayerNorm(weight, torch.zeros_like(weight), eps)


def _float_weight(weights: Weights, name: str, size: int) -> torch.Tensor:
    return replace(weights, dtype=torch.float32).tensor(f"{name}.weight", size)
