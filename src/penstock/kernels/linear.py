"""A linear layer whose rows are independent of one another: `y = x @ weight.T + bias` with the weight packed once.

`torch.nn.functional.linear` picks its kernel by the number of rows, and a row's last bits change with it. Here every
output element is one float32 accumulation over K in an order that depends only on K, rounded once: the same bits for
one row and for four thousand, for any other rows, any position in the batch and any number of threads. The bits do
differ between arithmetics (`native.ARITHMETIC`), within rounding.

The packed weight is the layer's own memory, of the weight's size with N padded to a multiple of 32 (and K too, for
bfloat16 with AVX512-BF16 or AMX); the caller may free the original. `native.set_num_threads` sets the number of
threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
import torch.nn.functional as F

from penstock.kernels.host_memory import aligned_bytes
from penstock.kernels.native import DTYPE_CODES, NativeLibrary, library, num_threads

# Output features of a panel of packed weights.
PANEL = 32
_TILE_ROWS = 16


class PackedLinear:
    """Multiplies by one weight, [out_features, in_features] in bfloat16, float16 or float32.

    The output has the weight's dtype, or with `is_wide` float32, the dtype of the sums, without rounding. Calls may be
    made from several threads concurrently. Raises `TypeError` at construction for any other dtype.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        is_wide: bool = False,
        library: Callable[[], NativeLibrary | None] = library,
    ) -> None:
        """`library` returns the one with an instruction set, or None for torch; by default what this process uses."""
        if weight.dtype not in DTYPE_CODES:
            raise TypeError(f"a linear layer's weight is bfloat16, float16 or float32, not {weight.dtype}")
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.out_dtype = torch.float32 if is_wide else weight.dtype
        assert bias is None or bias.shape == (self.out_features,), f"{bias.shape} for {self.out_features} outputs"
        weight = weight.detach().contiguous()
        native = library()
        if native is None:
            self._into: _NativeLinear | _TorchLinear = _TorchLinear(weight, bias, self.out_dtype)
        else:
            self._into = _NativeLinear(native, weight, bias, is_wide)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, in_features] -> [rows, out_features] in `out_dtype`, both contiguous."""
        out = x.new_empty((x.shape[0], self.out_features), dtype=self.out_dtype)
        self.into(x, out)
        return out

    def dense_weight(self) -> torch.Tensor:
        """Returns a copy [out_features, in_features] of the packed weight, in which denormal numbers may be zero."""
        return self._into.dense_weight().to(self.dtype)

    def into(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Writes the product to `out`, [rows, out_features], which must not overlap `x`."""
        assert (x.dtype, out.dtype) == (self.dtype, self.out_dtype), f"{x.dtype} -> {out.dtype} by {self.dtype}"
        assert x.shape[1:] == (self.in_features,) and x.is_contiguous(), f"{x.shape} for K={self.in_features}"
        assert out.shape == (x.shape[0], self.out_features) and out.is_contiguous(), f"{out.shape} for {x.shape}"
        if x.shape[0]:
            self._into(x, out)


class _Descriptor(ctypes.Structure):
    """`Linear` in native/linear.h."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("in_features", ctypes.c_int64),
        ("out_features", ctypes.c_int64),
        ("dtype", ctypes.c_int64),
        ("is_wide", ctypes.c_int64),
    )


class PackedWeights:
    """The packed weights [out_features, in_features] of `count` layers of one shape, one after another in memory."""

    def __init__(
        self,
        native: NativeLibrary,
        count: int,
        out_features: int,
        in_features: int,
        dtype: torch.dtype,
        allocate: Callable[[int], torch.Tensor] = aligned_bytes,
    ) -> None:
        self._native = native
        self._dtype = dtype
        self._shape = out_features, in_features
        descriptor = _Descriptor(0, 0, in_features, out_features, DTYPE_CODES[dtype], 0)
        self._bytes = native.function("linear_packed_bytes", "p", "n")(ctypes.addressof(descriptor))
        self.packed = allocate(count * self._bytes)

    @property
    def address(self) -> int:
        return self.packed.data_ptr()

    def descriptor(self, number: int = 0, bias: torch.Tensor | None = None, is_wide: bool = False) -> _Descriptor:
        """Returns the layer of one of the weights; the caller keeps the bias, in float32."""
        (out_features, in_features), code = self._shape, DTYPE_CODES[self._dtype]
        bias_address = None if bias is None else bias.data_ptr()
        return _Descriptor(self.address + number * self._bytes, bias_address, in_features, out_features, code, is_wide)

    def store(self, number: int, weight: torch.Tensor) -> None:
        assert weight.shape == self._shape and weight.dtype == self._dtype, f"{weight.shape} for {self._shape}"
        descriptor, weight = self.descriptor(number), weight.detach().contiguous()
        pack = self._native.function("linear_pack", "ppn")
        pack(ctypes.addressof(descriptor), weight.data_ptr(), num_threads())

    def dense_weight(self, number: int = 0) -> torch.Tensor:
        """Returns a copy [out_features, in_features] of one, in which denormal numbers may be zero."""
        out_features, in_features = self._shape
        identity = torch.eye(in_features, dtype=self._dtype)
        out = identity.new_empty((in_features, out_features))
        descriptor = self.descriptor(number)
        run = self._native.function("linear", "pppnn")
        run(ctypes.addressof(descriptor), identity.data_ptr(), out.data_ptr(), in_features, num_threads())
        return out.T.contiguous()


class _NativeLinear:
    def __init__(self, native: NativeLibrary, weight: torch.Tensor, bias: torch.Tensor | None, is_wide: bool) -> None:
        self._run = native.function("linear", "pppnn")
        self._bias = None if bias is None else bias.detach().to(torch.float32, copy=True).contiguous()
        self._packed = PackedWeights(native, 1, weight.shape[0], weight.shape[1], weight.dtype)
        self._packed.store(0, weight)
        self._descriptor = self._packed.descriptor(0, self._bias, is_wide)
        self._address = ctypes.addressof(self._descriptor)

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self._run(self._address, x.data_ptr(), out.data_ptr(), x.shape[0], num_threads())

    def dense_weight(self) -> torch.Tensor:
        return self._packed.dense_weight()


class _TorchLinear:
    """The reference: `F.linear` on tiles of always the same shape, each at the same alignment.

    One shape means one kernel, so the rest of the batch cannot change a row; rows may still be computed differently by
    their position in the tile, so the tile is 16 rows high only if equal rows give equal results for this weight, else
    one row. In float32 the bits depend on the number of threads, as torch's products do: do not change it if tokens
    must agree. Wide output has a float32 copy of the weight, because torch rounds to the dtype of its operands.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype) -> None:
        self._weight = weight = weight.to(out_dtype, copy=True)
        self._bias = None if bias is None else bias.detach().to(out_dtype, copy=True)
        generator = torch.Generator().manual_seed(0)
        row = torch.randn(1, weight.shape[1], generator=generator).to(weight.dtype)
        rows = F.linear(row.expand(_TILE_ROWS, -1).contiguous(), self._weight, self._bias)
        self._tile_rows = _TILE_ROWS if torch.equal(rows, rows[:1].expand_as(rows)) else 1

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> None:
        for first in range(0, x.shape[0], self._tile_rows):
            part = x[first : first + self._tile_rows]
            tile = out.new_zeros((self._tile_rows, x.shape[1]))
            tile[: part.shape[0]] = part
            out[first : first + self._tile_rows] = F.linear(tile, self._weight, self._bias)[: part.shape[0]]

    def dense_weight(self) -> torch.Tensor:
        return self._weight.clone()
