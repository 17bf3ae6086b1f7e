"""The packed linear layer: correct, complete, and no row depends on the other rows."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import pytest
import torch

from penstock.kernels import native
from penstock.kernels.heads_linear import PackedHeads
from penstock.kernels.linear import PackedLinear
from tests.grids import grid

ISAS = (*native.instruction_sets(), "torch")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# [K, N]: whole panels, tails of either, less than one vector, and K beyond one step of every kernel.
SHAPES = ((1024, 320), (320, 1000), (80, 33), (37, 5), (1, 1), (31, 64), (33, 31), (2048, 48))
# The root mean square error of one rounding to the dtype, with a margin for the accumulation.
TOLERANCE = {torch.bfloat16: 2.2e-3, torch.float16: 2.8e-4, torch.float32: 1.2e-6}


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = native.num_threads()
    native.set_num_threads(2)
    yield
    native.set_num_threads(before)


def make(isa: str, weight: torch.Tensor, bias: torch.Tensor | None = None, is_wide: bool = False) -> PackedLinear:
    return PackedLinear(weight, bias, is_wide, lambda: None if isa == "torch" else native.library_for(isa))


def values(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return ((got.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("k", "n"), SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_agrees_with_float64(isa: str, dtype: torch.dtype, k: int, n: int, with_bias: bool) -> None:
    weight, x = values(n, k, dtype=dtype, seed=0), values(67, k, dtype=dtype, seed=1)
    bias = values(n, dtype=dtype, seed=2).mul_(8) if with_bias else None
    layer = make(isa, weight, bias)
    assert (layer.in_features, layer.out_features, layer.dtype) == (k, n, dtype)
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert relative_error(layer(x), expected) < TOLERANCE[dtype]


@pytest.mark.parametrize(("isa", "dtype", "shape"), grid(ISAS, DTYPES, ((1024, 320), (321, 1000), (37, 5))))
@pytest.mark.parametrize("with_bias", [False, True])
def test_rounded_wide_output_equals_narrow_output(
    isa: str, dtype: torch.dtype, shape: tuple[int, int], with_bias: bool
) -> None:
    k, n = shape
    weight, x = values(n, k, dtype=dtype, seed=0), values(67, k, dtype=dtype, seed=1)
    bias = values(n, dtype=dtype, seed=2).mul_(8) if with_bias else None
    wide = make(isa, weight, bias, is_wide=True)
    found = wide(x)
    assert found.dtype == torch.float32
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert relative_error(found, expected) < TOLERANCE[torch.float32]
    assert torch.equal(wide.dense_weight(), make(isa, weight).dense_weight())
    assert torch.equal(wide(x[5:23].clone()), found[5:23])
    if isa != "torch":
        assert torch.equal(found.to(dtype), make(isa, weight, bias)(x))


@pytest.mark.parametrize(("isa", "dtype", "shape"), grid(ISAS, DTYPES, ((1024, 320), (321, 1000), (80, 33), (37, 5))))
def test_a_row_does_not_depend_on_the_other_rows(isa: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    k, n = shape
    layer = make(isa, values(n, k, dtype=dtype, seed=0), values(n, dtype=dtype, seed=2))
    x = values(300, k, dtype=dtype, seed=1)
    whole = layer(x)
    for rows, first in itertools.product((1, 2, 3, 5, 8, 16, 17, 31, 32, 33, 64, 100), (0, 1, 7, 12, 16, 150, 200)):
        part = layer(x[first : first + rows].clone())
        assert torch.equal(part, whole[first : first + rows]), f"rows {first} to {first + rows}"


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity_do_not_change_other_rows(isa: str, dtype: torch.dtype) -> None:
    layer = make(isa, values(100, 72, dtype=dtype, seed=0))
    x = values(20, 72, dtype=dtype, seed=1)
    expected = layer(x)
    x[::3] = torch.nan
    x[1::3] = torch.inf
    assert torch.equal(layer(x)[2::3], expected[2::3])
    assert layer(x)[::3].isnan().all()


@pytest.mark.parametrize("isa", native.instruction_sets())
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_number_of_threads_changes_nothing(isa: str, dtype: torch.dtype) -> None:
    # 600 rows of few outputs divide the rows among threads; 40 rows divide the outputs.
    layer = make(isa, values(200, 320, dtype=dtype, seed=0))
    for rows in (1, 40, 600):
        x = values(rows, 320, dtype=dtype, seed=1)
        results = []
        for threads in (1, 2, 3):
            native.set_num_threads(threads)
            results.append(layer(x))
        assert torch.equal(results[0], results[1])
        assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("isa", native.instruction_sets())
@pytest.mark.parametrize("dtype", DTYPES)
def test_more_rows_than_a_thread_packs_at_a_time_change_nothing(isa: str, dtype: torch.dtype) -> None:
    # More rows than a thread packs at a time, in both ways of dividing the work.
    x = values(1500, 1024, dtype=dtype, seed=1)
    layer = make(isa, values(40, 1024, dtype=dtype, seed=0))
    whole = layer(x)
    for first in (0, 511, 700, 1490):
        assert torch.equal(layer(x[first : first + 10].clone()), whole[first : first + 10])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [5, 32, 33, 1000])
def test_writes_every_element_and_no_other(isa: str, dtype: torch.dtype, n: int) -> None:
    layer = make(isa, values(n, 48, dtype=dtype, seed=0))
    for rows in (1, 15, 16, 17, 33, 60):
        guard = 64
        memory = torch.full((guard + rows * n + guard,), torch.nan, dtype=dtype)
        layer.into(values(rows, 48, dtype=dtype, seed=1), memory[guard:-guard].view(rows, n))
        assert memory[guard:-guard].isfinite().all()
        assert memory[:guard].isnan().all()
        assert memory[-guard:].isnan().all()


@pytest.mark.parametrize("isa", native.instruction_sets())
def test_outputs_larger_than_the_caches_have_the_same_bits(isa: str) -> None:
    # These are streamed where a line of the cache is written whole: rows of 1,064 columns begin at any quarter of one.
    layer = make(isa, values(1048, 48, dtype=torch.bfloat16, seed=0), values(1048, dtype=torch.bfloat16, seed=2))
    x, out = values(900, 48, dtype=torch.bfloat16, seed=1), torch.full((900, 1064), torch.nan, dtype=torch.bfloat16)
    layer.into(x, out[:, 8:1056])
    for first in range(0, 900, 30):
        assert torch.equal(out[first : first + 30, 8:1056], layer(x[first : first + 30].clone()))
    assert out[:, :8].isnan().all()
    assert out[:, 1056:].isnan().all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_writes_some_columns_and_no_other(isa: str, dtype: torch.dtype) -> None:
    layer = make(isa, values(70, 300, dtype=dtype, seed=0))
    for rows in (1, 40, 200):
        x, out = values(rows, 300, dtype=dtype, seed=1), torch.full((rows, 90), torch.nan, dtype=dtype)
        layer.into(x, out[:, 7:77])
        assert torch.equal(out[:, 7:77], layer(x))
        assert out[:, :7].isnan().all()
        assert out[:, 77:].isnan().all()


@pytest.mark.parametrize("isa", ISAS)
def test_bias_is_added_before_rounding(isa: str) -> None:
    # 256 + 1 needs nine bits of mantissa, one more than bfloat16 has; the bias cancels the 256 exactly.
    weight = torch.tensor([[256.0, 1.0]], dtype=torch.bfloat16)
    layer = make(isa, weight, torch.tensor([-256.0], dtype=torch.bfloat16))
    assert layer(torch.ones(3, 2, dtype=torch.bfloat16)).tolist() == [[1.0]] * 3


@pytest.mark.parametrize("isa", native.instruction_sets())
@pytest.mark.parametrize("dtype", DTYPES)
def test_infinities_and_ties_round_as_torch_does(isa: str, dtype: torch.dtype) -> None:
    # The product is zero, so that only the rounding of the float32 bias remains.
    bias = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11, torch.inf, -torch.inf, 3e38, 7e4, -1e-3])
    layer = make(isa, torch.zeros(len(bias), 4, dtype=dtype), bias)
    assert torch.equal(layer(torch.ones(1, 4, dtype=dtype))[0], bias.to(dtype))


@pytest.mark.parametrize("isa", ISAS)
def test_owns_its_weight(isa: str) -> None:
    weight, bias = values(64, 64, dtype=torch.bfloat16, seed=0), values(64, dtype=torch.float32, seed=2)
    layer = make(isa, weight, bias)
    x = values(4, 64, dtype=torch.bfloat16, seed=1)
    expected = layer(x)
    weight.fill_(torch.nan)
    bias.fill_(torch.nan)
    assert torch.equal(layer(x), expected)


def test_accepts_a_weight_that_is_a_view() -> None:
    weight = values(64, 96, dtype=torch.float32, seed=0)
    x = values(4, 64, dtype=torch.float32, seed=1)
    assert torch.equal(PackedLinear(weight.T)(x), PackedLinear(weight.T.contiguous())(x))


def test_zero_rows_give_an_empty_result() -> None:
    layer = PackedLinear(values(64, 64, dtype=torch.float32, seed=0))
    assert layer(torch.empty(0, 64)).shape == (0, 64)


def test_refuses_other_dtypes() -> None:
    with pytest.raises(TypeError, match="float64"):
        PackedLinear(torch.zeros(4, 4, dtype=torch.float64))


def test_matrix_products_of_torch_between_calls_change_nothing() -> None:
    # They configure the same tiles on the same threads.
    layer = PackedLinear(values(640, 512, dtype=torch.bfloat16, seed=0))
    x = values(24, 512, dtype=torch.bfloat16, seed=1)
    expected = layer(x)
    for rows in (1, 7, 64):
        torch.nn.functional.linear(
            values(rows, 512, dtype=torch.bfloat16, seed=3), values(640, 512, dtype=torch.bfloat16, seed=4)
        )
        assert torch.equal(layer(x), expected)


@pytest.mark.parametrize(("isa", "dtype", "shape"), grid(ISAS, DTYPES, SHAPES))
def test_dense_weight_returns_the_packed_weight(isa: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    k, n = shape
    weight, bias = values(n, k, dtype=dtype, seed=0), values(n, dtype=dtype, seed=2)
    layer = make(isa, weight, bias)
    assert torch.equal(layer.dense_weight(), weight)
    # The bias, which `dense_weight` leaves out, is still applied.
    x = values(3, k, dtype=dtype, seed=1)
    assert torch.equal(layer(x), make(isa, weight, bias)(x))


@pytest.mark.parametrize(
    ("isa", "dtype", "shape", "heads"), grid(ISAS, DTYPES, ((320, 1000), (37, 5), (48, 512)), (1, 3))
)
def test_every_head_has_the_bits_of_its_own_layer(
    isa: str, dtype: torch.dtype, shape: tuple[int, int], heads: int
) -> None:
    k, n = shape
    library = None if isa == "torch" else native.library_for(isa)
    weight = values(heads, n, k, dtype=dtype, seed=0)
    layer = PackedHeads(weight, lambda: library)
    for rows in (0, 1, 70):
        x = values(heads, rows, k, dtype=dtype, seed=1)
        for threads in (1, 2):
            native.set_num_threads(threads)
            found = layer(x)
            for head in range(heads):
                assert torch.equal(found[head], make(isa, weight[head])(x[head]))
    assert torch.equal(layer.dense_weight(), weight)


@pytest.mark.skipif("avx512_bf16" not in ISAS, reason="this processor has no dot products of pairs")
def test_the_faster_products_of_pairs_are_chosen() -> None:
    fuse = native.library_for("avx512_bf16").function("fuse_products", "n", "n")
    native.set_num_threads(1)
    layer = make("avx512_bf16", values(2048, 1024, dtype=torch.bfloat16, seed=0))
    x, out = values(24, 1024, dtype=torch.bfloat16, seed=1), torch.empty(24, 2048, dtype=torch.bfloat16)
    chosen, seconds = fuse(-1), [float("inf"), float("inf")]
    for fused in (0, 1) * 30:
        fuse(fused)
        assert fuse(-1) == fused
        started = time.perf_counter()
        layer.into(x, out)
        seconds[fused] = min(seconds[fused], time.perf_counter() - started)
    fuse(chosen)
    slower, faster = max(seconds), min(seconds)
    assert seconds[chosen] == faster or slower < 1.4 * faster
