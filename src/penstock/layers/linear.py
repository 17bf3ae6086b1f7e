"""Linear layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F

from penstock.kernels.dispatch import uses_triton
from penstock.kernels.heads_linear import PackedHeads
from penstock.kernels.linear import PackedLinear, into_one
from penstock.kernels.lora import LoraLayer
from penstock.kernels.quantized import QuantizedWeight
from penstock.parallel.groups import TensorGroup
from penstock.parallel.topology import Share


class Linear:
    """`x @ weight.T + bias`, [num_tokens, in_features] -> [num_tokens, out_features].

    On a CPU the weight is packed for kernels whose rows are independent of each other, and the given tensor may be
    freed. On a GPU it is used unchanged: by cuBLAS, whose last bits depend on the number of rows, or `deterministic`.
    The output has the dtype of `x`, or the accumulators' float32 if the CPU's kernels compute and the layer `is_wide`.

    A quantized weight stays quantized on a CPU; on a GPU the layer has its values. `dtype` is then that of `x`.

    `adapters` are those of the layer's LoRA, if it may have any.
    """

    adapters: LoraLayer | None = None

    def __init__(
        self,
        weight: torch.Tensor | QuantizedWeight,
        bias: torch.Tensor | None = None,
        deterministic: bool = False,
        is_wide: bool = False,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        if isinstance(weight, QuantizedWeight) and uses_triton(weight.codes):
            weight = weight.dequantize().to(dtype)
        self.bias = bias  # [out_features]
        if isinstance(weight, QuantizedWeight):
            self.out_dtype = torch.float32 if is_wide else dtype
            self._apply: _Product = PackedLinear(weight, bias, is_wide, dtype=dtype)
            return
        is_wide = is_wide and not uses_triton(weight)
        self.out_dtype = torch.float32 if is_wide else weight.dtype
        self._apply = _choose(weight, bias, deterministic, is_wide)

    @classmethod
    def joined(cls, parts: Sequence[Linear]) -> Linear:
        """Returns the layer with the outputs of all parts, one after another, whose weights are of several kinds."""
        layer = cls.__new__(cls)
        layer.bias = None  # the parts have their own
        layer.out_dtype = parts[0].out_dtype
        layer._apply = _Joined([part._apply for part in parts])
        return layer

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = self._apply(x)
        if self.adapters is not None:
            self.adapters.add(x, out)
        return out

    def dense_weight(self) -> torch.Tensor:
        """Returns [out_features, in_features]: the layer's own tensor if it is used unchanged; on the CPU, where it is
        packed, a copy.
        """
        return self._apply.dense_weight()


class HeadsLinear:
    """`x[head] @ weight[head].T`, [heads, num_tokens, in_features] -> [heads, num_tokens, out_features].

    On a CPU and on a GPU as for `Linear`.
    """

    def __init__(self, weight: torch.Tensor, deterministic: bool = False) -> None:
        self._apply = _choose_heads(weight, deterministic)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._apply(x)

    def dense_weight(self) -> torch.Tensor:
        """Returns [heads, out_features, in_features], as `Linear.dense_weight` does."""
        return self._apply.dense_weight()


class GatheredLinear:
    """A layer whose output features are divided among the ranks of a group: [T, in_features] -> [T, size].

    One rank computes each output exactly as a single rank would, so the group's size changes no bit. The result of more
    than one rank is valid as `TensorGroup.gather_columns` says.
    """

    def __init__(self, own: Linear, group: TensorGroup, size: int) -> None:
        self.own = own
        self.out_dtype = own.out_dtype
        self.group_size = group.count
        self._gather = Gather(group, Share(group.index, group.count).sizes(size))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._gather(self.own(x))

    def kept(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the same as a tensor that no other layer overwrites."""
        part = self.own(x)
        gathered = self._gather(part)
        return gathered if gathered is part else gathered.clone()


class JoiningLinear(Protocol):
    """A layer whose input features are divided among the ranks of a group: [T, own features] -> [T, size]."""

    own: Linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class GatheringLinear:
    """Gathers the input; every rank then computes its share of the outputs (`JoiningLinear`)."""

    def __init__(self, gather: Gather, layer: GatheredLinear) -> None:
        self.own = layer.own
        self._gather = gather
        self._layer = layer

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._layer(self._gather(x))


class SummingLinear:
    """Every rank has the weights of its own inputs, and the ranks add their results (`JoiningLinear`).

    One sum takes the place of two gathers, but the last bits depend on the number of ranks: see
    `TensorGroup.sum_parts`. Only one rank's layer may have a bias.
    """

    def __init__(self, own: Linear, group: TensorGroup) -> None:
        self.own = own
        self._group = group

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._group.sum_parts(self.own(x))


class Gather:
    """Concatenates the features of all ranks: [T, own features] -> [T, all]. Rank r has `sizes[r]` features."""

    def __init__(self, group: TensorGroup, sizes: Sequence[int]) -> None:
        self._group = group
        self._sizes = sizes

    def __call__(self, part: torch.Tensor) -> torch.Tensor:
        return self._group.gather_columns(part, self._sizes)


class _Product(Protocol):
    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def dense_weight(self) -> torch.Tensor: ...


class _Joined:
    def __init__(self, parts: Sequence[_Product]) -> None:
        self._parts = parts

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        packed = [part for part in self._parts if isinstance(part, PackedLinear)]
        return into_one(packed, x) if packed else torch.cat([part(x) for part in self._parts], 1)

    def dense_weight(self) -> torch.Tensor:
        return torch.cat([part.dense_weight() for part in self._parts])


class _DenseLinear:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight, self._bias)

    def dense_weight(self) -> torch.Tensor:
        return self._weight


class _DenseHeads:
    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x, self._weight.transpose(1, 2))

    def dense_weight(self) -> torch.Tensor:
        return self._weight


def _choose_heads(weight: torch.Tensor, deterministic: bool) -> _Product:
    if deterministic and uses_triton(weight):
        from penstock.kernels.triton.experts import HeadsProduct

        return HeadsProduct(weight)
    return PackedHeads(weight) if weight.is_cpu else _DenseHeads(weight)


def _choose(weight: torch.Tensor, bias: torch.Tensor | None, deterministic: bool, is_wide: bool) -> _Product:
    if deterministic and uses_triton(weight):
        # Imported here: a CPU needs no Triton.
        from penstock.kernels.triton.capabilities import Capabilities
        from penstock.kernels.triton.linear.matmul import Matmul

        return Matmul(weight, bias, Capabilities.of(weight.device))
    return PackedLinear(weight, bias, is_wide) if weight.is_cpu else _DenseLinear(weight, bias)
