"""Batches for the tests of attention in Triton, with caches that are NaN wherever no query reads."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from penstock.kernels.paged_attention import Softmax, latent_attention, paged_attention_reference
from penstock.kernels.triton.attention.launcher import paged_attention
from penstock.kernels.triton.attention.plan import AttentionLimits, AttentionPlan, AttentionPlanner, AttentionShape

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MAX_MODEL_LEN = 4096


@dataclass
class Sequence:
    """One request's q, k and v at every position, from which any part of its attention can be computed."""

    q: torch.Tensor  # [n, Hq, D]
    k: torch.Tensor  # [n, Hkv, D]
    v: torch.Tensor  # [n, Hkv, D], or of latents the last V elements of k

    @classmethod
    def random(
        cls, length: int, heads: tuple[int, int], head_dim: int, dtype: torch.dtype, latent_value_dim: int = 0
    ) -> Sequence:
        sizes = (heads[0], heads[1], heads[1])
        q, k, v = (torch.randn(length, size, head_dim).to(DEVICE, dtype) for size in sizes)
        return cls(q, k, k[..., -latent_value_dim:] if latent_value_dim else v)

    @property
    def latent_value_dim(self) -> int:
        return self.v.shape[2] if self.v.shape != self.k.shape else 0


@dataclass
class Part:
    """The queries [first, last) of a sequence, whose keys up to `last` are in the cache."""

    sequence: Sequence
    first: int
    last: int


@dataclass
class Batch:
    """The operands of `paged_attention`."""

    q: torch.Tensor  # [T, Hq, D], strided
    kv_cache: torch.Tensor
    block_table: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    window: int
    max_query_len: int
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    latent_value_dim: int = 0

    @classmethod
    def of(
        cls, parts: list[Part], block_size: int = 16, window: int = 0, padding: tuple[int, int] = (0, 0), seed: int = 0
    ) -> Batch:
        """Stores the parts at random blocks, followed by `padding` requests and rows. Block 0 and padding rows are NaN.

        Table entries are 0 before the window, and invalid block ids after a request's last block.
        """
        shuffle = torch.Generator().manual_seed(seed)
        like = parts[0].sequence
        needed = [-(-part.last // block_size) for part in parts]
        blocks = (torch.randperm(sum(needed) + 3, generator=shuffle) + 1)[: sum(needed)].to(DEVICE).split(needed)
        planes = 1 if like.latent_value_dim else 2
        shape = (sum(needed) + 4, planes, like.k.shape[1], block_size, like.k.shape[2])
        cache = torch.full(shape, float("nan"), dtype=like.q.dtype, device=DEVICE)
        table = torch.full((len(parts) + padding[0], max(needed) + 2), 1 << 30, dtype=torch.int32, device=DEVICE)
        for row, part, own in zip(table, parts, blocks, strict=False):
            oldest = max(0, part.first - window + 1) if window else 0
            seen = torch.arange(oldest, part.last, device=DEVICE)
            for index, values in enumerate((part.sequence.k, part.sequence.v)[:planes]):
                cache[own[seen // block_size], index, :, seen % block_size] = values[seen]
            row[: oldest // block_size] = 0
            row[oldest // block_size : len(own)] = own[oldest // block_size :].int()
        table[len(parts) :] = 0
        q = torch.cat([part.sequence.q[part.first : part.last] for part in parts])
        wide = q.new_full((q.shape[0] + padding[1], q.shape[1] + 2, q.shape[2]), float("nan"))
        wide[: q.shape[0], : q.shape[1]] = q
        lengths = [part.last - part.first for part in parts] + [0] * padding[0]
        return cls(
            wide[:, : q.shape[1]],
            cache,
            table,
            torch.tensor([0, *lengths]).cumsum(0).int().to(DEVICE),
            torch.tensor([part.last for part in parts] + [0] * padding[0], dtype=torch.int32, device=DEVICE),
            window,
            max(lengths),
            latent_value_dim=like.latent_value_dim,
        )

    @property
    def scale(self) -> float:
        return self.q.shape[2] ** -0.5

    @property
    def softmax(self) -> Softmax:
        return Softmax(self.scale, self.window, self.softcap, self.sinks)

    def with_sinks(self, softcap: float) -> Batch:
        """Sinks are from far below the scores to far above them."""
        return replace(self, softcap=softcap, sinks=torch.linspace(-3, 5, self.q.shape[1], device=DEVICE))

    @property
    def operands(self) -> tuple[torch.Tensor, ...]:
        return self.q, self.kv_cache, self.block_table, self.query_start_loc, self.seq_lens

    def expected(self) -> torch.Tensor:
        """Returns the result of the wrapper's reference or, of latents on a CPU, its native kernel."""
        if self.latent_value_dim:
            return latent_attention(*self.operands, self.softmax, self.latent_value_dim)
        return paged_attention_reference(*self.operands, self.softmax)

    def planner(self, max_decode_query_len: int = 8, **options: bool) -> AttentionPlanner:
        shape = AttentionShape(
            self.q.shape[1],
            self.kv_cache.shape[2],
            self.q.shape[2],
            self.kv_cache.shape[3],
            self.q.dtype,
            self.latent_value_dim,
        )
        return AttentionPlanner(shape, AttentionLimits(64, MAX_MODEL_LEN, max_decode_query_len), DEVICE, **options)

    def plan(self, planner: AttentionPlanner) -> AttentionPlan:
        return planner.plan(len(self.seq_lens), self.max_query_len, int(self.seq_lens.max()))

    def run(self, plan: AttentionPlan) -> torch.Tensor:
        options = {"softcap": self.softcap, "sinks": self.sinks, "latent_value_dim": self.latent_value_dim}
        return paged_attention(*self.operands, self.scale, self.window, plan, **options)
