"""Paged attention: correct, without the keys that a row must not see, and bit-identical however a row is computed."""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from penstock.kernels import native
from penstock.kernels.kv_rows import dequantize_rows, is_in_pairs, quantize_rows, rows_to_pairs
from penstock.kernels.paged_attention import Softmax, latent_attention, paged_attention

module = importlib.import_module("penstock.kernels.paged_attention")
ISAS = native.instruction_sets()
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
DTYPES = tuple(TOLERANCE)
# The last head size is not a multiple of any vector; two block sizes are not multiples of a tile of 16 keys.
HEAD_DIMS = (64, 80, 96, 128, 256, 72)
BLOCK_SIZES = (8, 16, 24, 32)
# Query heads and KV heads: one to one, groups that fill, straddle and exceed the rows that are computed together.
HEADS = ((2, 2), (4, 2), (6, 2), (7, 1), (16, 1), (80, 1))
# A decode row, a chunk, a whole prompt, padding, a verification, a long context: (query tokens, tokens before them).
MIXED = ((1, 200), (70, 13), (33, 0), (0, 0), (5, 64), (1, 330), (1, 0))


@pytest.fixture(params=(*ISAS, "torch"))
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Selects every instruction set of this processor, on one thread."""
    library = None if request.param == "torch" else native.library_for(request.param)
    monkeypatch.setattr(module, "library", lambda: library)
    threads = native.num_threads()
    native.set_num_threads(1)
    yield request.param
    native.set_num_threads(threads)


@dataclass
class Sequence:
    """One request's q, k and v at every position, from which any part of its attention can be computed."""

    q: torch.Tensor  # [n, Hq, D]
    k: torch.Tensor  # [n, Hkv, D]
    v: torch.Tensor  # [n, Hkv, D], or of latents the last V dimensions of k

    @classmethod
    def random(
        cls, length: int, heads: tuple[int, int], head_dim: int, dtype: torch.dtype, value_dim: int = 0
    ) -> Sequence:
        q, k, v = (torch.randn(length, size, head_dim).to(dtype) for size in (*heads, heads[1]))
        return cls(q, k, k[..., -value_dim:] if value_dim else v)

    @property
    def planes(self) -> tuple[torch.Tensor, ...]:
        """What the cache stores."""
        return (self.k, self.v) if self.k.shape == self.v.shape else (self.k,)

    def exact(self, window: int, softcap: float = 0.0, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """Returns [n, Hq * V], computed densely in float64; a sink is one more score, whose weight is dropped."""
        length, num_heads, head_dim = self.q.shape
        groups = num_heads // self.k.shape[1]
        k, v = (x.double().repeat_interleave(groups, dim=1) for x in (self.k, self.v))
        scores = torch.einsum("nhd,khd->hnk", self.q.double(), k) * head_dim**-0.5
        if softcap:
            scores = softcap * (scores / softcap).tanh()
        distance = torch.arange(length)[:, None] - torch.arange(length)
        hidden = (distance < 0) | (distance >= (window or length))
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks.double()[:, None, None].expand(num_heads, length, 1)), -1)
        weights = scores.softmax(-1)[..., :length]
        return torch.einsum("hnk,khd->nhd", weights, v).flatten(1)


@dataclass
class Part:
    """The queries [first, last) of a sequence, whose keys up to `last` are in the cache."""

    sequence: Sequence
    first: int
    last: int


def sinks_of(sequence: Sequence) -> torch.Tensor:
    """From far below the scores to far above them."""
    return torch.linspace(-3, 5, sequence.q.shape[1])


