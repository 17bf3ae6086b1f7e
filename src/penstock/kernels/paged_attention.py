"""Attention over a paged KV cache: prefill, chunked prefill, decode and verification rows in one call.

It is causal, or every row sees all tokens of its request, as in an encoder.

A query row's bits depend only on its own q and on the keys and values at the positions it sees: not on the other rows,
its chunk, the batch, the ids of the blocks, or the number of threads. On the CPU this holds because every row processes
tiles of 64 positions, and merges ranges of 1,024 positions, in the same order with the same instructions; arithmetics
(`native.ARITHMETIC`) differ in the last bits. A value that another row of the call sees and this row does not must be
finite; all other memory may hold anything, including NaN. The torch reference processes tiles in the same order with
elementwise products and sums of one shape, slowly: tests compare with it, and a machine without the native library uses
it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from penstock.kernels.kv_rows import dequantize_rows, head_size_of, is_in_pairs
from penstock.kernels.native import DTYPE_CODES, library, num_threads

_TILE = 64
_ROWS = 32

Requests = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""`block_table`, `query_start_loc` and `seq_lens`, as `paged_attention` takes them."""


@dataclass(frozen=True, slots=True)
class Softmax:
    """How a row weighs the values that it sees: exp(s) / (sum of exp(s) + exp(sink)) with scores s = scale * q . k.

    With a `softcap` (Gemma 2, arXiv:2408.00118) scores are softcap * tanh(scale / softcap * q . k); 0 means none.
    `sinks` (gpt-oss, arXiv:2508.10925; the idea is in Xiao et al. 2023, arXiv:2309.17453) are one number for each head,
    which is not capped: [Hq] float32, or None. A sink is added to the sum after that of all keys, whatever the window.
    """

    scale: float
    sliding_window: int = 0  # a query sees this many positions, including its own; 0 is all of them
    softcap: float = 0.0
    sinks: torch.Tensor | None = None


def paged_attention(
    q: torch.Tensor,  # [T, Hq, D], rows may be strided
    kv_cache: torch.Tensor,  # [num_blocks, 2 (K, V), Hkv, block_size, D], or D + 4 of int8, or in pairs (`kv_rows`)
    block_table: torch.Tensor,  # [R, max_blocks] int32; entries that no row sees are never followed
    query_start_loc: torch.Tensor,  # [R + 1] int32: request r's queries are the rows from [r] to [r + 1]
    seq_lens: torch.Tensor,  # [R] int32, these queries included; 0 for padding, which has no queries
    softmax: Softmax,
) -> torch.Tensor:
    """Causal: [T, Hq * D]; rows that belong to no request, after query_start_loc[R], are zeros."""
    return _attend(q, kv_cache, (block_table, query_start_loc, seq_lens), softmax, is_causal=True)


def latent_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,  # [num_blocks, 1, 1, block_size, D]: keys, whose last V dimensions are the values
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    softmax: Softmax,
    value_size: int,  # V
) -> torch.Tensor:
    """Causal, like `paged_attention`: [T, Hq * V]."""
    return _attend(q, kv_cache, (block_table, query_start_loc, seq_lens), softmax, value_size, is_causal=True)


def bidirectional_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    softmax: Softmax,
) -> torch.Tensor:
    """Does the same, except that a query sees all positions of its request, including later ones. With a window it
    sees those less than `sliding_window` away, in both directions.
    """
    return _attend(q, kv_cache, (block_table, query_start_loc, seq_lens), softmax, is_causal=False)


