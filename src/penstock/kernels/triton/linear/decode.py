"""A small decode step's launches: up to 64 tokens, five kernels per layer, one of them attention.

    prepare -> [ linear -> attention -> linear_residual -> linear_silu -> linear_residual ] x layers -> (norm)
            -> linear

A launch only allocates its outputs, through torch, so that it can be captured in a CUDA graph. Tiles and descriptors
are chosen per weight when it is wrapped.

With `Capabilities.pdl` a kernel starts while the one before it runs, reads weights and waits
(`device.wait_for_inputs`). So weights must not change while a step runs. Sums of split products are counted in the
weight: one stream at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from penstock.kernels.triton.capabilities import Capabilities
from penstock.kernels.triton.linear.products import gemm, gemv
from penstock.kernels.triton.linear.products import prepare as prepare_kernel
from penstock.kernels.triton.linear.tiles import BUCKETS, MAX_TOKENS, Role, Tile, choose

_OPTIONAL = ("squares", "bias", "old_residual", "gain", "residual", "out", "side")
_ABSENT: dict[str, Any] = {**dict.fromkeys(_OPTIONAL), "eps": 0.0}


@dataclass(frozen=True, slots=True)
class Stream:
    """The residual stream between two sub-layers, with the data for the next norm."""

    residual: torch.Tensor  # [T, H]
    scaled: torch.Tensor  # [T, H]: residual * the next norm's gain, rounded
    squares: torch.Tensor  # [T, parts] float32: sums of squares of parts of residual's rows


@dataclass(frozen=True, slots=True)
class _Plan:
    """How a weight is multiplied for one bucket of tokens."""

    tile: Tile
    weight: torch.Tensor | TensorDescriptor
    uses_tma: bool


class DecodeWeight:
    """A weight [N, K], row-major, which the caller must not change, and the data for its launches."""

    def __init__(self, role: Role, weight: torch.Tensor, bias: torch.Tensor | None, device: Capabilities) -> None:
        assert weight.dim() == 2 and weight.is_contiguous(), f"{role}: {tuple(weight.shape)} {weight.stride()}"
        self.height, self.k = weight.shape
        self.n = self.height // 2 if role is Role.GATE_UP else self.height
        assert bias is None or (bias.shape == (self.n,) and role is Role.QKV), f"{role} cannot add a bias"
        self.weight = weight
        self.bias = bias
        self.device = device
        shape, itemsize = (self.height, self.k), weight.dtype.itemsize
        self._plans = {bucket: self._plan(choose(role, bucket, shape, itemsize)) for bucket in BUCKETS}
        num_tiles = max(self._num_tiles(plan.tile, bucket) for bucket, plan in self._plans.items())
        self._counters = torch.zeros(num_tiles, dtype=torch.int32, device=weight.device)

    def tile(self, num_tokens: int) -> Tile:
        return self._plan_of(num_tokens).tile

    def launch(self, x: torch.Tensor, epilogue: str, operands: dict[str, Any]) -> None:
        """Multiplies x, [T, K]. `operands`: by the kernels' argument names; omitted ones do not exist."""
        num_tokens = x.shape[0]
        assert 0 < num_tokens <= MAX_TOKENS and x.shape[1] == self.k, f"{tuple(x.shape)} for K={self.k}"
        assert x.dtype == self.weight.dtype and x.is_contiguous(), f"x is {x.dtype} with strides {x.stride()}"
        plan = self._plan_of(num_tokens)
        tile, arguments = plan.tile, {**_ABSENT, **operands}
        squares = arguments["squares"]
        shared = {
            "n": self.n,
            "k": self.k,
            "num_parts": 0 if squares is None else squares.shape[1],
            "tile_rows": tile.rows,
            "depth": tile.depth,
            "epilogue": epilogue,
            "pdl": self.device.pdl,
            "num_warps": tile.warps,
            "num_stages": tile.stages,
            **self.device.options,
        }
        num_rows = triton.cdiv(self.n, tile.rows)
        if num_tokens == 1:
            gemv[(num_rows,)](x, plan.weight, **arguments, stages=tile.stages, **shared)
            return
        num_token_tiles = triton.cdiv(num_tokens, tile.tokens)
        partials = None
        if tile.split > 1:
            size = num_token_tiles * num_rows * tile.split * tile.tokens * tile.rows
            partials = torch.empty(size, dtype=torch.float32, device=x.device)
        gemm[(num_token_tiles, num_rows, tile.split)](
            x, plan.weight,
            **arguments, partials=partials, counters=self._counters, num_tokens=num_tokens, tile_tokens=tile.tokens,
            early=tile.early, split=tile.split, tma=plan.uses_tma, **shared,
        )  # fmt: skip

    def _plan_of(self, num_tokens: int) -> _Plan:
        return self._plans[next(bucket for bucket in BUCKETS if num_tokens <= bucket)]

    def _plan(self, tile: Tile) -> _Plan:
        # A descriptor's rows start at multiples of 16 bytes.
        is_aligned = self.weight.data_ptr() % 16 == 0 and self.k * self.weight.dtype.itemsize % 16 == 0
        if tile.tokens == 1 or not (self.device.tma and is_aligned):
            return _Plan(tile, self.weight, False)
        return _Plan(tile, TensorDescriptor.from_tensor(self.weight, [tile.rows, tile.depth]), True)

    def _num_tiles(self, tile: Tile, bucket: int) -> int:
        return triton.cdiv(self.n, tile.rows) * triton.cdiv(bucket, tile.tokens)