def run(
    parts: list[Part],
    block_size: int = 16,
    window: int = 0,
    seed: int = 0,
    spare_rows: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    is_int8: bool = False,
) -> torch.Tensor:
    """Computes all parts in one call, on random blocks of a cache that is NaN except at positions that queries see.

    With a window, the table's entries for blocks that no query sees are 0, and block 0 is NaN. q is a strided view.
    """
    shuffle = torch.Generator().manual_seed(seed)
    like = parts[0].sequence
    needed = [-(-part.last // block_size) for part in parts]
    blocks = (torch.randperm(sum(needed) + 3, generator=shuffle) + 1)[: sum(needed)].split(needed)
    shape = (sum(needed) + 4, len(like.planes), like.k.shape[1], block_size, like.k.shape[2])
    cache = torch.full(shape, float("nan"), dtype=like.q.dtype)
    cache = quantize_rows(cache) if is_int8 else cache
    table = torch.zeros(len(parts), max(needed) + 2, dtype=torch.int32)
    for row, part, own in zip(table, parts, blocks, strict=True):
        oldest = max(0, part.first - window + 1) if window else 0
        seen = torch.arange(oldest, part.last)
        for index, values in enumerate(part.sequence.planes):
            rows = quantize_rows(values[seen]) if is_int8 else values[seen]
            cache[own[seen // block_size], index, :, seen % block_size] = rows
        row[oldest // block_size : len(own)] = own[oldest // block_size :].int()
    cache = rows_to_pairs(cache) if is_in_pairs(cache, module.library()) else cache
    q = torch.cat([part.sequence.q[part.first : part.last] for part in parts])
    wide = torch.full((q.shape[0] + spare_rows, q.shape[1] + 3, q.shape[2]), float("nan"), dtype=q.dtype)
    wide[: q.shape[0], : q.shape[1]] = q
    lengths = torch.tensor([0] + [part.last - part.first for part in parts])
    starts, seq_lens = lengths.cumsum(0).int(), torch.tensor([part.last for part in parts], dtype=torch.int32)
    softmax = Softmax(q.shape[2] ** -0.5, window, softcap, sinks)
    arguments = (wide[:, : q.shape[1]], cache, table, starts, seq_lens, softmax)
    if len(like.planes) == 2:
        return paged_attention(*arguments)
    # All latents are kept: a window would have no effect.
    assert not window
    return latent_attention(*arguments, like.v.shape[2])


@functools.cache
def mixed(
    dtype: torch.dtype,
    head_dim: int,
    heads: tuple[int, int],
    window: int,
    value_dim: int,
    softcap: float,
    has_sinks: bool,
) -> tuple[list[Part], torch.Tensor]:
    """Returns the parts of a mixed batch and the expected result in float64."""
    torch.manual_seed(0)
    parts = [
        Part(Sequence.random(before + count, heads, head_dim, dtype, value_dim), before, before + count)
        for count, before in MIXED
    ]
    sinks = sinks_of(parts[0].sequence) if has_sinks else None
    exact = [part.sequence.exact(window, softcap, sinks)[part.first : part.last] for part in parts]
    return parts, torch.cat(exact)


def check(
    dtype: torch.dtype,
    head_dim: int = 64,
    heads: tuple[int, int] = (4, 2),
    block_size: int = 16,
    window: int = 0,
    value_dim: int = 0,
    softcap: float = 0.0,
    has_sinks: bool = False,
) -> None:
    parts, expected = mixed(dtype, head_dim, heads, window, value_dim, softcap, has_sinks)
    tolerance = TOLERANCE[dtype]
    sinks = sinks_of(parts[0].sequence) if has_sinks else None
    out = run(parts, block_size, window, softcap=softcap, sinks=sinks)
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("window", [0, 37])
def test_head_sizes(isa: str, dtype: torch.dtype, head_dim: int, window: int) -> None:
    check(dtype, head_dim=head_dim, window=window)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("window", [0, 1, 64, 100])
def test_block_sizes(isa: str, dtype: torch.dtype, block_size: int, window: int) -> None:
    check(dtype, block_size=block_size, window=window)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
def test_grouped_heads(isa: str, dtype: torch.dtype, heads: tuple[int, int]) -> None:
    check(dtype, heads=heads, window=50)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "value_dim"), [(56, 40), (96, 64), (576, 512)])
@pytest.mark.parametrize("block_size", [8, 32])
def test_latents(isa: str, dtype: torch.dtype, head_dim: int, value_dim: int, block_size: int) -> None:
    check(dtype, head_dim, (5, 1), block_size, value_dim=value_dim)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "softcap", "has_sinks"), [(0, 1.5, False), (0, 0.0, True), (37, 1.5, True),
                                                              (128, 0.0, True), (131, 0.0, True)])  # fmt: skip
def test_soft_caps_and_sinks(isa: str, dtype: torch.dtype, window: int, softcap: float, has_sinks: bool) -> None:
    check(dtype, heads=(6, 2), window=window, softcap=softcap, has_sinks=has_sinks)


def test_soft_caps_and_sinks_of_latents(isa: str) -> None:
    check(torch.float32, 96, (5, 1), value_dim=64, softcap=1.5, has_sinks=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "heads", "block_size", "window"), [(64, (4, 2), 16, 0), (128, (80, 1), 8, 37),
                                                                         (72, (7, 1), 24, 0)])  # fmt: skip
