"""Weights that stay quantized in memory: one type for every format of a checkpoint.

A weight is codes with a scale for every group of inputs. A format's reader makes one (`QuantizedWeight`), and linear
layers and experts pack it for their kernels, which compute bit for bit what they would compute with `dequantize()`.
Weights whose inputs are rounded too (`quantizes_inputs`) are the exception: their products are exact integer sums.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from penstock.kernels.native import library, num_threads

# Groups are multiples of it, but for a group of all inputs.
GROUP_STEP = 16
CODE_BITS = (4, 5, 6, 8)
# Numbers that are dequantised at a time: so few that an allocator keeps the memory of the intermediate results.
_CHUNK = 1 << 19
# Sums and products of multiples of it are far from the least normal number.
_GRAIN = 2.0**-40
_NUMBER_TYPES = (torch.float32, torch.bfloat16, torch.float16)

# 4-bit floats (OCP Microscaling Formats 1.0, section 5.3.3): the sign, two bits of exponent, one of mantissa.
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
# 8-bit floats without infinities (OCP 8-bit Floating Point 1.0): codes 127 and 255 are not a number.
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


def integers(bits: int, zero: int = 0) -> torch.Tensor:
    """Returns the codebook of unsigned integers of which `zero` stands for 0: 0 - zero, 1 - zero, and so on."""
    return torch.arange(2**bits, dtype=torch.float32) - zero


def signed_integers(bits: int) -> torch.Tensor:
    """Returns the codebook of integers in two's complement."""
    codes = integers(bits)
    return torch.where(codes < 2 ** (bits - 1), codes, codes - 2**bits)


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """A weight [rows, inputs] in codes of 4, 5, 6 or 8 bits; input k belongs to group g = k // group.

        value[row, k] = bfloat16((codebook[codes[row, k]] - zeros[row, g]) * scales[row, g] - minima[row, g])

    Each operation is rounded to float32, in this order, and the result to bfloat16, all to the nearest even number.
    Models in another type take the bfloat16 values. Scales that are stored in 16 bits need half the memory; scales,
    zeros and minima have one type.

    With `factors` scales and minima are integers of 8 bits, and stand for their products with the factors of their
    block of `factor_groups` groups, which are exact in float32: for scales, and then for minima if there are any. There
    are no zeros then.

    With `quantizes_inputs` a layer rounds its inputs to integers too (`quantize_rows`) and sums the products exactly.
    "by row" there is a scale for each row of inputs: such a weight has signed integers of 8 bits with one scale per
    row, and nothing else. "by group" there is one for each `input_group` of a row (`sum_groups`), and the weight is one
    that `has_integers`.

    Raises ValueError if the tensors do not fit together, a scale is not finite, or a code stands for no number; codes
    of a format that has no others need no check (`has_sound_codes`).
    """

    codes: torch.Tensor  # [rows, inputs] uint8, less than 2**bits
    codebook: torch.Tensor  # [2**bits] float32
    scales: torch.Tensor  # [rows, groups] float32, bfloat16 or float16, or with factors int8
    group: int  # inputs of a group: a multiple of 16, or at least all inputs; the last group may be shorter
    bits: int = 4
    zeros: torch.Tensor | None = None  # [rows, groups]
    minima: torch.Tensor | None = None  # [rows, groups]
    quantizes_inputs: Literal["by row", "by group"] | None = None
    factors: torch.Tensor | None = None  # [1 or 2, rows, blocks] float16
    factor_groups: int = 0
    has_sound_codes: bool = False

    def __post_init__(self) -> None:
        if self.bits not in CODE_BITS or self.codebook.shape != (2**self.bits,) or self.codebook.dtype != torch.float32:
            raise ValueError(f"codes of {self.bits} bits with a codebook of {list(self.codebook.shape)}")
        if self.codes.dim() != 2 or self.codes.dtype != torch.uint8:
            raise ValueError(f"codes are [rows, inputs] uint8, not {list(self.codes.shape)} {self.codes.dtype}")
        rows, inputs = self.codes.shape
        if self.group < 1 or (self.group % GROUP_STEP and self.group < inputs):
            raise ValueError(f"a group of {self.group} inputs is neither a multiple of {GROUP_STEP} nor all {inputs}")
        expected = rows, -(-inputs // self.group)
        types = _NUMBER_TYPES if self.factors is None else (torch.int8,)
        for name, values in self._numbers.items():
            if values.shape != expected or values.dtype not in types:
                raise ValueError(f"{name} are {list(expected)} {types}, not {list(values.shape)} {values.dtype}")
            if values.is_floating_point() and not values.isfinite().all():
                raise ValueError(f"{name} must be finite")
        self._check_factors()
        codes, is_number = self.codes[: 0 if self.has_sound_codes else None], self.codebook.isfinite()
        if self.bits < 8 and codes.numel() and codes.amax() >= 2**self.bits:
            raise ValueError(f"code {codes.amax().item()} does not fit {self.bits} bits")
        if not is_number.all() and not is_number.to(codes.device)[codes.int()].all():
            raise ValueError("a code stands for no number")
        if self.quantizes_inputs == "by group" and not self.has_integers:
            raise ValueError("inputs are quantized by groups only for integers with scales, and with zeros or minima")
        if self.quantizes_inputs == "by row" and (
            self.zeros is not None
            or self.minima is not None
            or expected[1] > 1
            or self.bits != 8
            or not torch.equal(self.codebook, signed_integers(8))
        ):
            raise ValueError("inputs are quantized by rows only for signed integers with one scale per row")

    def _check_factors(self) -> None:
        if self.factors is None:
            return
        rows, groups = self.scales.shape
        expected = 1 + (self.minima is not None), rows, -(-groups // max(1, self.factor_groups))
        if self.factors.shape != expected or self.factors.dtype != torch.float16 or self.zeros is not None:
            raise ValueError(f"factors are {list(expected)} float16, not {list(self.factors.shape)}, without zeros")
        if not self.factors.isfinite().all():
            raise ValueError("factors must be finite")

    @property
    def shape(self) -> torch.Size:
        """[rows, inputs]."""
        return self.codes.shape

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def has_integers(self) -> bool:
        """Whether inputs can be rounded by groups: codes are integers of a byte, or of 4 bits and halves up to 8, and
        there are no zeros beside minima or for halves.
        """
        steps, most = self.codebook - self.shift, 128
        counts_up = torch.equal(self.codebook, integers(self.bits) + self.codebook[0])
        is_alone = self.zeros is None and self.minima is None
        if self.bits == 4 and not (counts_up and (self.codebook[0] == 0 or is_alone)):
            steps, most = 2 * self.codebook, 16
        elif self.bits == 4:
            most = 64
        has_one_offset = is_alone or (self.zeros is None and not self.shift) or (self.minima is None and most > 16)
        is_inside = steps.isfinite().all() and -most <= steps.min() and steps.max() < most
        return bool(has_one_offset and is_inside and torch.equal(steps, steps.round()))

    @property
    def shift(self) -> int:
        """What is subtracted from the codebook, and from zeros, so that integers fit a byte with a sign."""
        return 128 if self.bits == 8 and self.codebook.max() > 127 else 0

    @property
    def input_group(self) -> int:
        """How many inputs are rounded together, if they are "by group"."""
        return 32 if self.group % 32 == 0 else GROUP_STEP

    @property
    def nbytes(self) -> int:
        """The size of the codes and scales when they are packed, without padding."""
        numbers = [*self._numbers.values(), *([] if self.factors is None else [self.factors])]
        return self.codes.numel() * self.bits // 8 + sum(each.nbytes for each in numbers)

    @property
    def unpacked_nbytes(self) -> int:
        """The size with a byte for every code."""
        return self.nbytes + self.codes.numel() * (8 - self.bits) // 8

    @property
    def _numbers(self) -> dict[str, torch.Tensor]:
        """Those that are there."""
        named = {"scales": self.scales, "zeros": self.zeros, "minima": self.minima}
        return {name: each for name, each in named.items() if each is not None}

    def _multiplied(self) -> QuantizedWeight:
        """Returns the weight with products in the place of factors."""
        if self.factors is None:
            return self
        return replace(self, factors=None, factor_groups=0, **self._products(slice(None)))

    def _products(self, rows: slice | torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the scales, zeros and minima of some rows, [rows, groups] float32."""
        products = {name: each[rows].float().contiguous() for name, each in self._numbers.items()}
        if self.factors is not None:
            factors = self.factors[:, rows].float().repeat_interleave(self.factor_groups, -1)
            for each, own in zip(products.values(), factors, strict=True):
                each *= own[:, : each.shape[1]]
        return products

    def dequantize(self, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the values, [rows, inputs] bfloat16, or those of some rows, int64; a row may occur several times."""
        out = self.codes.new_empty((len(self.codes if rows is None else rows), self.shape[1]), dtype=torch.bfloat16)
        step = max(1, _CHUNK // max(1, self.shape[1]))
        for first in range(0, len(out), step):
            chosen = slice(first, first + step)
            self._write_values(chosen if rows is None else rows[chosen], out[chosen])
        return out

    def _write_values(self, rows: slice | torch.Tensor, out: torch.Tensor) -> None:
        if self.device.type != "cpu" or (native := library()) is None:
            out.copy_(self._values(rows))
            return
        codes, products = self.codes[rows].contiguous(), self._products(rows)
        tensors = codes, self.codebook, *map(products.get, ("scales", "zeros", "minima")), out
        addresses = [None if each is None else each.data_ptr() for each in tensors]
        native.function("dequantize", "ppppppnnnn")(*addresses, *codes.shape, self.group, num_threads())

    def has_extreme_values(self) -> bool:
        """Whether a value before it is rounded is 2**100 or more, or less than the least normal one and not 0."""
        grains = [self.codebook.nan_to_num(), *([] if self.zeros is None else [self.zeros])]
        is_coarse = all(torch.equal(each.double() / _GRAIN, (each.double() / _GRAIN).round()) for each in grains)
        suspects = torch.full((len(self.codes),), not is_coarse, device=self.device)
        for numbers in self._numbers.values():
            # A number of type float16, and its product with an integer, is a multiple of 2**-24.
            if self.factors is None and numbers.dtype != torch.float16:
                sizes = numbers.float().abs()
                suspects |= ((sizes != 0) & ((sizes < _GRAIN) | (sizes > 1 / _GRAIN))).any(1)
        rows = suspects.nonzero().flatten().tolist()
        values, least = (self._values(slice(row, row + 1)).abs() for row in rows), torch.finfo(torch.float32).tiny
        return any((((each != 0) & (each < least)) | (each >= 2.0**100)).any().item() for each in values)

    def _values(self, rows: slice | torch.Tensor) -> torch.Tensor:
        """Returns the values of some rows before they are rounded to bfloat16."""
        values = self.codebook.to(self.device)[self.codes[rows].int()]
        products = {name: each.repeat_interleave(self.group, 1) for name, each in self._products(rows).items()}
        for name, apply in (("zeros", values.sub_), ("scales", values.mul_), ("minima", values.sub_)):
            if name in products:
                apply(products[name][:, : self.shape[1]])
        return values

    def part(self, rows: slice = slice(None), columns: slice = slice(None)) -> QuantizedWeight:
        """Returns some rows and inputs; if these divide a block of groups, with products in the place of factors.

        Raises ValueError if the inputs divide a group or, quantized, a row.
        """
        inputs, groups = self.shape[1], self.scales.shape[1]
        first, end, stride = columns.indices(inputs)
        if self.quantizes_inputs == "by row" and (first, end) != (0, inputs):
            raise ValueError("the scale of a row of inputs is that of all inputs: they cannot be divided")
        if groups > 1 and (first % self.group or (end % self.group and end != inputs)):
            raise ValueError(f"inputs {first} to {end} divide a group of {self.group}")
        chosen = slice(first // self.group, -(-end // self.group)) if groups > 1 else slice(None)
        assert stride == 1, f"inputs with stride {stride}"
        factors = self.factors
        if factors is not None:
            block = self.group * self.factor_groups
            if first % block or (end % block and end != inputs):
                return self._multiplied().part(rows, columns)
            factors = factors[:, rows, first // block : -(-end // block)]
        numbers = {name: each[rows, chosen] for name, each in self._numbers.items()}
        return replace(self, codes=self.codes[rows, columns], factors=factors, **numbers)

    def reordered(self, order: torch.Tensor) -> QuantizedWeight:
        """Returns the rows in the given order, int64; a row may occur several times."""
        numbers = {name: each[order] for name, each in self._numbers.items()}
        factors = None if self.factors is None else self.factors[:, order]
        return replace(self, codes=self.codes[order], factors=factors, **numbers)

    def with_inputs(self, order: torch.Tensor, run: int) -> QuantizedWeight:
        """Returns the runs of so many inputs in the given order, [runs] int64.

        Raises ValueError if a run divides a group.
        """
        if self.scales.shape[1] > 1 and run % self.group:
            raise ValueError(f"runs of {run} inputs divide a group of {self.group}")
        codes = self.codes.unflatten(1, (-1, run))[:, order].flatten(1)
        if self.scales.shape[1] == 1:
            return replace(self, codes=codes)
        groups = (order[:, None] * (run // self.group) + torch.arange(run // self.group)).flatten()
        numbers = {name: each[:, groups] for name, each in self._numbers.items()}
        factors, factor_groups = self.factors, self.factor_groups
        if factors is not None:
            # Of a block of groups, some may go one way and others another.
            factor_groups = math.gcd(run // self.group, factor_groups)
            factors = factors[:, :, groups[::factor_groups] // self.factor_groups]
        return replace(self, codes=codes, factors=factors, factor_groups=factor_groups, **numbers)

    @staticmethod
    def cat(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
        """Returns the rows of all, one after another. Raises ValueError if their kinds or inputs differ."""
        first = weights[0]
        if any(not first.is_like(other) or other.shape[1] != first.shape[1] for other in weights):
            raise ValueError("weights of several kinds cannot be one layer")
        codes = _rows_of([each.codes for each in weights])
        numbers = {name: torch.cat([each._numbers[name] for each in weights]) for name in first._numbers}
        factors = [each.factors for each in weights if each.factors is not None]
        return replace(first, codes=codes, factors=torch.cat(factors, 1) if factors else None, **numbers)

    def is_like(self, other: QuantizedWeight) -> bool:
        """Whether the two are of one kind: everything but the shape, the codes and the scales' values is equal."""
        return (
            (self.bits, self.group, self.quantizes_inputs, self.scales.dtype, self.factor_groups)
            == (other.bits, other.group, other.quantizes_inputs, other.scales.dtype, other.factor_groups)
            and self._numbers.keys() == other._numbers.keys()
            and torch.equal(self.codebook.nan_to_num(), other.codebook.nan_to_num())
        )


def _rows_of(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the rows of all, one after another: without a copy if they are so in one memory."""
    memory, end = parts[0].untyped_storage().data_ptr(), parts[0].data_ptr()
    for part in parts:
        if (part.untyped_storage().data_ptr(), part.data_ptr()) != (memory, end) or not part.is_contiguous():
            return torch.cat(list(parts))
        end += part.nbytes
    return parts[0].as_strided((sum(map(len, parts)), parts[0].shape[1]), parts[0].stride())


LayerWeight = torch.Tensor | QuantizedWeight
"""The weight of a linear layer, [out_features, in_features], as the checkpoint stores it."""


def reordered(weight: LayerWeight, order: torch.Tensor) -> LayerWeight:
    """Returns the rows of a weight in the given order, [rows] int64; a row may occur several times."""
    return weight.reordered(order) if isinstance(weight, QuantizedWeight) else weight[order.to(weight.device)]


def dense(weight: LayerWeight, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Returns the weight, or the bfloat16 values of a quantized one in the model's type."""
    return weight.dequantize().to(dtype) if isinstance(weight, QuantizedWeight) else weight


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, inputs] -> integers from -127 to 127, [rows, inputs] float32, and the scales of the rows, [rows, 1].

    The scale is the largest magnitude over 127, and an input is rounded to the nearest even number of its multiple of
    127 over that magnitude, both in float32, as vLLM does it. A row that is not finite, or has magnitudes below 2**-119
    alone, has zeros.
    """
    largest = x.float().abs().amax(1, keepdim=True)
    is_usable = largest.isfinite() & (largest >= 2.0**-119)
    # Not 127 / largest, which torch takes for the product with a reciprocal.
    factors = torch.where(is_usable, torch.full_like(largest, 127) / largest, 0.0)
    integers = (x.float() * factors).clamp(-127, 127).round()
    return integers.where(is_usable, 0.0), largest / 127


def sum_rows(x: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """[rows, inputs] -> the products with a weight whose inputs are quantized "by row", [rows, outputs] float32: exact
    sums, times the scale of the row of inputs, times that of the weight's row.
    """
    rounded, scales = quantize_rows(x)
    sums = rounded.double() @ weight.codebook[weight.codes.int()].double().T
    return sums.float() * scales * weight.scales.float().T


def sum_groups(x: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """[rows, inputs] -> the products with a weight whose inputs are quantized "by group", [rows, outputs] float32.

    Every `input_group` inputs of a row are rounded by themselves (`quantize_rows`). For one group after another, what
    follows is added to a sum from zero on, each in one fused operation: the sum of the products of inputs and integers,
    less zeros, which is exact, times the product of both scales; then, if there are minima, less the product of the
    inputs' sum and their scale, times the minimum. The products of two factors are rounded to float32. (Here float64
    stands for fused operations: about one in 2**29 is rounded otherwise.)
    """
    weight, size = weight._multiplied(), weight.input_group
    rows, inputs = x.shape
    padded = torch.nn.functional.pad(x, (0, -inputs % size))
    rounded, scales = quantize_rows(padded.reshape(-1, size))
    integers, scales = rounded.view(rows, -1, size).double(), scales.view(rows, -1, 1)
    codes = weight.codebook[weight.codes.int()].double()
    sums = torch.zeros(rows, len(codes))
    for number in range(padded.shape[1] // size):
        some, scale, group = integers[:, number], scales[:, number], number * size // weight.group
        own = codes[:, number * size : (number + 1) * size]
        total = some.sum(1, keepdim=True)
        exact = some[:, : own.shape[1]] @ own.T
        if weight.zeros is not None:
            exact -= total * weight.zeros[:, group].double()
        sums = ((scale * weight.scales[:, group].float()).double() * exact.float().double() + sums).float()
        if weight.minima is not None:
            sums = (sums - (scale * total.float()).double() * weight.minima[:, group].double()).float()
    return sums


def quantize_absmax(weight: torch.Tensor, bits: int, group: int) -> QuantizedWeight:
    """Quantizes [rows, inputs] to signed integers, without calibration: the largest magnitude of a group of inputs has
    the code of the most negative integer, with a scale of its sign. A group of 0 is all inputs.
    """
    rows, inputs = weight.shape
    group, zero = group or inputs, 2 ** (bits - 1)
    count = -(-inputs // group)
    padded = torch.nn.functional.pad(weight.float(), (0, count * group - inputs)).view(rows, count, group)
    extremes = padded.gather(2, padded.abs().argmax(2, keepdim=True))
    scales = (extremes / -zero).bfloat16()
    steps = padded / scales.float().where(scales != 0, 1.0)
    codes = (steps.round() + zero).clamp(0, 2 * zero - 1).to(torch.uint8).view(rows, count * group)[:, :inputs]
    codebook = integers(bits, zero) if bits == 4 else signed_integers(bits)
    return QuantizedWeight((codes if bits == 4 else codes ^ 128).contiguous(), codebook, scales.squeeze(2), group, bits)
