"""Normalisation: by the root mean square (Zhang and Sennrich 2019, arXiv:1910.07467), and of whole layers."""

from __future__ import annotations

import torch

from penstock.kernels.layer_norm import layer_norm
from penstock.kernels.rms_norm import add_rms_norm, rms_norm


class RMSNorm:
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
    """Layer normalisation (Ba et al. 2016, arXiv:1607.06450)."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> None:
        self.weight = weight  # [hidden_size]
        self.bias = bias  # [hidden_size]
        self.eps = eps

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden_size] each -> the sum, normalised."""
        return layer_norm(x, residual, self.weight, self.bias, self.eps)