def test_int8_is_the_values_that_it_stands_for(
    isa: str, dtype: torch.dtype, head_dim: int, heads: tuple[int, int], block_size: int, window: int
) -> None:
    """They are float32 numbers, or bfloat16 for instruction sets that multiply pairs of it."""
    parts, _ = mixed(dtype, head_dim, heads, window, 0, 0.0, True)
    sinks = sinks_of(parts[0].sequence)
    as_bf16 = dtype == torch.bfloat16 and isa in ("amx", "avx512_bf16")
    twins: list[Part] = []
    for part in parts:
        own = part.sequence
        vectors = (own.q.float(), *(dequantize_rows(quantize_rows(each)) for each in (own.k, own.v)))
        twin = Sequence(*(each.to(dtype) for each in vectors)) if as_bf16 else Sequence(*vectors)
        twins.append(Part(twin, part.first, part.last))
    found = run(parts, block_size, window, sinks=sinks, is_int8=True)
    assert torch.equal(found, run(twins, block_size, window, sinks=sinks).to(dtype))


def test_padding_rows_are_zero(isa: str) -> None:
    torch.manual_seed(0)
    out = run([Part(Sequence.random(20, (4, 2), 64, torch.float32), 3, 20)], spare_rows=5)
    assert torch.equal(out[17:], torch.zeros(5, 4 * 64))
    assert out[:17].isfinite().all()


def test_large_scores_do_not_overflow(isa: str) -> None:
    torch.manual_seed(0)
    sequence = Sequence.random(150, (2, 1), 64, torch.float32)
    sequence.q *= 300
    torch.testing.assert_close(run([Part(sequence, 0, 150)]).double(), sequence.exact(0), rtol=1e-3, atol=1e-3)


def test_large_scores_and_sinks_do_not_overflow(isa: str) -> None:
    torch.manual_seed(0)
    sequence = Sequence.random(150, (2, 1), 64, torch.float32)
    sequence.q *= 3000
    capped = run([Part(sequence, 0, 150)], softcap=20.0)
    torch.testing.assert_close(capped.double(), sequence.exact(0, 20.0), rtol=1e-3, atol=1e-3)
    sequence.q /= 3e6
    sinks = torch.tensor([-3e4, 3e4])
    out = run([Part(sequence, 0, 150)], sinks=sinks)
    torch.testing.assert_close(out.double(), sequence.exact(0, sinks=sinks), rtol=1e-5, atol=1e-5)


class TestSameBits:
    """Results are bit-identical, for every dtype, with and without a window."""

    @pytest.fixture(params=[(torch.bfloat16, 128, (4, 2), 0), (torch.bfloat16, 80, (3, 1), 0),
                            (torch.float16, 72, (4, 2), 0), (torch.float32, 64, (2, 2), 0),
                            (torch.bfloat16, 144, (5, 1), 128)])  # fmt: skip
    def sequence(self, request: pytest.FixtureRequest) -> Sequence:
        torch.manual_seed(1)
        dtype, head_dim, heads, value_dim = request.param
        return Sequence.random(211, heads, head_dim, dtype, value_dim)

    @pytest.fixture(params=[0, 50])
    def window(self, request: pytest.FixtureRequest, sequence: Sequence) -> int:
        return request.param if len(sequence.planes) == 2 else 0

    @pytest.mark.parametrize("chunk", [1, 16, 17, 64])
    def test_whole_or_in_chunks_or_token_by_token(self, isa: str, sequence: Sequence, window: int, chunk: int) -> None:
        whole = run([Part(sequence, 0, 211)], window=window)
        for first in range(0, 211, chunk):
            last = min(211, first + chunk)
            assert torch.equal(run([Part(sequence, first, last)], window=window), whole[first:last])

    @pytest.mark.parametrize(("softcap", "is_int8"), [(0.0, False), (1.5, False), (0.0, True)])
    def test_sinks_in_chunks_and_batches(
        self, isa: str, sequence: Sequence, window: int, softcap: float, is_int8: bool
    ) -> None:
        is_int8 = is_int8 and len(sequence.planes) == 2
        options = {"window": window, "softcap": softcap, "sinks": sinks_of(sequence), "is_int8": is_int8}
        whole = run([Part(sequence, 0, 211)], **options)
        bounds = (0, 1, 2, 19, 83, 84, 147, 211)
        parts = [Part(sequence, *bounds) for bounds in itertools.pairwise(bounds)]
        assert torch.equal(torch.cat([run([part], **options) for part in parts]), whole)
        assert torch.equal(run(parts, 32, **options), whole)

    def test_alone_or_in_a_batch(self, isa: str, sequence: Sequence, window: int) -> None:
        dtype, head_dim = sequence.q.dtype, sequence.q.shape[2]
        heads = (sequence.q.shape[1], sequence.k.shape[1])
        value_dim = 0 if len(sequence.planes) == 2 else sequence.v.shape[2]
        others = [
            Part(Sequence.random(n, heads, head_dim, dtype, value_dim), before, n)
            for before, n in ((0, 100), (299, 300))
        ]
        alone = run([Part(sequence, 130, 211)], window=window)
        batch = run([others[0], Part(sequence, 130, 211), others[1]], window=window)
        assert torch.equal(batch[100:-1], alone)

    def test_block_ids_do_not_matter(self, isa: str, sequence: Sequence, window: int) -> None:
        outs = [
            run([Part(sequence, 7, 211)], block_size, window, seed) for block_size in BLOCK_SIZES for seed in (0, 1)
        ]
        assert all(torch.equal(out, outs[0]) for out in outs), "nor whether the cache is in pairs"

    def test_on_one_thread_or_two(self, isa: str, sequence: Sequence, window: int) -> None:
        parts = [Part(sequence, 0, 211), Part(sequence, 100, 101), Part(sequence, 90, 93), Part(sequence, 50, 200)]
        one = run(parts, window=window)
        native.set_num_threads(2)
        for _ in range(3):
            assert torch.equal(run(parts, window=window), one)

    def test_after_other_work_has_used_the_tile_registers(self, isa: str, sequence: Sequence, window: int) -> None:
        before = run([Part(sequence, 0, 211)], window=window)
        torch.randn(64, 64).bfloat16() @ torch.randn(64, 64).bfloat16()
        assert torch.equal(run([Part(sequence, 0, 211)], window=window), before)