def prepare(ids: torch.Tensor, table: torch.Tensor, gain: torch.Tensor, device: Capabilities) -> Stream:
    """[T] int64 ids of rows of `table`, [V, H] -> the stream before the norm with `gain`, [H]."""
    vocab, hidden = table.shape
    assert ids.dim() == 1 and ids.is_contiguous() and table.is_contiguous(), f"{ids.stride()}, {table.stride()}"
    stream = _new_stream(table.new_empty((ids.shape[0], hidden)), 1)
    block = triton.next_power_of_2(hidden)
    num_warps = min(max(block // 256, 1), 16)
    prepare_kernel[(ids.shape[0],)](
        ids, table, gain, stream.residual, stream.scaled, stream.squares, vocab, hidden, block, device.pdl,
        num_warps=num_warps,
    )  # fmt: skip
    return stream


def linear_normed(weight: DecodeWeight, stream: Stream, eps: float) -> torch.Tensor:
    """[T, N]: norm(residual) @ W.T (+ bias)."""
    out = stream.scaled.new_empty((stream.scaled.shape[0], weight.n))
    operands = {"squares": stream.squares, "eps": eps, "bias": weight.bias, "out": out}
    weight.launch(stream.scaled, "plain", operands)
    return out


def linear_silu(weight: DecodeWeight, stream: Stream, eps: float) -> torch.Tensor:
    """[T, N]: silu(gate) * up of norm(residual) @ W.T, [T, 2 N], the gate first."""
    out = stream.scaled.new_empty((stream.scaled.shape[0], weight.n))
    weight.launch(stream.scaled, "silu", {"squares": stream.squares, "eps": eps, "out": out})
    return out


def linear_residual(weight: DecodeWeight, x: torch.Tensor, stream: Stream, gain: torch.Tensor) -> Stream:
    """residual + x @ W.T, before the norm with `gain`; `stream` stays unchanged."""
    parts = triton.cdiv(weight.n, weight.tile(x.shape[0]).rows)
    new = _new_stream(torch.empty_like(stream.residual), parts)
    operands = {"old_residual": stream.residual, "gain": gain, "residual": new.residual, "out": new.scaled}
    weight.launch(x, "residual", {**operands, "side": new.squares})
    return new


def linear(weight: DecodeWeight, x: torch.Tensor) -> torch.Tensor:
    """[T, N]: x @ W.T (+ bias)."""
    out = x.new_empty((x.shape[0], weight.n))
    weight.launch(x, "plain", {"bias": weight.bias, "out": out})
    return out


def _new_stream(residual: torch.Tensor, parts: int) -> Stream:
    squares = torch.empty((residual.shape[0], parts), dtype=torch.float32, device=residual.device)
    return Stream(residual, torch.empty_like(residual), squares)
