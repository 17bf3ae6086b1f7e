"""A linear layer whose rows are independent of one another: `y = x @ weight.T + bias` with the weight packed once.

`torch.nn.functional.linear` picks its kernel by the number of rows, and a row's last bits change with it. Here every
output element is one float32 accumulation over K in an order that depends only on K, rounded once: the same bits for
one row and for four thousand, for any other rows, any position in the batch and any number of threads. The bits do
differ between arithmetics (`native.ARITHMETIC`), within rounding.

The packed weight is the layer's own memory, of the weight's size with N padded to a multiple of 32 (and K too, for
bfloat16 with AVX512-BF16 or AMX); the caller may free the original. `native.set_num_threads` sets the number of
threads.

A quantized weight (`QuantizedWeight`) stays so: its codes are packed with their scales, and the bits of an output are
those of the layer with `dequantize()` as its weight. Float16 and float32 layers, and torch, take those values at once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
import torch.nn.functional as F

from penstock.kernels.host_memory import aligned_bytes
from penstock.kernels.native import DTYPE_CODES, NativeLibrary, library, num_threads
from penstock.kernels.quantized import E4M3, QuantizedWeight, dense, integers, signed_integers, sum_groups, sum_rows

# Output features of a panel of packed weights.
PANEL = 32
_TILE_ROWS = 16


class PackedLinear:
    """Multiplies by one weight, [out_features, in_features] in bfloat16, float16 or float32, or quantized.

    The output has the weight's dtype, or with `is_wide` float32, the dtype of the sums, without rounding. Calls may be
    made from several threads concurrently. Raises `TypeError` at construction for any other dtype.
    """

    def __init__(
        self,
        weight: torch.Tensor | QuantizedWeight,
        bias: torch.Tensor | None = None,
        is_wide: bool = False,
        library: Callable[[], NativeLibrary | None] = library,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """`library` returns the one with an instruction set, or None for torch; by default what this process uses.

        `dtype` is that of a layer whose weight is quantized.
        """
        self.dtype = dtype if isinstance(weight, QuantizedWeight) else weight.dtype
        if self.dtype not in DTYPE_CODES:
            raise TypeError(f"a linear layer's weight is bfloat16, float16 or float32, not {self.dtype}")
        self.out_features, self.in_features = weight.shape
        self.out_dtype = torch.float32 if is_wide else self.dtype
        assert bias is None or bias.shape == (self.out_features,), f"{bias.shape} for {self.out_features} outputs"
        native = library()
        quantizes_inputs = isinstance(weight, QuantizedWeight) and weight.quantizes_inputs is not None
        if self.dtype != torch.bfloat16 or (native is None and not quantizes_inputs):
            weight = dense(weight, self.dtype)
        self._into: _NativeLinear | _TorchLinear | _TorchRounded
        if native is not None:
            self._into = _NativeLinear(native, weight, bias, is_wide)
        elif isinstance(weight, QuantizedWeight):
            self._into = _TorchRounded(weight, bias)
        else:
            self._into = _TorchLinear(weight.detach().contiguous(), bias, self.out_dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, in_features] -> [rows, out_features] in `out_dtype`, both contiguous."""
        out = x.new_empty((x.shape[0], self.out_features), dtype=self.out_dtype)
        self.into(x, out)
        return out

    def dense_weight(self) -> torch.Tensor:
        """Returns a copy [out_features, in_features] of the packed weight, in which denormal numbers may be zero."""
        return self._into.dense_weight().to(self.dtype)

    def into(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Writes the product to `out`, [rows, out_features], columns of a tensor or all, which must not overlap `x`."""
        assert (x.dtype, out.dtype) == (self.dtype, self.out_dtype), f"{x.dtype} -> {out.dtype} by {self.dtype}"
        assert x.shape[1:] == (self.in_features,) and x.is_contiguous(), f"{x.shape} for K={self.in_features}"
        assert out.shape == (x.shape[0], self.out_features) and out.stride(1) == 1, f"{out.shape} for {x.shape}"
        if x.shape[0]:
            self._into(x, out)


def into_one(layers: Sequence[PackedLinear], x: torch.Tensor) -> torch.Tensor:
    """Returns the layers' products beside one another, [rows, all out_features]."""
    sizes = [layer.out_features for layer in layers]
    out = x.new_empty((len(x), sum(sizes)), dtype=layers[0].out_dtype)
    for layer, columns in zip(layers, out.split(sizes, 1), strict=True):
        layer.into(x, columns)
    return out


class _Kind(IntEnum):
    """`QuantizedKind` in native/linear_quantized.h."""

    NIBBLES = 0
    INTEGERS = 1
    FLOATS = 2
    TABLE = 3
    SUMS = 4
    FIVES = 5
    SIXES = 6
    FOURS = 7


class QuantizationDescriptor(ctypes.Structure):
    """`Quantization` in native/linear_quantized.h."""

    _fields_ = (
        ("kind", ctypes.c_int64),
        ("group", ctypes.c_int64),
        ("number_type", ctypes.c_int64),
        ("has_zeros", ctypes.c_int64),
        ("has_minima", ctypes.c_int64),
        ("has_extremes", ctypes.c_int64),
        ("factor_groups", ctypes.c_int64),
        ("is_exact", ctypes.c_int64),
        ("input_group", ctypes.c_int64),
        ("codebook", ctypes.c_float * 256),
    )


# Scales below it may be multiplied by 256.
_LARGEST_SCALE = 2.0**100


@dataclass(frozen=True, slots=True, eq=False)
class PackedFormat:
    """How the kernels store the weights of one kind (`QuantizedWeight.is_like`)."""

    example: QuantizedWeight  # without rows
    kind: _Kind
    # Of scales, zeros and minima.
    number_type: torch.dtype
    # What the stored integers, and the zeros, are less than the weight's.
    shift: int = 0

    @classmethod
    def of(cls, weight: QuantizedWeight, narrows: bool = False) -> PackedFormat:
        """Chooses the format for weights like one; with `narrows` of this weight alone, which may need less memory."""
        numbers = [each for each in (weight.scales, weight.zeros, weight.minima) if each is not None]
        types = {each.dtype for each in numbers}
        number_type = types.pop() if len(types) == 1 else torch.float32
        # A copy: a part, even one without rows, would keep the memory of all codes.
        example = weight.reordered(torch.empty(0, dtype=torch.int64))
        if weight.quantizes_inputs == "by row":
            return cls(example, _Kind.SUMS, torch.float32)
        kind, shift = _kind_of(weight)
        if weight.quantizes_inputs and kind in (_Kind.FLOATS, _Kind.TABLE):
            raise ValueError("inputs are quantized only for weights in integers, whose zeros are integers too")
        if weight.factors is not None:
            if shift:
                raise ValueError("integers whose scales have factors must fit 8 bits with a sign")
            return cls(example, kind, torch.int8)
        if narrows and number_type == torch.float32:
            stored = [each.float() - (shift if each is weight.zeros else 0) for each in numbers]
            for narrow in (torch.bfloat16, torch.float16):
                if all(torch.equal(each.to(narrow).float(), each) for each in stored):
                    number_type = narrow
                    break
        return cls(example, kind, number_type, shift)

    def descriptor(self) -> QuantizationDescriptor:
        example = self.example
        has_zeros, has_minima = example.zeros is not None or self.shift != 0, example.minima is not None
        code = DTYPE_CODES.get(self.number_type, 0)
        made = QuantizationDescriptor(self.kind, example.group, code, has_zeros, has_minima, 0, example.factor_groups)
        is_short = self.number_type != torch.float32 and _are_small_integers(example.codebook)
        made.is_exact = is_short and not (has_zeros and has_minima)
        made.input_group = example.input_group if example.quantizes_inputs == "by group" else 0
        made.codebook[: len(example.codebook)] = example.codebook.tolist()
        return made

    def stored(self, weight: QuantizedWeight) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        """Returns the codes and the scales, zeros and minima as they are packed, with factors in the place of zeros.
        Raises ValueError for another kind.
        """
        if not self.example.is_like(weight) or PackedFormat.of(weight).kind != self.kind:
            raise ValueError("weights of several kinds cannot be packed together")
        codes, zeros = weight.codes, weight.zeros
        if self.kind == _Kind.INTEGERS and not torch.equal(weight.codebook, signed_integers(8)):
            codes = (weight.codebook - self.shift).to(torch.int8).view(torch.uint8)[codes.int()]
        if self.shift:
            zeros = (torch.zeros_like(weight.scales) if zeros is None else zeros).float() - self.shift
        numbers = [None if each is None else self._narrow(each) for each in (weight.scales, zeros, weight.minima)]
        if weight.factors is not None:
            numbers[1] = weight.factors.movedim(0, 2).contiguous()
        return codes.contiguous(), numbers

    def _narrow(self, numbers: torch.Tensor) -> torch.Tensor:
        narrow = numbers.to(self.number_type).contiguous()
        if narrow.dtype != numbers.dtype and not torch.equal(narrow.float(), numbers.float()):
            raise ValueError(f"scales or zeros that are no {self.number_type} cannot be packed with such as are")
        return narrow


def _are_small_integers(codebook: torch.Tensor) -> bool:
    """Whether products with scales of 16 bits, or of 8 bits times a factor, fit the 24 bits of a float32."""
    return bool(codebook.abs().max() < 64 and torch.equal(codebook, codebook.round()))


def _kind_of(weight: QuantizedWeight) -> tuple[_Kind, int]:
    """Returns the kind that the kernels have for a weight, and what is subtracted from its integers."""
    codebook = weight.codebook
    counts_up = _are_small_integers(codebook) and torch.equal(codebook, integers(weight.bits, int(-codebook[0])))
    # The first entry is added to the zeros: with minima, or with large zeros, that would round once more.
    fits = codebook[0] == 0 or (weight.zeros is None and weight.minima is None)
    # With 5 and 6 bits the kernels have fused operations only, which must be exact.
    if counts_up and fits and (weight.bits == 4 or (weight.zeros is None and weight.scales.dtype != torch.float32)):
        return {4: _Kind.FOURS, 5: _Kind.FIVES, 6: _Kind.SIXES}[weight.bits], 0
    if weight.bits == 4:
        return (_Kind.NIBBLES if torch.equal(codebook.bfloat16().float(), codebook) else _Kind.TABLE), 0
    is_e4m3 = torch.equal(codebook.nan_to_num(), E4M3.nan_to_num())
    if is_e4m3 and weight.zeros is None and (weight.scales.abs() < _LARGEST_SCALE).all():
        return _Kind.FLOATS, 0
    if torch.equal(codebook, codebook.round()) and not (codebook.signbit() & (codebook == 0)).any():
        for shift in (0, 128):
            is_inside = codebook.min() >= shift - 128 and codebook.max() < shift + 128
            # Differences of integers are exact, whatever is subtracted from both.
            if is_inside and (shift == 0 or weight.zeros is None or torch.equal(weight.zeros, weight.zeros.round())):
                return _Kind.INTEGERS, shift
    return _Kind.TABLE, 0


class _Descriptor(ctypes.Structure):
    """`Linear` in native/linear.h."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("in_features", ctypes.c_int64),
        ("out_features", ctypes.c_int64),
        ("dtype", ctypes.c_int64),
        ("is_wide", ctypes.c_int64),
        ("quantization", ctypes.c_void_p),
    )


class PackedWeights:
    """The packed weights [out_features, in_features] of `count` layers of one shape, one after another in memory.

    With `format` they are quantized, but for types other than bfloat16, which take the values.
    """

    def __init__(
        self,
        native: NativeLibrary,
        count: int,
        out_features: int,
        in_features: int,
        dtype: torch.dtype,
        allocate: Callable[[int], torch.Tensor] = aligned_bytes,
        format: PackedFormat | None = None,
    ) -> None:
        self._native = native
        self._dtype = dtype
        self._shape = out_features, in_features
        self._format = format if dtype == torch.bfloat16 else None
        self._quantization = None if self._format is None else self._format.descriptor()
        if self._quantization is not None and allocate is not aligned_bytes:
            # Other ranks may bring weights with extreme values there, or zeros that are no integers.
            self._quantization.has_extremes, self._quantization.is_exact = 1, 0
        descriptor = _Descriptor(0, 0, in_features, out_features, DTYPE_CODES[dtype], 0, self.quantization)
        self._bytes = native.function("linear_packed_bytes", "p", "n")(ctypes.addressof(descriptor))
        self.packed = allocate(count * self._bytes)

    @property
    def address(self) -> int:
        return self.packed.data_ptr()

    @property
    def quantization(self) -> int | None:
        """The address of the weights' description, or None if they are not quantized."""
        return None if self._quantization is None else ctypes.addressof(self._quantization)

    def descriptor(self, number: int = 0, bias: torch.Tensor | None = None, is_wide: bool = False) -> _Descriptor:
        """Returns the layer of one of the weights; the caller keeps the bias, in float32."""
        (out_features, in_features), code = self._shape, DTYPE_CODES[self._dtype]
        bias_address, at = None if bias is None else bias.data_ptr(), self.address + number * self._bytes
        return _Descriptor(at, bias_address, in_features, out_features, code, is_wide, self.quantization)

    def store(self, number: int, weight: torch.Tensor | QuantizedWeight) -> None:
        """Raises ValueError for a quantized weight of another kind than the format's."""
        assert weight.shape == self._shape, f"{weight.shape} for {self._shape}"
        descriptor = self.descriptor(number)
        if self._format is not None and self._quantization is not None:
            if not isinstance(weight, QuantizedWeight):
                raise ValueError("a weight that is not quantized cannot be packed with some that are")
            codes, numbers = self._format.stored(weight)
            self._quantization.has_extremes |= weight.has_extreme_values()
            self._quantization.is_exact &= weight.zeros is None or torch.equal(weight.zeros, weight.zeros.round())
            pack = self._native.function("linear_pack_quantized", "pppppn")
            addresses = [each if each is None else each.data_ptr() for each in numbers]
            pack(ctypes.addressof(descriptor), codes.data_ptr(), *addresses, num_threads())
            return
        weight = dense(weight, self._dtype).detach().contiguous()
        assert weight.dtype == self._dtype, f"{weight.dtype} for {self._dtype}"
        pack = self._native.function("linear_pack", "ppn")
        pack(ctypes.addressof(descriptor), weight.data_ptr(), num_threads())

    def dense_weight(self, number: int = 0) -> torch.Tensor:
        """Returns a copy [out_features, in_features] of one, in which denormal numbers may be zero."""
        if self._format is not None and self._format.kind == _Kind.SUMS:
            return self._unpack_sums(number, self._format).dequantize()
        out_features, in_features = self._shape
        descriptor = self.descriptor(number)
        if self._quantization is not None and self._quantization.input_group:
            values = torch.empty(self._shape, dtype=self._dtype)
            unpack = self._native.function("linear_unpack", "ppn")
            unpack(ctypes.addressof(descriptor), values.data_ptr(), num_threads())
            return values
        identity = torch.eye(in_features, dtype=self._dtype)
        out = identity.new_empty((in_features, out_features))
        run = self._native.function("linear", "pppnnn")
        run(ctypes.addressof(descriptor), identity.data_ptr(), out.data_ptr(), out_features, in_features, num_threads())
        return out.T.contiguous()

    def _unpack_sums(self, number: int, format: PackedFormat) -> QuantizedWeight:
        """Reads the panels of native/linear_integers.h: their products have no bits of the values."""
        rows, inputs = self._shape
        panels = self.packed[number * self._bytes : (number + 1) * self._bytes].view(-(-rows // PANEL), -1)
        scales = panels[:, : 4 * PANEL].contiguous().view(torch.float32).view(-1, 1)
        codes = panels[:, 8 * PANEL :].reshape(len(panels), -1, PANEL, 4).transpose(1, 2).reshape(len(scales), -1)
        return QuantizedWeight(
            codes[:rows, :inputs], format.example.codebook, scales[:rows], inputs, bits=8, quantizes_inputs="by row"
        )


class _NativeLinear:
    def __init__(
        self, native: NativeLibrary, weight: torch.Tensor | QuantizedWeight, bias: torch.Tensor | None, is_wide: bool
    ) -> None:
        self._run = native.function("linear", "pppnnn")
        self._bias = None if bias is None else bias.detach().to(torch.float32, copy=True).contiguous()
        format = PackedFormat.of(weight, narrows=True) if isinstance(weight, QuantizedWeight) else None
        dtype = torch.bfloat16 if isinstance(weight, QuantizedWeight) else weight.dtype
        self._packed = PackedWeights(native, 1, weight.shape[0], weight.shape[1], dtype, format=format)
        self._packed.store(0, weight)
        self._descriptor = self._packed.descriptor(0, self._bias, is_wide)
        self._address = ctypes.addressof(self._descriptor)

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self._run(self._address, x.data_ptr(), out.data_ptr(), out.stride(0), x.shape[0], num_threads())

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


class _TorchRounded:
    """The reference of a layer that quantizes its inputs: the products (`sum_rows`, `sum_groups`), then the bias."""

    def __init__(self, weight: QuantizedWeight, bias: torch.Tensor | None) -> None:
        self._weight = weight
        self._bias = None if bias is None else bias.detach().to(torch.float32, copy=True)

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> None:
        sums = (sum_rows if self._weight.quantizes_inputs == "by row" else sum_groups)(x, self._weight)
        out.copy_(sums if self._bias is None else sums + self._bias)

    def dense_weight(self) -> torch.Tensor:
        return self._weight.dequantize()
