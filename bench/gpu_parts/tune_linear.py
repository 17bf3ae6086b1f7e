"""Tuning of the products: by role and number of tokens in a decode step, and the one tile of deterministic products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton

from gpu_parts.tuning import Tensors, neighbours, products, put, relative
from penstock.config.model import ModelConfig
from penstock.kernels.triton.capabilities import Capabilities
from penstock.kernels.triton.linear import decode, matmul
from penstock.kernels.triton.linear.decode import DecodeWeight, Stream
from penstock.kernels.triton.linear.matmul import Matmul
from penstock.kernels.triton.linear.tiles import BUCKETS, Role, Tile, choose, fixed

_EPS = 1e-6
_SHARED_BYTES = 227 << 10  # of a program
_MIN_CHAIN_BYTES, _MAX_LAYERS = 512 << 20, 28  # much more than caches hold
# Two roundings to the dtype, root mean square, and the sums' own error.
TOLERANCES = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 1e-5}

# The first ones are the prototype's; then others that may be better because this kernel differs from it.
_HINTS: dict[tuple[Role, int], tuple[Tile, ...]] = {
    (Role.GATE_UP, 16): (Tile(32, 16, 128, 4, 4), Tile(32, 16, 128, 4, 6)),
    (Role.OUT, 16): (Tile(64, 16, 128, 4, 4, split=2), Tile(32, 16, 128, 4, 6), Tile(32, 16, 128, 4, 4, split=2)),
    (Role.DOWN, 16): (Tile(64, 16, 128, 4, 4, split=2), Tile(32, 16, 128, 4, 6), Tile(32, 16, 128, 4, 4, split=2)),
    (Role.OUT, 64): (Tile(64, 64, 128, 4, 4, split=4), Tile(64, 32, 128, 4, 6, split=2)),
    (Role.DOWN, 64): (Tile(64, 64, 128, 4, 4, split=4), Tile(64, 32, 128, 4, 6, split=2)),
}
_GEMV_AXES = {"rows": (2, 4, 8, 16, 32), "depth": (256, 512, 1024, 2048), "warps": (2, 4, 8, 16), "stages": (1, 2)}
_GEMM_AXES = {
    "rows": (32, 64, 128),
    "tokens": (16, 32, 64),
    "depth": (64, 128, 256),
    "warps": (4, 8),
    "stages": (2, 3, 4, 5, 6, 8),
    "split": (1, 2, 4, 8),
}
_MATMUL_AXES = {"rows": (64, 128, 256), "tokens": (32, 64, 128, 256), "depth": (64, 128), "warps": (4, 8)}
_MATMUL_HINTS = (
    Tile(128, 128, 64, 8, 3),
    Tile(128, 128, 64, 8, 4),
    Tile(128, 128, 64, 4, 3),
    Tile(128, 256, 64, 8, 3),
    Tile(256, 128, 64, 8, 3),
    Tile(128, 64, 64, 4, 3),
    Tile(128, 64, 64, 4, 6),
)


def weight_shape(config: ModelConfig, role: Role) -> tuple[int, int]:
    """[N, K] of the weight, both halves of gate and up counted."""
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    width = config.num_attention_heads * head
    return {
        Role.QKV: (width + 2 * config.num_key_value_heads * head, hidden),
        Role.OUT: (hidden, width),
        Role.GATE_UP: (2 * inner, hidden),
        Role.DOWN: (hidden, inner),
        Role.HEAD: (config.vocab_size, hidden),
    }[role]


@dataclass(frozen=True)
class _Weights:
    model: str
    role: Role
    shape: tuple[int, int]
    num_tokens: int
    dtype: torch.dtype = torch.bfloat16

    @property
    def num_layers(self) -> int:
        n, k = self.shape
        return min(max(2, _MIN_CHAIN_BYTES // (n * k * self.dtype.itemsize)), _MAX_LAYERS)

    @property
    def work(self) -> tuple[float, str]:
        n, k = self.shape
        if self.num_tokens > BUCKETS[-1]:
            return 2.0 * n * k * self.num_tokens, "TFLOP/s"
        return float(n * k * self.dtype.itemsize), "TB/s"

    def tolerance(self) -> float:
        return TOLERANCES[self.dtype]

    @classmethod
    def of(cls, model: ModelConfig, role: Role, num_tokens: int) -> Any:
        return cls(model.path.name, role, weight_shape(model, role), num_tokens)

    def make(self, on: torch.device, num_layers: int) -> _Operands:
        n, k = self.shape
        scale = k**-0.5
        weights = [torch.randn(n, k, dtype=self.dtype, device=on).mul_(scale) for _ in range(num_layers)]
        x = torch.randn(self.num_tokens, k, dtype=self.dtype, device=on)
        gain = 1 + 0.1 * torch.randn(k, dtype=self.dtype, device=on)
        parts = torch.tensor_split(x.float().square(), max(1, k // 64), dim=1)
        squares = torch.stack([part.sum(1) for part in parts], 1).contiguous()
        old = torch.randn(self.num_tokens, n, dtype=self.dtype, device=on)
        old_gain = 1 + 0.1 * torch.randn(n, dtype=self.dtype, device=on)
        return _Operands(weights, Stream(x, x * gain, squares), Stream(old, old, squares), old_gain)

    def library(self, operands: _Operands) -> Callable[[], Tensors]:
        def run() -> Tensors:
            return tuple(torch.nn.functional.linear(operands.stream.scaled, weight) for weight in operands.weights)

        return run


@dataclass(frozen=True)
class _Operands:
    weights: list[torch.Tensor]
    stream: Stream  # [T, K]: the input of roles after a norm; its residual is the input of the others
    old: Stream  # [T, N]: the stream that is added to
    old_gain: torch.Tensor


@dataclass(frozen=True)
class LinearCell(_Weights):
    """A role of a small decode step, with its epilogue."""

    @property
    def name(self) -> str:
        return f"{self.model} {self.role.value} {self.num_tokens} tokens"

    @property
    def _bucket(self) -> int:
        return next(bucket for bucket in BUCKETS if self.num_tokens <= bucket)

    def candidates(self) -> list[Tile]:
        itemsize = self.dtype.itemsize
        present = choose(self.role, self._bucket, self.shape, itemsize)
        if self.num_tokens == 1:
            found = neighbours(present, _GEMV_AXES)
            found += [replace(tile, warps=4, depth=512) for tile in found[:6]]
            return [present, *(tile for tile in dict.fromkeys(found) if tile != present and self._holds(tile))]
        hints = [replace(tile, tokens=min(tile.tokens, self._bucket)) for tile in _HINTS.get((self.role, 16), ())]
        hints += _HINTS.get((self.role, self._bucket), ())
        early = [*neighbours(present, _GEMM_AXES), *hints]
        found = dict.fromkeys([*early, *(replace(tile, early=False) for tile in early)])
        return [present, *(tile for tile in found if tile != present and self._fits(tile))]

    def _holds(self, tile: Tile) -> bool:
        """Returns whether each thread loads some of the weight at once, within its registers."""
        pair = 2 if self.role is Role.GATE_UP else 1
        return tile.depth <= triton.next_power_of_2(self.shape[1]) and (
            8 <= pair * tile.rows * tile.depth // (32 * tile.warps) <= 128
        )

    def _fits(self, tile: Tile) -> bool:
        pair = 2 if self.role is Role.GATE_UP else 1
        shared = tile.stages * (pair * tile.rows + tile.tokens) * tile.depth * self.dtype.itemsize
        steps = triton.cdiv(self.shape[1], tile.depth)
        may_split = self.role in (Role.OUT, Role.DOWN) and steps % tile.split == 0 and steps >= 2 * tile.split
        return shared <= _SHARED_BYTES and tile.tokens <= max(self._bucket, 16) and (tile.split == 1 or may_split)

    def chain(self, operands: _Operands, setting: Tile, capabilities: Capabilities) -> Callable[[], Tensors]:
        def chosen(role: Role, bucket: int, shape: tuple[int, int], itemsize: int) -> Tile:
            return setting if bucket == self._bucket else choose(role, bucket, shape, itemsize)

        with put(decode, "choose", chosen):
            weights = [DecodeWeight(self.role, weight, None, capabilities) for weight in operands.weights]
        launch = self._launcher(operands)

        def run() -> Tensors:
            outputs: Tensors = ()
            for weight in weights:
                outputs = launch(weight)
            return outputs

        return run

    def _launcher(self, operands: _Operands) -> Callable[[DecodeWeight], Tensors]:
        if self.role is Role.QKV:
            return lambda weight: (decode.linear_normed(weight, operands.stream, _EPS),)
        if self.role is Role.GATE_UP:
            return lambda weight: (decode.linear_silu(weight, operands.stream, _EPS),)
        if self.role is Role.HEAD:
            return lambda weight: (decode.linear(weight, operands.stream.residual),)

        def residual(weight: DecodeWeight) -> Tensors:
            new = decode.linear_residual(weight, operands.stream.residual, operands.old, operands.old_gain)
            return new.residual, new.scaled, new.squares

        return residual

    def error(self, operands: _Operands, outputs: Tensors) -> float:
        weight, stream = operands.weights[-1], operands.stream
        x = stream.residual.double()
        normed = stream.scaled.double() * (x.square().mean(1, keepdim=True) + _EPS).rsqrt()
        if self.role is Role.QKV:
            return relative(outputs[0], products(normed, weight))
        if self.role is Role.GATE_UP:
            gate, up = products(normed, weight).chunk(2, 1)
            return relative(outputs[0], torch.nn.functional.silu(gate) * up)
        if self.role is Role.HEAD:
            return relative(outputs[0], products(x, weight))
        residual, scaled, squares = outputs
        errors = relative(residual, operands.old.residual.double() + products(x, weight))
        scaled_error = relative(scaled, residual.double() * operands.old_gain.double())
        return max(
            errors, scaled_error, relative(squares.sum(1, keepdim=True), residual.double().square().sum(1)[:, None])
        )


@dataclass(frozen=True)
class MatmulCell(_Weights):
    """`Matmul`, whose one tile must serve every number of tokens."""

    @property
    def name(self) -> str:
        return f"deterministic {self.model} {self.role.value} {self.num_tokens} tokens"

    def candidates(self) -> list[Tile]:
        present = fixed(self.shape[1], self.dtype.itemsize)
        found = dict.fromkeys([*neighbours(present, _MATMUL_AXES), *_MATMUL_HINTS])
        return [present, *(tile for tile in found if tile != present and self._fits(tile))]

    def _fits(self, tile: Tile) -> bool:
        return tile.stages * (tile.rows + tile.tokens) * tile.depth * self.dtype.itemsize <= _SHARED_BYTES

    def chain(self, operands: _Operands, setting: Tile, capabilities: Capabilities) -> Callable[[], Tensors]:
        def chosen(*_: Any) -> Tile:
            return setting

        with put(matmul, "fixed", chosen):
            multiply = [Matmul(weight, None, capabilities) for weight in operands.weights]

        def run() -> Tensors:
            outputs: Tensors = ()
            for each in multiply:
                outputs = (each(operands.stream.scaled),)
            return outputs

        return run

    def error(self, operands: _Operands, outputs: Tensors) -> float:
        return relative(outputs[0], products(operands.stream.scaled, operands.weights[-1]))
