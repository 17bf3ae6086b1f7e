"""A product for each attention head: `y[head] = x[head] @ weight[head].T`.

Computed like experts of which each has the rows of one head, so every output has the bits that a `PackedLinear` of its
head alone would give it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from penstock.kernels.experts import ExpertsDescriptor
from penstock.kernels.linear import PackedLinear, PackedWeights
from penstock.kernels.native import DTYPE_CODES, NativeLibrary, library, num_threads


class PackedHeads:
    """Multiplies by one weight, [heads, out_features, in_features] in bfloat16, float16 or float32."""

    def __init__(self, weight: torch.Tensor, library: Callable[[], NativeLibrary | None] = library) -> None:
        """`library` is as for `PackedLinear`."""
        self.shape, self.dtype = weight.shape, weight.dtype
        native = library()
        self._heads: _NativeHeads | list[PackedLinear]
        if native is None:
            self._heads = [PackedLinear(each, library=library) for each in weight]
        else:
            self._heads = _NativeHeads(native, weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[heads, rows, in_features] -> [heads, rows, out_features], both contiguous."""
        heads, out_features, in_features = self.shape
        assert x.dtype == self.dtype and x.is_contiguous(), f"{x.dtype} with strides {x.stride()} by {self.dtype}"
        assert (len(x), x.shape[2]) == (heads, in_features), f"{tuple(x.shape)} for {tuple(self.shape)}"
        out = x.new_empty((heads, x.shape[1], out_features))
        if isinstance(self._heads, _NativeHeads):
            self._heads(x, out)
            return out
        for head, own_x, own_out in zip(self._heads, x, out, strict=True):
            head.into(own_x, own_out)
        return out

    def dense_weight(self) -> torch.Tensor:
        """Returns a copy of the packed weight, in which denormal numbers may be zero."""
        if isinstance(self._heads, _NativeHeads):
            return self._heads.dense_weight()
        return torch.stack([head.dense_weight() for head in self._heads])


class _NativeHeads:
    def __init__(self, native: NativeLibrary, weight: torch.Tensor) -> None:
        heads, out_features, in_features = weight.shape
        self._run = native.function("experts_down", "ppppn")
        self._packed = PackedWeights(native, heads, out_features, in_features, weight.dtype)
        for head, own in enumerate(weight):
            self._packed.store(head, own)
        self._descriptor = ExpertsDescriptor(
            down=self._packed.address,
            num_slots=heads,
            inner=in_features,
            out_features=out_features,
            dtype=DTYPE_CODES[weight.dtype],
        )
        self._address = ctypes.addressof(self._descriptor)
        self._bounds = torch.arange(heads + 1, dtype=torch.int32)

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> None:
        starts = self._bounds * x.shape[1]
        self._run(self._address, x.data_ptr(), starts.data_ptr(), out.data_ptr(), num_threads())

    def dense_weight(self) -> torch.Tensor:
        return torch.stack([self._packed.dense_weight(head) for head in range(len(self._bounds) - 1)])