@pytest.mark.parametrize("scale", [1e-38, 5e37])
def test_one_row_rounds_tiny_and_huge_numbers_like_many(isa: str, scale: float) -> None:
    torch.manual_seed(4)
    sequence = Sequence.random(100, (4, 2), 128, torch.bfloat16)
    sequence.v.mul_(scale)
    whole = run([Part(sequence, 0, 100)])
    rows = torch.cat([run([Part(sequence, row, row + 1)]) for row in range(100)])
    assert torch.equal(rows, whole)


class TestRanges:
    """Keys beyond those of one range, which threads may compute at the same time: 2,200 positions are three ranges."""

    LENGTH = 2200

    @pytest.fixture(params=[(torch.bfloat16, 64, (4, 2), 0), (torch.float32, 64, (2, 1), 0),
                            (torch.bfloat16, 80, (18, 1), 64)])  # fmt: skip
    def sequence(self, request: pytest.FixtureRequest) -> Sequence:
        torch.manual_seed(2)
        dtype, head_dim, heads, value_dim = request.param
        return Sequence.random(self.LENGTH, heads, head_dim, dtype, value_dim)

    @pytest.mark.parametrize("isa", ISAS, indirect=True)
    @pytest.mark.parametrize("window", [0, 1100])
    def test_same_bits_on_any_number_of_threads(self, isa: str, sequence: Sequence, window: int) -> None:
        window = window if len(sequence.planes) == 2 else 0
        options = {"window": window, "softcap": 2.0, "sinks": sinks_of(sequence)}
        # The ends of a range and of the sequence; one row, a few, and more than share an item.
        parts = [Part(sequence, first, first + count) for first, count in
                 ((1023, 1), (1024, 1), (1025, 3), (2050, 1), (2190, 3), (1000, 150), (2060, 140))]  # fmt: skip
        together = run(parts, **options)
        rows = [row for part in parts for row in range(part.first, part.last)]
        exact = sequence.exact(window, 2.0, options["sinks"])[rows]
        torch.testing.assert_close(together.double(), exact, atol=TOLERANCE[sequence.q.dtype], rtol=0)
        for threads in (2, 3, 64):
            native.set_num_threads(threads)
            alone = [run([part], **options) for part in parts]
            assert torch.equal(torch.cat(alone), together), threads
        single = [run([Part(sequence, row, row + 1)], **options) for row in rows[::20]]
        assert torch.equal(torch.cat(single), together[::20])


def test_wrong_shapes_raise_assertion_errors(isa: str) -> None:
    q, cache = torch.zeros(3, 4, 64), torch.zeros(2, 2, 3, 16, 64)
    starts, seq_lens = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    table = torch.ones(1, 1, dtype=torch.int32)
    with pytest.raises(AssertionError, match="4 heads share 3"):
        paged_attention(q, cache, table, starts, seq_lens, Softmax(1.0))
    with pytest.raises(AssertionError, match="float64"):
        paged_attention(q.double(), cache, table, starts, seq_lens, Softmax(1.0))
    with pytest.raises(AssertionError, match=r"sinks torch\.float32 \(3,\) for 4 heads"):
        paged_attention(q, torch.zeros(2, 2, 2, 16, 64), table, starts, seq_lens, Softmax(1.0, sinks=torch.zeros(3)))