def _attend(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    requests: Requests,
    softmax: Softmax,
    value_size: int | None = None,
    *,
    is_causal: bool,
) -> torch.Tensor:
    value_size = q.shape[2] if value_size is None else value_size
    _check(q, kv_cache, requests, value_size)
    assert softmax.scale > 0 and softmax.sliding_window >= 0 and softmax.softcap >= 0, f"{softmax}"
    check_sinks(softmax.sinks, q.shape[1])
    block_table, query_start_loc, seq_lens = requests
    native = library() if q.is_cpu else None
    if native is None:
        return _attend_reference(q, kv_cache, requests, softmax, value_size, is_causal=is_causal)
    tokens, num_heads, head_dim = q.shape
    out = q.new_empty((tokens, num_heads * value_size))
    native.function("paged_attention", "pnppnppppnnnnnnnnnffiiiii")(
        q.data_ptr(), q.stride(0), kv_cache.data_ptr(), block_table.data_ptr(), block_table.stride(0),
        query_start_loc.data_ptr(), seq_lens.data_ptr(), None if softmax.sinks is None else softmax.sinks.data_ptr(),
        out.data_ptr(), tokens, seq_lens.shape[0], num_heads, kv_cache.shape[2], head_dim, value_size,
        kv_cache.shape[3], softmax.sliding_window, num_threads(), softmax.scale, softmax.softcap,
        DTYPE_CODES[q.dtype], is_causal, kv_cache.shape[1] == 1, kv_cache.dtype == torch.int8,
        is_in_pairs(kv_cache, native),
    )  # fmt: skip
    return out


def paged_attention_reference(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    softmax: Softmax,
) -> torch.Tensor:
    """`paged_attention` in float32, or in float64 for float64 tensors."""
    requests = (block_table, query_start_loc, seq_lens)
    return _attend_reference(q, kv_cache, requests, softmax, q.shape[2], is_causal=True)


def _attend_reference(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    requests: Requests,
    softmax: Softmax,
    value_size: int,
    *,
    is_causal: bool,
) -> torch.Tensor:
    block_table, query_start_loc, seq_lens = requests
    out = q.new_zeros((*q.shape[:2], value_size))
    starts = query_start_loc.tolist()
    for request, seq_len in enumerate(seq_lens.tolist()):
        # Some rows at a time: the products before summation take rows x heads x tile x D numbers.
        for start in range(starts[request], starts[request + 1], _ROWS):
            end = min(start + _ROWS, starts[request + 1])
            position = seq_len - (starts[request + 1] - start)
            own = torch.arange(position, position + end - start, device=q.device)
            firsts, lasts = torch.zeros_like(own), own if is_causal else torch.full_like(own, seq_len - 1)
            if softmax.sliding_window:
                firsts, lasts = own - softmax.sliding_window + 1, lasts.minimum(own + softmax.sliding_window - 1)
            seen = (firsts.clamp(min=0), lasts)
            out[start:end] = _attend_one(q[start:end], kv_cache, block_table[request], seen, softmax, value_size)
    return out.flatten(1)


