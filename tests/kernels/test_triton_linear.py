"""Compares the products of a small decode step, and `Matmul`, with float64, in Triton's interpreter or on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from penstock.kernels.triton.capabilities import Capabilities
from penstock.kernels.triton.linear import decode
from penstock.kernels.triton.linear.decode import DecodeWeight, Stream
from penstock.kernels.triton.linear.matmul import Matmul
from penstock.kernels.triton.linear.tiles import BUCKETS, Role, choose

ON = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Both dtypes and both ways to read the weight, but not every combination.
F32, F16 = torch.float32, torch.float16
PLAIN, TMA = Capabilities(), Capabilities(tma=ON.type == "cpu" or Capabilities.of(ON).tma)
TOKENS = (1, 2, 15, 16, 17, 33, 64)
CASES = (
    (1, F32, PLAIN), (1, F16, PLAIN), (2, F32, TMA), (2, F16, PLAIN), (15, F16, TMA), (16, F32, PLAIN),
    (17, F16, PLAIN), (33, F32, TMA), (33, F16, PLAIN), (64, F16, TMA),
)  # fmt: skip
DTYPES = (F32, F16)
# The root mean square error of one rounding to the dtype, with a margin for the accumulation.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 4e-4}
EPS = 1e-5
# [K, N]: no multiples of any tile; no descriptor can describe the second.
SHAPES = ((296, 72), (75, 37))


def values(*shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return (scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(ON, dtype)


def weight_of(n: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    return values(n, k, dtype=dtype, seed=1, scale=k**-0.5)


def stream_of(num_tokens: int, hidden: int, dtype: torch.dtype) -> Stream:
    """Returns a stream whose sums of squares are in three uneven parts."""
    x = values(num_tokens, hidden, dtype=dtype, seed=2)
    gain = 1 + values(hidden, dtype=dtype, seed=3, scale=0.1)
    parts = torch.tensor_split(x.float().square(), 3, dim=1)
    return Stream(x, x * gain, torch.stack([part.sum(1) for part in parts], 1).contiguous())


def normed(stream: Stream) -> torch.Tensor:
    x = stream.residual.double()
    return stream.scaled.double() * (x.square().mean(-1, keepdim=True) + EPS).rsqrt()


def check(got: torch.Tensor, expected: torch.Tensor, tolerance: float | None = None) -> None:
    assert got.shape == expected.shape
    error = ((got.double() - expected).norm() / expected.norm()).item()
    assert error < (TOLERANCE[got.dtype] if tolerance is None else tolerance), error


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_prepare(num_tokens: int, dtype: torch.dtype) -> None:
    table, gain = values(50, 75, dtype=dtype), values(75, dtype=dtype, seed=3)
    ids = torch.randint(50, (num_tokens,), generator=torch.Generator().manual_seed(5)).to(ON)
    stream = decode.prepare(ids, table, gain, Capabilities())
    assert torch.equal(stream.residual, table[ids])
    assert torch.equal(stream.scaled, table[ids] * gain)
    check(stream.squares, table[ids].double().square().sum(1, keepdim=True))


def test_prepare_clamps_invalid_ids() -> None:
    table = values(50, 16, dtype=torch.float32)
    stream = decode.prepare(torch.tensor([-1, 50, 2**40], device=ON), table, table[0], Capabilities())
    assert torch.equal(stream.residual, table[[0, 49, 49]])


@pytest.mark.parametrize(("num_tokens", "dtype", "device"), CASES)
@pytest.mark.parametrize(("k", "n"), SHAPES)
def test_linear_normed_with_bias(num_tokens: int, dtype: torch.dtype, k: int, n: int, device: Capabilities) -> None:
    stream, w, bias = stream_of(num_tokens, k, dtype), weight_of(n, k, dtype), values(n, dtype=dtype, seed=4)
    y = decode.linear_normed(DecodeWeight(Role.QKV, w, bias, device), stream, EPS)
    check(y, normed(stream) @ w.double().T + bias.double())


@pytest.mark.parametrize(("num_tokens", "dtype", "device"), CASES)
@pytest.mark.parametrize(("k", "n"), SHAPES)
def test_linear_silu(num_tokens: int, dtype: torch.dtype, k: int, n: int, device: Capabilities) -> None:
    stream, w = stream_of(num_tokens, k, dtype), weight_of(2 * n, k, dtype)
    y = decode.linear_silu(DecodeWeight(Role.GATE_UP, w, None, device), stream, EPS)
    gate, up = (normed(stream) @ w.double().T).chunk(2, 1)
    check(y, torch.nn.functional.silu(gate) * up)


# The last is long enough for its sums to be split, up to 16 tokens.
@pytest.mark.spread(8)
@pytest.mark.parametrize(("num_tokens", "dtype", "device"), CASES)
@pytest.mark.parametrize(("k", "n"), [*SHAPES, (2000, 70)])
def test_linear_residual(num_tokens: int, dtype: torch.dtype, k: int, n: int, device: Capabilities) -> None:
    x, w, gain = values(num_tokens, k, dtype=dtype), weight_of(n, k, dtype), values(n, dtype=dtype, seed=4)
    weight, stream = DecodeWeight(Role.OUT, w, None, device), stream_of(num_tokens, n, dtype)
    before = replace(stream, residual=stream.residual.clone())
    first = decode.linear_residual(weight, x, stream, gain)
    check(first.residual, stream.residual.double() + x.double() @ w.double().T)
    assert torch.equal(first.scaled, first.residual * gain)
    check(first.squares.sum(1), first.residual.double().square().sum(1), 1e-6)
    assert torch.equal(stream.residual, before.residual)
    # The counters that the first launch used in the weight do not affect the second.
    assert torch.equal(decode.linear_residual(weight, x, stream, gain).residual, first.residual)


def test_long_sums_are_split() -> None:
    assert choose(Role.OUT, 16, (70, 2000), 2).split > 1
    assert choose(Role.OUT, 16, (70, 500), 4).split > 1
    assert choose(Role.OUT, 16, (70, 2056), 2).split == 1, "17 steps cannot be split into equal parts"


@pytest.mark.parametrize(("num_tokens", "dtype", "device"), CASES)
def test_linear(num_tokens: int, dtype: torch.dtype, device: Capabilities) -> None:
    x, w = values(num_tokens, 296, dtype=dtype), weight_of(301, 296, dtype)
    check(decode.linear(DecodeWeight(Role.HEAD, w, None, device), x), x.double() @ w.double().T)


@pytest.mark.parametrize("bucket", [bucket for bucket in BUCKETS if bucket > 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_other_rows_of_its_bucket(bucket: int, dtype: torch.dtype) -> None:
    x, w, gain = values(bucket, 75, dtype=dtype), weight_of(37, 75, dtype), values(37, dtype=dtype, seed=4)
    weight, stream = DecodeWeight(Role.DOWN, w, None, Capabilities()), stream_of(bucket, 37, dtype)
    together = decode.linear_residual(weight, x, stream, gain)
    fewer = bucket // 2 + 1
    part = Stream(stream.residual[-fewer:], stream.scaled[-fewer:], stream.squares[-fewer:])
    alone = decode.linear_residual(weight, x[-fewer:].contiguous(), part, gain)
    for name in ("residual", "scaled", "squares"):
        assert torch.equal(getattr(alone, name), getattr(together, name)[-fewer:]), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("k", "n"), SHAPES)
@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_matmul(dtype: torch.dtype, k: int, n: int, tma: bool, with_bias: bool) -> None:
    x, w = values(131, k, dtype=dtype), weight_of(n, k, dtype)
    bias = values(n, dtype=dtype, seed=4) if with_bias else None
    multiply = Matmul(w, bias, TMA if tma else Capabilities())
    y = multiply(x)
    check(y, x.double() @ w.double().T + (0 if bias is None else bias.double()))
    assert multiply(x[:0]).shape == (0, n)
    for first, last in ((0, 1), (130, 131), (60, 77)):
        assert torch.equal(multiply(x[first:last].clone()), y[first:last])


def test_matmul_covers_all_groups_of_tiles() -> None:
    x, w = values(64 * 17 + 3, 16, dtype=torch.float32), weight_of(200, 16, torch.float32)
    check(Matmul(w)(x), x.double() @ w.double().T)


@pytest.mark.parametrize("epilogue", ["silu", "residual"])
def test_products_that_read_no_tile_early(epilogue: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "choose", lambda *args: replace(choose(*args), early=False))
    w, stream = weight_of(72, 296, F16), stream_of(5, 296, F16)
    if epilogue == "silu":
        gate, up = (normed(stream) @ w.double().T).chunk(2, 1)
        y = decode.linear_silu(DecodeWeight(Role.GATE_UP, w, None, PLAIN), stream, EPS)
        check(y, torch.nn.functional.silu(gate) * up)
    else:
        old = stream_of(5, 72, F16)
        new = decode.linear_residual(DecodeWeight(Role.DOWN, w, None, PLAIN), stream.scaled, old, w[:, 0].contiguous())
        check(new.residual, old.residual.double() + stream.scaled.double() @ w.double().T)
