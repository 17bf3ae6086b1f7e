"""y = x @ W.T + bias for any number of rows, every row in one order, for `--deterministic`.

x is [T, K], W [N, K], both row-major and of one dtype, bfloat16, float16 or float32; sums are float32, rounded once.
One tile, chosen by K and the dtype alone, processes K in steps of one depth from the first to the last: a row's bits
depend on that row and the weight, not on T, its place, or the rest of x.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from penstock.kernels.triton.capabilities import Capabilities
from penstock.kernels.triton.linear.device import load_rows, load_weight
from penstock.kernels.triton.linear.tiles import fixed

_GROUP = 16  # tiles of tokens that process the weight together, so that caches serve both


class Matmul:
    """One weight [N, K], which the caller must not change; calls allocate their output and do not wait."""

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        capabilities: Capabilities = Capabilities(),  # noqa: B008 - it is frozen
    ) -> None:
        assert weight.dim() == 2 and weight.is_contiguous(), f"{tuple(weight.shape)} with strides {weight.stride()}"
        self._n, self._k = weight.shape
        assert bias is None or bias.shape == (self._n,), f"{bias.shape} for {self._n} outputs"
        self._tile = fixed(self._k, weight.dtype.itemsize)
        is_aligned = weight.data_ptr() % 16 == 0 and self._k * weight.dtype.itemsize % 16 == 0
        self._tma = capabilities.tma and is_aligned
        block = [self._tile.rows, self._tile.depth]
        self._weight = TensorDescriptor.from_tensor(weight, block) if self._tma else weight
        self._dense = weight
        self._bias = bias
        self._dtype = weight.dtype

    def dense_weight(self) -> torch.Tensor:
        return self._dense

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, K] -> [T, N]."""
        assert x.dim() == 2 and x.shape[1] == self._k and x.dtype == self._dtype, f"{x.shape} {x.dtype}"
        assert x.is_contiguous(), f"x has strides {x.stride()}"
        tile, num_tokens = self._tile, x.shape[0]
        out = x.new_empty((num_tokens, self._n))
        num_programs = triton.cdiv(num_tokens, tile.tokens) * triton.cdiv(self._n, tile.rows)
        if num_programs:
            matmul[(num_programs,)](
                x, self._weight, self._bias, out, num_tokens, self._n, self._k, tile.rows, tile.tokens, tile.depth,
                _GROUP, self._tma,
                num_warps=tile.warps, num_stages=tile.stages,
            )  # fmt: skip
        return out


@triton.jit(do_not_specialize=["num_tokens"])
def matmul(
    x, weight, bias, out, num_tokens,
    n: tl.constexpr, k: tl.constexpr, tile_rows: tl.constexpr, tile_tokens: tl.constexpr, depth: tl.constexpr,
    group_tiles: tl.constexpr, tma: tl.constexpr,
):  # fmt: skip
    """Grid [tiles], `group_tiles` consecutive tiles of tokens on each tile of the weight."""
    program = tl.program_id(0)
    row_tiles: tl.constexpr = (n + tile_rows - 1) // tile_rows
    group = program // (group_tiles * row_tiles)
    group_size = tl.minimum(tl.cdiv(num_tokens, tile_tokens) - group * group_tiles, group_tiles)
    place = program % (group_tiles * row_tiles)
    first_token = (group * group_tiles + place % group_size) * tile_tokens
    first_row = place // group_size * tile_rows
    tokens = first_token + tl.arange(0, tile_tokens)
    token_rows = tl.minimum(tokens, num_tokens - 1).to(tl.int64)
    acc = tl.zeros([tile_rows, tile_tokens], tl.float32)
    for column in tl.range(0, k, depth):
        inputs = tl.trans(load_rows(x, token_rows, column, k, depth))
        tile = load_weight(weight, first_row, column, n, k, tile_rows, depth, tma)
        acc = tl.dot(tile, inputs, acc, input_precision="ieee")
    rows = first_row + tl.arange(0, tile_rows)
    y = tl.trans(acc)
    if bias is not None:
        y += tl.load(bias + rows, mask=rows < n, other=0.0).to(tl.float32)[None, :]
    is_there = (tokens < num_tokens)[:, None] & (rows < n)[None, :]
    tl.store(out + tokens.to(tl.int64)[:, None] * n + rows[None, :], y.to(out.dtype.element_ty), mask=is_there)
