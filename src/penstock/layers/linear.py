"""Linear layers."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from penstock.kernels.dispatch import uses_triton
from penstock.kernels.linear import PackedLinear


class Linear:
    """`x @ weight.T + bias`, [num_tokens, in_features] -> [num_tokens, out_features].

    On a CPU the weight is packed for kernels whose rows are independent of each other, and the given tensor is free to
    go. On a GPU it is used as it is: by cuBLAS, whose last bits depend on how many rows there are, or `deterministic`.
    The output has the dtype of `x`; where the CPU's kernels compute and the layer `is_wide`, float32, as accumulated.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        deterministic: bool = False,
        is_wide: bool = False,
    ) -> None:
        is_wide = is_wide and not uses_triton(weight)
        self.bias = bias  # [out_features]
        self.out_dtype = torch.float32 if is_wide else weight.dtype
        self._apply = _choose(weight, bias, deterministic, is_wide)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._apply(x)

    def dense_weight(self) -> torch.Tensor:
        """[out_features, in_features]: the layer's own tensor where it is used as it is; on the CPU, where it is
        packed, a copy."""
        return self._apply.dense_weight()


class _Product(Protocol):
    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def dense_weight(self) -> torch.Tensor: ...


class _DenseLinear:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight, self._bias)

    def dense_weight(self) -> torch.Tensor:
        return self._weight


def _choose(weight: torch.Tensor, bias: torch.Tensor | None, deterministic: bool, is_wide: bool) -> _Product:
    if deterministic and uses_triton(weight):
        # Only now: a CPU needs no Triton.
        from penstock.kernels.triton.capabilities import Capabilities
        from penstock.kernels.triton.linear.matmul import Matmul

        return Matmul(weight, bias, Capabilities.of(weight.device))
    return PackedLinear(weight, bias, is_wide) if weight.is_cpu else _DenseLinear(weight, bias)
