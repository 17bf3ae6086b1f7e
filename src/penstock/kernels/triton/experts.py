"""The experts of a mixture on a GPU: the products of sorted rows, and the sum of a token's experts.

`penstock.kernels.experts` describes the computation, and where it rounds. A program computes some outputs of a tile of
rows of one slot: the device finds the slot, so a step's grid depends on its number of rows alone. There is one tile for
any number of rows, which processes K in steps of one depth from the first to the last: a row's bits depend on that row
and its expert, not on the other rows or the slot.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from penstock.kernels.experts import CLAMP_ALPHA, CLAMP_LIMIT, Biases, ExpertsShape, Groups, group_reference
from penstock.kernels.quantized import LayerWeight, dense
from penstock.kernels.triton.linear.device import load_rows
from penstock.kernels.triton.linear.tiles import grouped
from penstock.kernels.triton.segments import find_segment, first_row

_COMBINED = 1024  # outputs of a program that adds the experts of a token
_ALPHA, _LIMIT = tl.constexpr(CLAMP_ALPHA), tl.constexpr(CLAMP_LIMIT)


class GroupedProduct:
    """Weights [slots, N, K], or with an activation [slots, 2 N, K], gate before up, which are used unchanged."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, activation: str = "none") -> None:
        """`bias` is [slots, weight.shape[1]]. `activation` is "none", "silu" or "clamped"."""
        assert weight.dim() == 3 and weight.is_contiguous(), f"{tuple(weight.shape)} with strides {weight.stride()}"
        self.weight, self.bias = weight, bias
        self._activation = activation
        self._n = weight.shape[1] if activation == "none" else weight.shape[1] // 2
        self._tile = grouped(weight.shape[2], weight.dtype.itemsize)

    def __call__(
        self, x: torch.Tensor, starts: torch.Tensor, pairs: torch.Tensor | None = None, top_k: int = 1
    ) -> torch.Tensor:
        """Returns [P, N], of rows sorted by slot, those of a slot from starts[slot] to starts[slot + 1], [slots + 1]
        int32. They are the rows of x, [P, K], or with `pairs`, [P] int32, the rows pairs // top_k of x, [T, K].

        Rows in no slot are undefined.
        """
        num_slots, _, k = self.weight.shape
        assert x.shape[1] == k and x.dtype == self.weight.dtype and x.is_contiguous(), f"{x.shape} {x.dtype}"
        num_rows, tile = len(x) if pairs is None else len(pairs), self._tile
        out = x.new_empty((num_rows, self._n))
        if num_rows:
            tiles = num_rows // tile.tokens + num_slots + 1
            _grouped_product[(tiles, triton.cdiv(self._n, tile.rows))](
                x, self.weight, self.bias, pairs, starts, out, num_slots, top_k, self._n, k,
                tile.rows, tile.tokens, tile.depth, self._activation,
                num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
            )  # fmt: skip
        return out


class HeadsProduct:
    """`y[head] = x[head] @ weight[head].T`: experts of which each has the rows of one head."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._product = GroupedProduct(weight)
        self._bounds = torch.arange(len(weight) + 1, dtype=torch.int32, device=weight.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[heads, rows, in_features] -> [heads, rows, out_features], both contiguous."""
        heads, rows, _ = x.shape
        assert heads == len(self._bounds) - 1, f"{tuple(x.shape)} for {len(self._bounds) - 1} heads"
        return self._product(x.flatten(0, 1), self._bounds * rows).unflatten(0, (heads, rows))

    def dense_weight(self) -> torch.Tensor:
        return self._product.weight


class TritonExperts:
    """`GroupedExperts` in tensors of the device."""

    def __init__(self, shape: ExpertsShape, has_biases: bool, device: torch.device) -> None:
        self._shape = shape
        count, options = shape.num_slots, {"dtype": shape.dtype, "device": device}
        gate_up = torch.zeros((count, 2 * shape.own_inner, shape.in_features), **options)
        down = torch.zeros((count, shape.out_features, shape.inner), **options)
        biases = Biases(gate_up[..., 0].contiguous(), down[..., 0].contiguous()) if has_biases else None
        assert shape.activation in ("silu", "clamped"), f"{shape.activation} is computed on a CPU only"
        self._gate_up = GroupedProduct(gate_up, biases and biases.gate_up, shape.activation)
        self._down = GroupedProduct(down, biases and biases.down)

    def store(self, slot: int, gate_up: LayerWeight, down: LayerWeight, biases: Biases | None = None) -> None:
        self._gate_up.weight[slot] = dense(gate_up, self._gate_up.weight.dtype)
        self._down.weight[slot] = dense(down, self._down.weight.dtype)
        if self._gate_up.bias is not None and self._down.bias is not None:
            assert biases is not None, "an expert without biases"
            self._gate_up.bias[slot] = biases.gate_up
            self._down.bias[slot] = biases.down

    def weights(self, slot: int) -> tuple[_Stored, _Stored]:
        return _Stored(self._gate_up.weight[slot]), _Stored(self._down.weight[slot])

    def arrays(self) -> tuple[torch.Tensor, ...]:
        return ()

    def group(self, ids: torch.Tensor, slots: torch.Tensor, num_slots: int = 0) -> Groups:
        return group_reference(ids, slots, num_slots or self._shape.num_slots)

    def gate_up(self, x: torch.Tensor, groups: Groups) -> torch.Tensor:
        return self._gate_up(x, groups.starts, groups.pairs, groups.rows.shape[1])

    def down(self, activated: torch.Tensor, groups: Groups) -> torch.Tensor:
        return self._down(activated, groups.starts)

    def combine(self, outputs: torch.Tensor, groups: Groups, weights: torch.Tensor) -> torch.Tensor:
        (tokens, top_k), width = weights.shape, outputs.shape[1]
        assert weights.dtype == torch.float32 and weights.is_contiguous(), f"{weights.dtype} {weights.stride()}"
        out = outputs.new_empty((tokens, width))
        if tokens:
            _combine[(tokens, triton.cdiv(width, _COMBINED))](
                outputs, groups.rows, weights, out, width, top_k, _COMBINED, num_warps=4, enable_fp_fusion=False
            )
        return out


