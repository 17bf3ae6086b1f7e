"""Weights that stay quantized: their layers have the bits of the layers of their values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from penstock.kernels import native, quantized
from penstock.kernels.experts import ExpertsShape, GroupedExperts, make_experts
from penstock.kernels.linear import PackedFormat, PackedLinear, PackedWeights
from penstock.kernels.quantized import E2M1, E4M3, QuantizedWeight, integers, quantize_absmax, signed_integers
from penstock.layers.linear import Linear
from tests.grids import grid

SETS = native.instruction_sets()
ISAS = (*SETS, "torch")
# Fused rows on every set, whole and partial blocks, several blocks, and more than take a panel in chunks.
ROWS = (1, 2, 3, 4, 5, 8, 13, 33, 72, 115)
# Inputs and outputs of a layer and inputs of a group: whole; a short last group; less than a step; more than a chunk of
# a panel, in groups and in one; outputs beyond the last panel.
SHAPES = ((256, 96, 32), (224, 70, 64), (81, 33, 16), (37, 40, 37), (2112, 32, 128), (3000, 33, 3000))

# Codebook, bits, type of the scales, and whether there are zeros and minima.
KINDS: dict[str, tuple[torch.Tensor, int, torch.dtype, bool, bool]] = {
    "int4": (integers(4, 8), 4, torch.float16, False, False),
    "signed int4": (signed_integers(4), 4, torch.float16, False, False),
    "int4 with minima": (integers(4, 8), 4, torch.float16, False, True),
    "zeros": (integers(4), 4, torch.float16, True, False),
    "minima": (integers(4), 4, torch.float32, False, True),
    "both": (integers(4), 4, torch.bfloat16, True, True),
    "fp4": (E2M1, 4, torch.bfloat16, False, False),
    "any4": (torch.linspace(-1, 1, 16) ** 3, 4, torch.float32, False, False),
    "int8": (signed_integers(8), 8, torch.float32, False, False),
    "unsigned": (integers(8), 8, torch.float16, True, False),
    "unsigned with minima": (integers(8), 8, torch.float32, False, True),
    "fp8": (E4M3, 8, torch.float32, False, False),
    "fp8 with minima": (E4M3, 8, torch.float32, False, True),
    "fp8 with zeros": (E4M3, 8, torch.float32, True, False),
    "any8": (torch.linspace(-1, 1, 256) ** 3, 8, torch.float32, False, True),
    # Scales that are integers with factors.
    "int4 by factors": (integers(4, 8), 4, torch.int8, False, False),
    "minima by factors": (integers(4), 4, torch.int8, False, True),
    "int8 by factors": (signed_integers(8), 8, torch.int8, False, False),
    "int8 with minima by factors": (signed_integers(8), 8, torch.int8, False, True),
    "int5": (integers(5, 16), 5, torch.float16, False, False),
    "int5 with minima": (integers(5), 5, torch.float16, False, True),
    "int5 with minima by factors": (integers(5), 5, torch.int8, False, True),
    "int5 with wide scales": (integers(5), 5, torch.float32, False, True),
    "int6 by factors": (integers(6, 32), 6, torch.int8, False, False),
    "any6": (torch.linspace(-1, 1, 64) ** 3, 6, torch.float32, False, False),
}
FACTOR_GROUPS = 3


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = native.num_threads()
    native.set_num_threads(2)
    yield
    native.set_num_threads(before)


def library_of(isa: str) -> Callable[[], native.NativeLibrary | None]:
    return lambda: None if isa == "torch" else native.library_for(isa)


def pack(isa: str, weight: torch.Tensor | QuantizedWeight, *args: Any, **options: Any) -> PackedLinear:
    return PackedLinear(weight, *args, library=library_of(isa), **options)


def make(kind: str, rows: int, inputs: int, group: int, seed: int = 0) -> QuantizedWeight:
    codebook, bits, dtype, has_zeros, has_minima = KINDS[kind]
    generator = torch.Generator().manual_seed(seed)
    shape = rows, -(-inputs // group)
    codes = torch.randint(0, 2**bits, (rows, inputs), generator=generator)
    codes = codes.where(codebook[codes].isfinite(), 0).to(torch.uint8)
    if dtype == torch.int8:
        blocks = 1 + has_minima, rows, -(-shape[1] // FACTOR_GROUPS)
        factors = torch.randn(blocks, generator=generator) / codebook.abs().max() / 64 * inputs**-0.5
        numbers = [torch.randint(low, 64, shape, generator=generator).to(dtype) for low in (-63, 0)]
        chosen = {
            "factors": factors.half(),
            "factor_groups": FACTOR_GROUPS,
            "minima": numbers[1] if has_minima else None,
        }
        return QuantizedWeight(codes, codebook, numbers[0], group, bits, **chosen)
    scales = torch.randn(shape, generator=generator) / codebook.nan_to_num().abs().max() * inputs**-0.5
    zeros = torch.randint(0, 2**bits, shape, generator=generator).to(dtype) if has_zeros else None
    minima = (torch.rand(shape, generator=generator) * inputs**-0.5).to(dtype) if has_minima else None
    return QuantizedWeight(codes, codebook, scales.to(dtype), group, bits, zeros, minima)


def inputs_of(rows: int, width: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).bfloat16()


def nearest_bfloat16(value: np.float32) -> float:
    bits = int(value.view(np.uint32))
    kept = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16
    return float(np.uint32(kept).view(np.float32))


@pytest.mark.parametrize(("isa", "kind"), grid(ISAS, tuple(KINDS)))
def test_values_are_rounded_after_every_operation(isa: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "library", library_of(isa))
    weight = make(kind, 6, 40, 16)
    found = weight.dequantize()
    codebook, scales = weight.codebook.numpy(), weight.scales.float().numpy()
    zeros = np.zeros_like(scales) if weight.zeros is None else weight.zeros.float().numpy()
    minima = np.zeros_like(scales) if weight.minima is None else weight.minima.float().numpy()
    if weight.factors is not None:
        factors = weight.factors.float().numpy().repeat(FACTOR_GROUPS, 2)[:, :, : scales.shape[1]]
        scales, minima = scales * factors[0], minima * factors[-1]
    for row in range(6):
        for column in range(40):
            group = column // 16
            value = np.float32(codebook[weight.codes[row, column]] - zeros[row, group])
            value = np.float32(np.float32(value * scales[row, group]) - minima[row, group])
            assert found[row, column].item() == nearest_bfloat16(value)


@pytest.mark.parametrize("isa", ISAS)
def test_rows_are_dequantised_wherever_they_are_and_as_often(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "library", library_of(isa))
    # More rows than are dequantised at a time.
    monkeypatch.setattr(quantized, "_CHUNK", 1000)
    for kind in ("both", "minima by factors"):
        weight = make(kind, 90, 336, 16)
        values = weight.dequantize()
        rows = torch.tensor([7, 89, 0, 7, 88])
        for columns in (slice(None), slice(16 * FACTOR_GROUPS, 336), slice(16, 320)):
            part = weight.part(columns=columns)
            assert torch.equal(part.dequantize(), values[:, columns])
            assert torch.equal(part.dequantize(rows), values[rows, columns])
            assert part.dequantize(rows[:0]).shape == (0, part.shape[1])


def test_codebooks_are_the_formats() -> None:
    exponents = [(1 if code < 2 else 2.0 ** (code // 2 - 1)) * (code % 2 / 2 + (code > 1)) for code in range(8)]
    assert E2M1.tolist() == [*exponents, *(-value for value in exponents)]
    assert (E4M3[126], E4M3[1], E4M3[8], E4M3[0x38], E4M3[0xB8]) == (448, 2.0**-9, 2.0**-6, 1, -1)
    assert E4M3.isfinite().sum() == 254
    assert signed_integers(4).tolist() == [*range(8), *range(-8, 0)]


@pytest.mark.parametrize(("isa", "kind", "shape"), grid(ISAS, tuple(KINDS), SHAPES))
def test_equals_the_layer_of_its_values(isa: str, kind: str, shape: tuple[int, int, int]) -> None:
    inputs, outputs, group = shape
    weight = make(kind, outputs, inputs, group)
    bias = torch.randn(outputs, generator=torch.Generator().manual_seed(2))
    pairs = [
        (pack(isa, weight, bias), pack(isa, weight.dequantize(), bias)),
        (pack(isa, weight, None, True), pack(isa, weight.dequantize(), None, True)),
    ]
    # Torch multiplies row by row.
    for rows in (2, 33) if isa == "torch" else ROWS:
        x = inputs_of(rows, inputs)
        for found, expected in pairs:
            assert torch.equal(found(x), expected(x)), f"{rows} rows"
    assert torch.equal(pairs[0][0].dense_weight(), weight.dequantize())


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("rows", [5, 33, 115])
def test_values_of_an_earlier_layer_leave_nothing_behind(isa: str, rows: int) -> None:
    native.set_num_threads(1)
    earlier, weight = make("int8", 32, 128, 32), make("int4", 32, 81, 16)
    infinite = replace(earlier, codes=torch.full_like(earlier.codes, 127), scales=torch.full_like(earlier.scales, 3e38))
    assert not pack(isa, infinite)(inputs_of(rows, 128)).isfinite().any()
    x = inputs_of(rows, 81)
    assert torch.equal(pack(isa, weight)(x), pack(isa, weight.dequantize())(x))


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_values_halfway_between_two_are_rounded_to_even(isa: str, kind: str) -> None:
    high = torch.tensor([0x0000, 0x0001, 0x0002, 0x007E, 0x007F])
    low = torch.tensor([0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFF00, 0xFFFF])
    exponents = torch.tensor([-90, -1, 0, 1, 90]) + 127
    bits = (exponents[:, None, None] << 23 | high[:, None] << 16 | low).flatten()
    magnitudes = bits.int().view(torch.float32)
    # A column has one scale, and codes of 1; one input is not zero.
    scales = torch.cat([magnitudes, -magnitudes])[:, None]
    codes = torch.full((len(scales), 32), KINDS[kind][0].tolist().index(1), dtype=torch.uint8)
    weight = QuantizedWeight(codes, KINDS[kind][0], scales, 32, KINDS[kind][1])
    assert not weight.has_extreme_values()
    expected = [nearest_bfloat16(value) for value in scales[:, 0].numpy()]
    for rows in ROWS[:7]:
        x = torch.zeros(rows, 32).bfloat16()
        x[:, 5] = 1
        assert (pack(isa, weight, None, True)(x) == torch.tensor(expected)).all(), f"{rows} rows"


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("kind", ["int4", "minima", "int8", "fp8"])
def test_extreme_scales_keep_the_equality(isa: str, kind: str) -> None:
    # Products below the least normal number, some of which round to it, zeros of either sign, and huge scales.
    weight = make(kind, 64, 128, 32)
    factors = torch.tensor([2.0**-126, 2.0**-129, 2.0**-149, 0.0, -0.0, 2.0**119, -(2.0**110), 1.0])
    scales = torch.where(torch.arange(256).view(64, 4) % 3 == 0, factors[torch.arange(256) % 8].view(64, 4), 1.0)
    scales[:, 3] *= 0.9980469
    minima = None if weight.minima is None else weight.minima * (scales == 1)
    weight = replace(weight, scales=scales / (1 if kind != "fp8" else 16), minima=minima)
    assert weight.has_extreme_values()
    assert weight.dequantize().isfinite().all()
    found, expected = pack(isa, weight), pack(isa, weight.dequantize())
    for rows in (*ROWS[:6], ROWS[-1]):
        x = inputs_of(rows, 128) * torch.tensor([1.0, 2.0**100]).repeat(64)
        # Sums of huge products of both signs are not numbers.
        outputs = [packed(x.bfloat16()) for packed in (found, expected)]
        assert torch.allclose(*outputs, rtol=0, atol=0, equal_nan=True), f"{rows} rows"


@pytest.mark.parametrize("isa", SETS)
def test_a_number_that_rounds_to_the_least_normal_one_is_kept(isa: str) -> None:
    # 2**-126 less a quarter of bfloat16's step there.
    weight = make("int4", 32, 32, 32)
    weight = replace(weight, codes=torch.full_like(weight.codes, 9), scales=torch.full((32, 1), 2.0**-126 - 2.0**-135))
    assert weight.dequantize().eq(2.0**-126).all()
    x = torch.full((1, 32), 2.0**120).bfloat16()
    assert pack(isa, weight)(x).eq(0.5).all()


@pytest.mark.parametrize("isa", ISAS)
def test_zeros_that_are_no_integers_are_subtracted_first(isa: str) -> None:
    """15 less this zero is rounded to 15, and 495 to 496; fused with the product it would be 494."""
    scales, zeros = torch.full((32, 1), 33.0).half(), torch.full((32, 1), 2.0**-21).half()
    weight = QuantizedWeight(torch.full((32, 32), 15, dtype=torch.uint8), integers(4), scales, 32, 4, zeros)
    found = pack(isa, weight)(torch.eye(32)[:1].bfloat16())
    assert found.unique().tolist() == weight.dequantize().unique().tolist() == [496]


def test_five_and_six_bits_take_no_more() -> None:
    """Beside their scales and factors: 512 inputs of 32 rows."""
    for kind, bits, numbers in (("int5", 5, 16 / 32), ("int6 by factors", 6, 8 / 32 + 16 / 96)):
        format = PackedFormat.of(make(kind, 32, 512, 32))
        for isa in SETS:
            packed = PackedWeights(native.library_for(isa), 1, 32, 480, torch.bfloat16, format=format)
            assert packed.packed.numel() == 32 * 480 * (bits + numbers) / 8


def test_scales_that_fit_16_bits_take_16_bits() -> None:
    def weight(scale: float, **options: Any) -> QuantizedWeight:
        return QuantizedWeight(
            torch.zeros(64, 256, dtype=torch.uint8), integers(4), torch.full((64, 8), float(scale)), 32, **options
        )

    def size(weight: QuantizedWeight, narrows: bool = True) -> int:
        packed = PackedWeights(
            native.library_for(SETS[0]), 2, 64, 256, torch.bfloat16, format=PackedFormat.of(weight, narrows)
        )
        packed.store(1, weight)
        assert torch.equal(packed.dense_weight(1), weight.dequantize())
        return packed.packed.nbytes // 2

    codes, numbers = 64 * 256 // 2, 64 * 8
    assert size(weight(2.0**-60)) == size(weight(1 + 2.0**-10)) == codes + numbers * 2
    assert size(weight(1 + 2.0**-11)) == size(weight(1.0), narrows=False) == codes + numbers * 4
    assert size(weight(1, minima=torch.full((64, 8), 1 + 2.0**-11))) == codes + numbers * 8
    # Others do not fit a format of 16 bits, and are not rounded.
    narrow = PackedFormat.of(weight(1), narrows=True)
    with pytest.raises(ValueError, match="are no torch"):
        narrow.stored(weight(1 + 2.0**-11))


def test_a_part_that_divides_a_block_has_products_of_its_own() -> None:
    weight = make("minima by factors", 20, 200, 16)
    values, block = weight.dequantize(), 16 * FACTOR_GROUPS
    assert weight.nbytes == 20 * 100 + 20 * 13 * 2 + 20 * 5 * 2 * 2
    for columns, is_whole in ((slice(block, 3 * block), True), (slice(2 * block, 200), True), (slice(16, 200), False)):
        part = weight.part(slice(3, 9), columns)
        assert (part.factors is not None) == is_whole
        assert torch.equal(part.dequantize(), values[3:9, columns])
    order = torch.tensor([5, 5, 0, 19])
    assert torch.equal(weight.reordered(order).dequantize(), values[order])
    joined = QuantizedWeight.cat([weight, weight.part(slice(0, 2))])
    assert torch.equal(joined.dequantize(), torch.cat([values, values[:2]]))
    with pytest.raises(ValueError, match="several kinds"):
        QuantizedWeight.cat([weight, weight.part(columns=slice(16, 200))])
    with pytest.raises(ValueError, match="factors are"):
        replace(weight, factors=weight.scales[None].half())


@pytest.mark.parametrize("kind", ["both", "int8"])
def test_parts_and_rows_put_together_are_those_of_the_values(kind: str) -> None:
    weight = make(kind, 20, 90, 32)
    values = weight.dequantize()
    assert weight.nbytes == 20 * 90 * weight.bits // 8 + (20 * 3 * 2 * 3 if kind == "both" else 20 * 3 * 4)
    assert torch.equal(weight.part(slice(3, 9), slice(32, 90)).dequantize(), values[3:9, 32:])
    assert torch.equal(weight.part(columns=slice(0, 64)).dequantize(), values[:, :64])
    order = torch.tensor([5, 5, 0, 19])
    assert torch.equal(weight.reordered(order).dequantize(), values[order])
    joined = QuantizedWeight.cat([weight, weight.part(slice(0, 2))])
    assert torch.equal(joined.dequantize(), torch.cat([values, values[:2]]))
    for columns in (slice(16, 90), slice(0, 80)):
        with pytest.raises(ValueError, match="divide a group"):
            weight.part(columns=columns)
    # One group has any inputs.
    whole = make(kind, 20, 90, 90)
    assert torch.equal(whole.part(columns=slice(7, 50)).dequantize(), whole.dequantize()[:, 7:50])
    with pytest.raises(ValueError, match="several kinds"):
        QuantizedWeight.cat([weight, make("fp4", 20, 90, 32)])


@pytest.mark.parametrize("kind", [*KINDS])
def test_runs_of_inputs_in_another_order_are_those_of_the_values(kind: str) -> None:
    weight, order = make(kind, 8, 512, 32), torch.tensor([3, 0, 2, 1])
    expected = weight.dequantize().unflatten(1, (4, 128))[:, order].flatten(1)
    assert torch.equal(weight.with_inputs(order, 128).dequantize(), expected)
    with pytest.raises(ValueError, match="divide a group"):
        weight.with_inputs(torch.arange(32), 16)
    whole = make(kind, 8, 64, 64)
    moved = whole.with_inputs(torch.arange(7, -1, -1), 8).dequantize()
    assert torch.equal(moved, whole.dequantize().unflatten(1, (8, 8)).flip(1).flatten(1))


def test_refuses_what_does_not_fit_together() -> None:
    codes, scales = torch.zeros(4, 64, dtype=torch.uint8), torch.ones(4, 2)
    with pytest.raises(ValueError, match="neither a multiple of 16"):
        QuantizedWeight(codes, integers(4), torch.ones(4, 7), 10)
    with pytest.raises(ValueError, match="scales are"):
        QuantizedWeight(codes, integers(4), torch.ones(4, 3), 32)
    with pytest.raises(ValueError, match="finite"):
        QuantizedWeight(codes, integers(4), scales * torch.inf, 32)
    with pytest.raises(ValueError, match="does not fit"):
        QuantizedWeight(codes + 16, integers(4), scales, 32)
    with pytest.raises(ValueError, match="no number"):
        QuantizedWeight(codes + 255, E4M3, scales, 32, 8)
    with pytest.raises(ValueError, match="codebook"):
        QuantizedWeight(codes, integers(4), scales, 32, 8)
    with pytest.raises(ValueError, match="one scale per row"):
        QuantizedWeight(codes, signed_integers(8), scales, 32, 8, quantizes_inputs="by row")


def test_other_types_take_the_bfloat16_values() -> None:
    weight = make("int4", 40, 64, 32)
    for dtype in (torch.float16, torch.float32):
        layer, x = Linear(weight, dtype=dtype), inputs_of(3, 64).to(dtype)
        assert layer.out_dtype == dtype
        assert torch.equal(layer(x), Linear(weight.dequantize().to(dtype))(x))
    assert Linear(weight, is_wide=True).out_dtype == torch.float32
    assert torch.equal(Linear(weight).dense_weight(), weight.dequantize())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("inputs", "outputs"), [(256, 96), (81, 33), (3, 5), (1100, 70)])
def test_sums_of_integers_are_exact(isa: str, inputs: int, outputs: int) -> None:
    weight = replace(make("int8", outputs, inputs, inputs), quantizes_inputs="by row")
    bias = torch.randn(outputs, generator=torch.Generator().manual_seed(2))
    layer, wide = pack(isa, weight, bias), pack(isa, weight, None, True)
    assert torch.equal(layer.dense_weight(), weight.dequantize())
    integer_weight = weight.codes.view(torch.int8).numpy().astype(np.int64)
    scales = weight.scales.numpy()[:, 0]
    for rows in ROWS:
        x = inputs_of(rows, inputs)
        x[rows // 2] *= 2.0**-140 if rows % 2 else 0
        values = x.float().numpy()
        largest = np.abs(values).max(1, keepdims=True)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            scaled = np.where(largest >= 2.0**-119, values * (np.float32(127) / largest), np.float32(0))
        sums = np.rint(scaled).astype(np.int64) @ integer_weight.T
        expected = torch.from_numpy(sums.astype(np.float32) * (largest / np.float32(127)) * scales)
        assert torch.equal(layer(x), (expected + bias).bfloat16()), f"{rows} rows"
        assert torch.equal(wide(x), expected)
    with pytest.raises(ValueError, match="cannot be divided"):
        weight.part(columns=slice(0, inputs - 1))


# Integers that the kernels add in each of their ways, with and without zeros, minima and factors.
BY_GROUP = (
    "int4", "signed int4", "zeros", "minima", "minima by factors", "fp4", "int8", "unsigned",
    "int8 with minima by factors", "int5 with minima by factors", "int5 with wide scales", "int6 by factors",
)  # fmt: skip


def by_group(kind: str, outputs: int, inputs: int, group: int, seed: int = 0) -> QuantizedWeight:
    return replace(make(kind, outputs, inputs, group, seed), quantizes_inputs="by group")


def sums_by_group(x: np.ndarray, weight: QuantizedWeight) -> np.ndarray:
    """One row: `sum_groups` from the values of the weight alone, in numbers of 64 bits that are rounded to 32."""
    size, shift = weight.input_group, np.float32(weight.shift)
    codes = weight.codebook.numpy()[weight.codes.numpy()] - shift
    scales = weight.scales.float().numpy()
    minima, zeros = np.zeros_like(scales), np.zeros_like(scales) - shift
    if weight.minima is not None:
        minima = weight.minima.float().numpy()
    if weight.factors is not None:
        factors = weight.factors.float().numpy().repeat(FACTOR_GROUPS, 2)[:, :, : scales.shape[1]]
        scales, minima = scales * factors[0], minima * factors[-1]
    if weight.zeros is not None:
        zeros = weight.zeros.float().numpy() - shift
    sums = np.zeros(len(codes), np.float32)
    for first in range(0, len(x), size):
        some, group = x[first : first + size], first // weight.group
        largest = np.abs(some).max()
        rounded = np.rint(some * (np.float32(127) / largest)) if largest >= 2.0**-119 else some * 0
        scale = largest / np.float32(127)
        exact = (codes[:, first : first + size] - zeros[:, group, None]).astype(np.float64) @ rounded.astype(np.float64)
        sums = (exact * (scale * scales[:, group]).astype(np.float64) + sums).astype(np.float32)
        total = np.float64(scale * np.float32(rounded.sum()))
        sums = (sums - total * minima[:, group].astype(np.float64)).astype(np.float32)
    return sums


# Also with groups that end within a unit of 16 inputs, and groups of which two begin in one of 32.
GROUP_SHAPES = ((256, 96, 32), (80, 33, 16), (48, 40, 64), (60, 33, 60), (81, 33, 81), (144, 40, 48))


@pytest.mark.parametrize(("isa", "kind", "shape"), grid(ISAS, BY_GROUP, GROUP_SHAPES))
def test_inputs_are_rounded_by_groups(isa: str, kind: str, shape: tuple[int, int, int]) -> None:
    inputs, outputs, group = shape
    weight = by_group(kind, outputs, inputs, group)
    bias = torch.randn(outputs, generator=torch.Generator().manual_seed(2))
    layer, wide = pack(isa, weight, bias), pack(isa, weight, None, True)
    assert torch.equal(layer.dense_weight(), weight.dequantize())
    x = inputs_of(max(ROWS), inputs)
    x[1] *= 2.0**-130
    x[2, 3:40] = 0
    expected = torch.from_numpy(np.stack([sums_by_group(row.float().numpy(), weight) for row in x]))
    for rows in (2, 33) if isa == "torch" else ROWS:
        assert torch.equal(wide(x[:rows]), expected[:rows]), f"{rows} rows"
        assert torch.equal(layer(x[:rows]), (expected[:rows] + bias).bfloat16())
    whole, dense = expected[3:], x[3:].float() @ weight.dequantize().float().T
    assert ((whole - dense).norm() < 0.015 * dense.norm()).item()


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("kind", BY_GROUP)
def test_the_largest_products_of_a_group_do_not_overflow(isa: str, kind: str) -> None:
    for code in (KINDS[kind][0].argmin(), KINDS[kind][0].argmax()):
        for sign in (1, -1):
            weight = by_group(kind, 32, 64, 32)
            weight = replace(weight, codes=torch.full_like(weight.codes, int(code)))
            x = torch.full((1, 64), float(sign)).bfloat16()
            expected = torch.from_numpy(sums_by_group(x[0].float().numpy(), weight))
            assert torch.equal(pack(isa, weight, None, True)(x)[0], expected)


def test_what_has_no_integers_keeps_its_inputs() -> None:
    for kind in ("both", "any4", "unsigned with minima", "fp8", "any8", "any6"):
        assert not make(kind, 8, 64, 32).has_integers
        with pytest.raises(ValueError, match="by groups only for integers"):
            by_group(kind, 8, 64, 32)
    assert (by_group("int4", 8, 64, 32).input_group, by_group("int4", 8, 64, 48).input_group) == (32, 16)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("by", ["by row", "by group"])
def test_rows_that_are_not_finite_change_no_other(isa: str, by: Any) -> None:
    layer = pack(isa, replace(make("int8", 40, 64, 64), quantizes_inputs=by))
    x = inputs_of(9, 64)
    expected = layer(x)
    x[0, 3], x[4, 5], x[8, 0] = torch.nan, torch.inf, -torch.inf
    found = layer(x)
    assert found[[0, 4, 8]].isnan().all()
    assert torch.equal(found[[1, 2, 3, 5, 6, 7]], expected[[1, 2, 3, 5, 6, 7]])


@pytest.mark.parametrize("isa", SETS)
def test_the_largest_sums_do_not_overflow(isa: str) -> None:
    codes = torch.full((32, 65536), 128, dtype=torch.uint8)
    weight = QuantizedWeight(codes, signed_integers(8), torch.ones(32, 1), 65536, 8, quantizes_inputs="by row")
    x = torch.ones(1, 65536).bfloat16()
    scale = torch.tensor(1.0) / 127
    assert pack(isa, weight, None, True)(x).eq(torch.tensor(-128.0 * 127 * 65536) * scale).all()


@pytest.mark.parametrize(("isa", "kind"), grid(ISAS, ("int4", "minima", "fp8", "sums", "groups", "minima by factors")))
def test_experts_equal_those_of_the_values_and_move_with_their_scales(isa: str, kind: str) -> None:
    # The inner features of this rank are some of all: a slice whose end is inside a panel.
    hidden, inner, outputs, own, slots = 96, 64, 40, 45, 3
    shape = ExpertsShape(slots, hidden, own, inner, outputs, torch.bfloat16)

    def weight(rows: int, inputs: int, seed: int) -> QuantizedWeight:
        if kind == "sums":
            return replace(make("int8", rows, inputs, inputs, seed), quantizes_inputs="by row")
        if kind == "groups":
            return by_group("minima by factors", rows, inputs, 32, seed)
        return make(kind, rows, inputs, 32, seed)

    weights = [(weight(2 * own, hidden, slot), weight(outputs, inner, 10 + slot)) for slot in range(slots)]
    formats = PackedFormat.of(weights[0][0]), PackedFormat.of(weights[0][1])
    found = make_experts(shape, library=library_of(isa), formats=formats)
    for slot, (gate_up, down) in enumerate(weights):
        found.store(slot, gate_up, down)
        stored = found.weights(slot)
        assert torch.equal(stored[0].dense_weight(), gate_up.dequantize())
        assert torch.equal(stored[1].dense_weight(), down.dequantize())
    ids = torch.randint(0, slots, (40, 2), generator=torch.Generator().manual_seed(3))
    x, activated = inputs_of(40, hidden), inputs_of(80, inner)

    def products(experts: GroupedExperts, ids: torch.Tensor) -> torch.Tensor:
        groups = experts.group(ids, torch.arange(slots, dtype=torch.int32))
        parts = experts.gate_up(x[: len(ids)], groups), experts.down(activated[: 2 * len(ids)], groups)
        return torch.cat([part[groups.rows.flatten().long()] for part in parts], 1)

    for tokens in (1, 40):
        if kind in ("sums", "groups"):
            layers = [[pack(isa, each) for each in pair] for pair in weights]
            groups = found.group(ids[:tokens], torch.arange(slots, dtype=torch.int32))
            out, start = found.down(activated[: 2 * tokens], groups), groups.starts.tolist()
            for slot in range(slots):
                mine = slice(start[slot], start[slot + 1])
                assert torch.equal(out[mine], layers[slot][1](activated[: 2 * tokens][mine].contiguous()))
            continue
        expected = make_experts(shape, library=library_of(isa))
        for slot, (gate_up, down) in enumerate(weights):
            expected.store(slot, gate_up.dequantize(), down.dequantize())
        assert torch.equal(products(found, ids[:tokens]), products(expected, ids[:tokens]))
    if isa != "torch":
        before = products(found, torch.full((40, 2), 2))
        for array in found.arrays():
            array[0] = array[2]
        assert torch.equal(products(found, torch.zeros(40, 2, dtype=torch.int64)), before)
    others = make("any8", 2 * own, hidden, 32), make("any8", outputs, inner, 32)
    packing = make_experts(shape, library=library_of(SETS[0]), formats=formats)
    with pytest.raises(ValueError, match="several kinds"):
        packing.store(0, *others)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 0])
def test_absmax_keeps_values_within_half_a_step(bits: int, group: int) -> None:
    values = torch.randn(33, 70, generator=torch.Generator().manual_seed(0)).bfloat16()
    values[3] = 0
    weight = quantize_absmax(values, bits, group)
    assert (weight.bits, weight.group) == (bits, group or 70)
    found, half = weight.dequantize().float(), 2 ** (bits - 1)
    for number in range(weight.scales.shape[1]):
        own = slice(number * weight.group, (number + 1) * weight.group)
        wanted, step = values[:, own].float(), weight.scales[:, number : number + 1].float().abs()
        # The largest magnitude is kept; one of the other sign may be a step off, the others by half a step.
        assert (step * half).allclose(wanted.abs().amax(1, keepdim=True), rtol=2.0**-8)
        limits = torch.where(wanted.abs() > step * (half - 1), step, step / 2) + wanted.abs() * 2.0**-8
        assert ((found[:, own] - wanted).abs() <= limits).all()
    assert found[3].eq(0).all()
