"""Normalisation: by the root mean square (Zhang and Sennrich 2019, arXiv:1910.07467), and of whole layers."""

from __future__ import annotations

from typing import Protocol

import torch

from penstock.kernels.layer_norm import layer_norm
from penstock.kernels.residual import add
from penstock.kernels.rms_norm import add_rms_norm, rms_norm


class Norm(Protocol):
    weight: torch.Tensor  # [hidden_size]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden_size] -> the same, normalised."""
        ...

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Adds `x` to `residual` in place and returns the sum normalised."""
        ...


class RMSNorm:
    """A `Norm`. A float32 weight of a model of 16 bits is applied before the quotient is rounded."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight = weight  # [hidden_size]
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden_size] -> the same, normalised."""
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Adds `x` to `residual` in place and returns the sum normalised."""
        return add_rms_norm(x, residual, self.weight, self.eps)


class LayerNorm:
    """Layer normalisation (Ba et al. 2016, arXiv:1607.06450); a `Norm`."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> None:
        self.weight = weight  # [hidden_size]
        self.bias = bias  # [hidden_size]
        self.eps = eps

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """[num_tokens, hidden_size] each -> the sum, normalised; it is not rounded before."""
        return layer_norm(x, residual, self.weight, self.bias, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """See `Norm.add`."""
        residual += x
        return self(residual)


class SumOnly:
    """Stands where a layer has no norm, with the interface of `Norm.add`."""

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Adds `x` to `residual` in place and returns it: read only, until the next addition."""
        add(x, residual)
        return residual
