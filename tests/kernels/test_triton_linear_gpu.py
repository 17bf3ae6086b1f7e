"""The products of a decode step on a GPU: bfloat16, the shapes of Qwen3-0.6B and 8B, early launches, CUDA graphs."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from penstock.kernels.triton.capabilities import Capabilities
from penstock.kernels.triton.linear import decode
from penstock.kernels.triton.linear.decode import DecodeWeight, Stream
from penstock.kernels.triton.linear.matmul import Matmul
from penstock.kernels.triton.linear.tiles import Role

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not IS_HOPPER, reason="needs a CUDA device of compute capability 9.0"),
]

ON, DTYPE, EPS = torch.device("cuda"), torch.bfloat16, 1e-6
VOCAB = 151936
# hidden, (Hq + 2 Hkv) D, Hq D, intermediate
SIZES = {"Qwen3-0.6B": (1024, 4096, 2048, 3072), "Qwen3-8B": (4096, 6144, 4096, 12288)}
TOKENS = (1, 2, 8, 16, 17, 32, 33, 64)
ALL = Capabilities(tma=True, pdl=True)
TOLERANCE = 4e-3  # two roundings to bfloat16, root mean square


def values(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator(ON).manual_seed(seed), device=ON) * scale).to(DTYPE)


def check(got: torch.Tensor, expected: torch.Tensor) -> None:
    error = ((got.float() - expected).norm() / expected.norm()).item()
    assert error < TOLERANCE, error


def norm(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return wide * gain.float() * (wide.square().mean(-1, keepdim=True) + EPS).rsqrt()


@dataclass(frozen=True)
class Layer:
    """A decoder layer whose attention passes the queries through."""

    table: torch.Tensor
    gain: torch.Tensor
    qkv: torch.Tensor
    out: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor

    @classmethod
    def make(cls, model: str) -> Layer:
        hidden, qkv, width, inner = SIZES[model]
        return cls(
            values(VOCAB, hidden, seed=0, scale=hidden**-0.5),
            1 + values(hidden, seed=1, scale=0.1),
            values(qkv, hidden, seed=2, scale=hidden**-0.5),
            values(hidden, width, seed=3, scale=width**-0.5),
            values(2 * inner, hidden, seed=4, scale=hidden**-0.5),
            values(hidden, inner, seed=5, scale=inner**-0.5),
        )

    def weights(self, device: Capabilities) -> dict[Role, DecodeWeight]:
        tensors = {
            Role.QKV: self.qkv, Role.OUT: self.out, Role.GATE_UP: self.gate_up, Role.DOWN: self.down,
            Role.HEAD: self.table,
        }  # fmt: skip
        return {role: DecodeWeight(role, weight, None, device) for role, weight in tensors.items()}


def run(layer: Layer, weights: dict[Role, DecodeWeight], ids: torch.Tensor, device: Capabilities) -> list[torch.Tensor]:
    """Returns all results of a step, from the embedding to the logits."""
    stream = decode.prepare(ids, layer.table, layer.gain, device)
    qkv = decode.linear_normed(weights[Role.QKV], stream, EPS)
    attended = qkv[:, : layer.out.shape[1]].contiguous()
    middle = decode.linear_residual(weights[Role.OUT], attended, stream, layer.gain)
    inner = decode.linear_silu(weights[Role.GATE_UP], middle, EPS)
    end = decode.linear_residual(weights[Role.DOWN], inner, middle, layer.gain)
    return [qkv, *astuple(middle), inner, *astuple(end), decode.linear(weights[Role.HEAD], end.residual)]


def astuple(stream: Stream) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return stream.residual, stream.scaled, stream.squares


@pytest.fixture(scope="module", params=SIZES)
def layer(request: pytest.FixtureRequest) -> Layer:
    return Layer.make(request.param)


def ids_of(num_tokens: int) -> torch.Tensor:
    return torch.randint(VOCAB, (num_tokens,), generator=torch.Generator().manual_seed(7)).to(ON)


@pytest.mark.parametrize("num_tokens", TOKENS)
def test_a_layer_agrees_with_float32(layer: Layer, num_tokens: int) -> None:
    ids = ids_of(num_tokens)
    qkv, x, _, x_squares, inner, y, scaled, _, logits = run(layer, layer.weights(ALL), ids, ALL)
    check(qkv, norm(layer.table[ids], layer.gain) @ layer.qkv.float().T)
    attended = qkv[:, : layer.out.shape[1]].float()
    check(x, layer.table[ids].float() + attended @ layer.out.float().T)
    torch.testing.assert_close(x_squares.sum(1), x.float().square().sum(1), rtol=1e-5, atol=0)
    gate, up = (norm(x, layer.gain) @ layer.gate_up.float().T).chunk(2, 1)
    check(inner, torch.nn.functional.silu(gate) * up)
    check(y, x.float() + inner.float() @ layer.down.float().T)
    assert torch.equal(scaled, y * layer.gain)
    check(logits, y.float() @ layer.table.float().T)


@pytest.mark.parametrize("num_tokens", TOKENS)
def test_neither_early_launches_nor_descriptors_change_a_bit(layer: Layer, num_tokens: int) -> None:
    ids = ids_of(num_tokens)
    expected = run(layer, layer.weights(ALL), ids, ALL)
    for device in (Capabilities(), Capabilities(tma=True), Capabilities(pdl=True)):
        weights = layer.weights(device)
        for _ in range(3):
            assert all(map(torch.equal, run(layer, weights, ids, device), expected)), device


@pytest.mark.parametrize("num_tokens", [1, 8, 64])
def test_a_graph_replays_the_same_bits(layer: Layer, num_tokens: int) -> None:
    ids, weights = ids_of(num_tokens), layer.weights(ALL)
    expected = [tensor.clone() for tensor in run(layer, weights, ids, ALL)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # Several layers in sequence, so that kernels overlap with more than one later kernel.
        for _ in range(4):
            found = run(layer, weights, ids, ALL)
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("bucket", [16, 32, 64])
def test_a_row_does_not_depend_on_the_other_rows_of_its_bucket(layer: Layer, bucket: int) -> None:
    ids, weights = ids_of(bucket), layer.weights(ALL)
    together = run(layer, weights, ids, ALL)
    fewer = bucket // 2 + 1
    alone = run(layer, weights, ids[-fewer:].contiguous(), ALL)
    assert all(torch.equal(one, all_[-fewer:]) for one, all_ in zip(alone, together, strict=True))


@pytest.mark.parametrize("tma", [False, True])
def test_matmul_rows_have_the_same_bits_for_any_number_of_rows(layer: Layer, tma: bool) -> None:
    for weight in (layer.qkv, layer.out, layer.gate_up, layer.down):
        n, k = weight.shape
        x, bias = values(2048, k, seed=11), values(n, seed=12)
        multiply = Matmul(weight, bias, Capabilities(tma=tma))
        y = multiply(x)
        check(y, x.float() @ weight.float().T + bias.float())
        for first, last in ((0, 1), (2047, 2048), (5, 13), (100, 164), (1000, 1300)):
            assert torch.equal(multiply(x[first:last].clone()), y[first:last]), (n, k, first, last)
        assert torch.equal(Matmul(weight, bias, Capabilities(tma=not tma))(x), y)