def _attend_one(
    q: torch.Tensor,  # [n, Hq, D]
    kv_cache: torch.Tensor,
    blocks: torch.Tensor,  # [max_blocks]
    seen: tuple[torch.Tensor, torch.Tensor],  # [n] int64 each: the first and last position that a row sees, ascending
    softmax: Softmax,
    value_size: int,
) -> torch.Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    count, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv_cache.shape[2:4]
    grouped = q.to(wide).view(count, num_kv_heads, num_heads // num_kv_heads, 1, head_dim)
    first, end = int(seen[0][0]), int(seen[1][-1]) + 1
    firsts, lasts = (each[:, None] for each in seen)
    state = _SoftmaxState(grouped[..., 0, :value_size])
    softcap = softmax.softcap
    for tile in range(first // _TILE * _TILE, end, _TILE):
        # Every tile has the full width, however much of it is present, so that all sums have one shape.
        places = torch.arange(tile, tile + _TILE, device=q.device)
        is_there = (places >= first) & (places < end)
        ids = torch.where(is_there, blocks[(places // block_size).clamp(max=blocks.shape[0] - 1)].long(), 0)
        rows = kv_cache[ids, :, :, places % block_size]
        rows = dequantize_rows(rows) if rows.dtype == torch.int8 else rows
        planes = rows.to(wide).masked_fill(~is_there[:, None, None, None], 0)
        k, v = planes[:, 0], planes[:, -1, :, -value_size:]
        is_seen = is_there & (places >= firsts) & (places <= lasts)
        scores = (grouped * k.transpose(0, 1)[:, None]).sum(-1) * softmax.scale  # [n, Hkv, group, tile]
        if softcap:
            scores = softcap * (scores / softcap).tanh()
        state.add(scores.masked_fill(~is_seen[:, None, None], -torch.inf), v.transpose(0, 1)[:, None])
    if softmax.sinks is not None:
        state.add_sinks(softmax.sinks.to(wide).view(num_kv_heads, -1))
    return state.result().reshape(count, num_heads, value_size).to(q.dtype)


class _SoftmaxState:
    """The running softmax of rows over tiles (Milakov and Gimelshein 2018, arXiv:1805.02867)."""

    def __init__(self, like: torch.Tensor) -> None:
        self._best = like.new_full(like.shape[:-1], -torch.inf)
        self._mass = like.new_zeros(like.shape[:-1])
        self._sum = torch.zeros_like(like)

    def add(self, scores: torch.Tensor, values: torch.Tensor) -> None:
        """Scores [..., tile], -inf where a row does not see; values [..., tile, D]."""
        best = torch.maximum(self._best, scores.amax(-1))
        # For a row that has seen nothing yet, weights are zero instead of inf - inf.
        finite = best.masked_fill(best.isinf(), 0)
        weights = (scores - finite[..., None]).exp()
        kept = (self._best - finite).exp()
        self._mass = self._mass * kept + weights.sum(-1)
        self._sum = self._sum * kept[..., None] + (weights[..., None] * values).sum(-2)
        self._best = best

    def add_sinks(self, sinks: torch.Tensor) -> None:
        """Sinks of the heads, broadcast to the rows that have seen something."""
        self._mass = self._mass + (sinks - self._best).exp()

    def result(self) -> torch.Tensor:
        return self._sum / self._mass[..., None]


def _check(q: torch.Tensor, kv_cache: torch.Tensor, requests: Requests, value_size: int) -> None:
    block_table, query_start_loc, seq_lens = requests
    planes = (2,) if kv_cache.dtype == torch.int8 else (1, 2)
    assert q.dtype in DTYPE_CODES and kv_cache.dtype in (q.dtype, torch.int8), f"q {q.dtype}, cache {kv_cache.dtype}"
    fits = q.dim() == 3 and kv_cache.dim() == 5 and kv_cache.shape[1] in planes and head_size_of(kv_cache) == q.shape[2]
    assert fits, f"q is {tuple(q.shape)}, the cache {tuple(kv_cache.shape)}"
    num_heads, head_dim = q.shape[1:]
    assert value_size == head_dim or (kv_cache.shape[1] == 1 and 0 < value_size < head_dim), (
        f"values of {value_size} in a cache {tuple(kv_cache.shape)}"
    )
    num_kv_heads, block_size = kv_cache.shape[2:4]
    assert num_heads % num_kv_heads == 0, f"{num_heads} heads share {num_kv_heads} KV heads"
    assert head_dim % 8 == 0 and block_size % 8 == 0, f"head_dim {head_dim}, block_size {block_size}"
    assert q.stride(2) == 1 and q.stride(1) == head_dim, f"q has strides {q.stride()}"
    assert kv_cache.is_contiguous(), f"the cache has strides {kv_cache.stride()}"
    count = seq_lens.shape[0]
    assert block_table.shape[0] == count and query_start_loc.shape == (count + 1,), (
        f"{tuple(block_table.shape)} block table, {tuple(query_start_loc.shape)} starts for {count} requests"
    )
    assert block_table.dtype == query_start_loc.dtype == seq_lens.dtype == torch.int32, (
        f"block table {block_table.dtype}, starts {query_start_loc.dtype}, lengths {seq_lens.dtype}"
    )
    assert block_table.stride(1) == 1 and query_start_loc.is_contiguous() and seq_lens.is_contiguous(), (
        f"block table has strides {block_table.stride()}"
    )


def check_sinks(sinks: torch.Tensor | None, num_heads: int) -> None:
    assert sinks is None or (sinks.shape == (num_heads,) and sinks.dtype == torch.float32 and sinks.is_contiguous()), (
        f"sinks {sinks.dtype} {tuple(sinks.shape)} for {num_heads} heads"
    )
