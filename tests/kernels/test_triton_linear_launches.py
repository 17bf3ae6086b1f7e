"""The launches of a decode step: how many kernels, which of them early, and none that a later step must compile."""

from __future__ import annotations

from collections import Counter

import torch

from penstock.kernels.triton.capabilities import Capabilities
from penstock.kernels.triton.linear import decode
from penstock.kernels.triton.linear.decode import DecodeWeight
from penstock.kernels.triton.linear.matmul import Matmul
from penstock.kernels.triton.linear.tiles import Role
from tests.kernels.gpu_launches import launches_of

VOCAB, HIDDEN, WIDTH, INNER, LAYERS = 4096, 1024, 2048, 3072, 2
# Numbers of tokens in two buckets, with those for which a compiler may specialise: one, and multiples of 16.
TOKENS = (1, 7, 2, 16, 1)
ROWS = (1, 3, 16, 64, 1024)


def steps() -> None:
    device = Capabilities(tma=True, pdl=True)
    shapes = {
        Role.QKV: (WIDTH, HIDDEN), Role.OUT: (HIDDEN, WIDTH), Role.GATE_UP: (2 * INNER, HIDDEN),
        Role.DOWN: (HIDDEN, INNER), Role.HEAD: (VOCAB, HIDDEN),
    }  # fmt: skip
    tensors = {role: torch.zeros(shape, dtype=torch.bfloat16) for role, shape in shapes.items()}
    weights = {role: DecodeWeight(role, tensor, None, device) for role, tensor in tensors.items()}
    gain = tensors[Role.DOWN][:, 0].contiguous()
    for num_tokens in TOKENS:
        stream = decode.prepare(torch.zeros(num_tokens, dtype=torch.int64), tensors[Role.HEAD], gain, device)
        for _ in range(LAYERS):
            qkv = decode.linear_normed(weights[Role.QKV], stream, 1e-6)
            stream = decode.linear_residual(weights[Role.OUT], qkv, stream, gain)
            inner = decode.linear_silu(weights[Role.GATE_UP], stream, 1e-6)
            stream = decode.linear_residual(weights[Role.DOWN], inner, stream, gain)
        decode.linear(weights[Role.HEAD], stream.residual)


def products() -> None:
    multiply = Matmul(torch.zeros(4096, 1024, dtype=torch.bfloat16), None, Capabilities(tma=True))
    for num_rows in ROWS:
        multiply(torch.zeros(num_rows, 1024, dtype=torch.bfloat16))


def test_launches_of_steps() -> None:
    launches = launches_of(__name__, "steps")
    each = 1 + 4 * LAYERS + 1
    assert len(launches) == len(TOKENS) * each
    for first in range(0, len(launches), each):
        step = launches[first : first + each]
        product = "gemv" if TOKENS[first // each] == 1 else "gemm"
        assert [launch.kernel for launch in step] == ["prepare", *[product] * (4 * LAYERS + 1)]
        # The first kernel waits for all before it, so that the others may read weights and a batch's metadata early.
        assert [launch.is_early for launch in step] == [False] + [True] * (each - 1)
    # In the first layer, qkv reads sums of squares that are divided into other parts than after a layer.
    compiled = Counter(launch.kernel for launch in launches if launch.is_new)
    assert compiled == {"prepare": 1, "gemv": 6, "gemm": 6}
    assert not any(launch.is_new for launch in launches[2 * each :])


def test_one_kernel_serves_products_of_any_number_of_rows() -> None:
    launches = launches_of(__name__, "products")
    assert [launch.is_new for launch in launches] == [True] + [False] * (len(ROWS) - 1)
    assert [launch.grid for launch in launches] == [(32,)] * 4 + [(16 * 32,)]
