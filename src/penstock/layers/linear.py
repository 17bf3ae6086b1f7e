"""Linear layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from penstock.kernels.linear import PackedLinear


class Linear:
    """`x @ weight.T + bias`, [num_tokens, in_features] -> [num_tokens, out_features].

    On the CPU the weight is packed for kernels whose rows are independent of each other, and the given tensor is free
    to go; on other devices it is used as it is.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.bias = bias  # [out_features]
        self._apply = PackedLinear(weight, bias) if weight.device.type == "cpu" else _DenseLinear(weight, bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._apply(x)

    def dense_weight(self) -> torch.Tensor:
        """[out_features, in_features]: the layer's own tensor where it is used as it is; on the CPU, where it is
        packed, a copy, for whoever compares the two."""
        return self._apply.dense_weight()


class _DenseLinear:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight, self._bias)

    def dense_weight(self) -> torch.Tensor:
        return self._weight