class _Stored:
    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight

    def dense_weight(self) -> torch.Tensor:
        return self._weight


@triton.jit
def _activated(gate, up, activation: tl.constexpr):
    """float32 throughout; a NaN stays one."""
    if activation == "clamped":
        gate = tl.where(gate > _LIMIT, _LIMIT, gate)
        up = tl.where(up > _LIMIT, _LIMIT, tl.where(up < -_LIMIT, -_LIMIT, up))
        y = (up + 1.0) * (gate / (1.0 + tl.exp(-gate * _ALPHA)))
    else:
        y = gate / (1.0 + tl.exp(-gate)) * up
    return y


@triton.jit
def _outputs(acc, bias, outputs, is_output, dtype: tl.constexpr):
    """Sums [outputs, rows] -> [rows, outputs] with the biases, rounded to the dtype."""
    y = tl.trans(acc)
    if bias is not None:
        y += tl.load(bias + outputs, mask=is_output, other=0.0).to(tl.float32)[None, :]
    return y.to(dtype)


@triton.jit(do_not_specialize_on_alignment=["pairs", "starts"])
def _grouped_product(
    x, weight, bias, pairs, starts, out,
    num_slots: tl.constexpr, top_k: tl.constexpr, n: tl.constexpr, k: tl.constexpr, tile_outputs: tl.constexpr,
    tile_rows: tl.constexpr, depth: tl.constexpr, activation: tl.constexpr,
):  # fmt: skip
    """Grid [tiles of rows, tiles of outputs]."""
    tile = tl.program_id(0)
    slot = find_segment(starts, tile, num_slots, tile_rows)
    if slot == num_slots:
        return
    start = tl.load(starts + slot)
    count = tl.load(starts + slot + 1) - start
    first = first_row(start, tile, slot, tile_rows)
    if first >= count:
        return
    within = first + tl.arange(0, tile_rows)
    # Rows beyond the last one recompute it, which is harmless.
    rows = (start + tl.minimum(within, count - 1)).to(tl.int64)
    sources = rows
    if pairs is not None:
        sources = (tl.load(pairs + rows) // top_k).to(tl.int64)
    outputs = tl.program_id(1) * tile_outputs + tl.arange(0, tile_outputs)
    is_output = outputs < n
    features = tl.minimum(outputs, n - 1).to(tl.int64)
    halves: tl.constexpr = 1 if activation == "none" else 2
    own = weight + slot.to(tl.int64) * (halves * n * k)
    acc = tl.zeros([tile_outputs, tile_rows], tl.float32)
    up_acc = acc
    for column in tl.range(0, k, depth):
        inputs = tl.trans(load_rows(x, sources, column, k, depth))
        acc = tl.dot(load_rows(own, features, column, k, depth), inputs, acc, input_precision="ieee")
        if halves == 2:
            up = load_rows(own, features + n, column, k, depth)
            up_acc = tl.dot(up, inputs, up_acc, input_precision="ieee")
    dtype: tl.constexpr = out.dtype.element_ty
    own_bias = bias
    if bias is not None:
        own_bias = bias + slot * (halves * n)
    y = _outputs(acc, own_bias, outputs, is_output, dtype)
    if halves == 2:
        up_y = _outputs(up_acc, own_bias, outputs + n, is_output, dtype)
        y = _activated(y.to(tl.float32), up_y.to(tl.float32), activation).to(dtype)
    is_there = (within < count)[:, None] & is_output[None, :]
    tl.store(out + rows[:, None] * n + outputs[None, :], y, mask=is_there)


@triton.jit(do_not_specialize_on_alignment=["rows_ptr", "weights_ptr"])
def _combine(
    outputs_ptr, rows_ptr, weights_ptr, out_ptr, width: tl.constexpr, top_k: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    """Grid [tokens, blocks of outputs]: the outputs of a token's experts, added in the order of its choices."""
    token = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * block + tl.arange(0, block)
    is_inside = place < width
    total = tl.zeros([block], tl.float32)
    for choice in tl.static_range(top_k):
        row = tl.load(rows_ptr + token * top_k + choice).to(tl.int64)
        weight = tl.load(weights_ptr + token * top_k + choice)
        total += tl.load(outputs_ptr + row * width + place, mask=is_inside, other=0.0).to(tl.float32) * weight
    tl.store(out_ptr + token * width + place, total.to(out_ptr.dtype.element_ty), mask=is_inside)
