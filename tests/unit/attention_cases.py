"""Batches for direct calls of an attention backend, in any dtype and on any device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from penstock.attention.backend import AttentionBackend, AttentionHeads, AttentionMetadata
from penstock.messages.kv_cache_spec import KVCacheSpec

MAX_MODEL_LEN = 1024


@dataclass
class Case:
    """Block ids are random. Slots that no request wrote are NaN; the null block is 0, and replaces blocks that have
    left a window."""

    qkv: torch.Tensor
    positions: torch.Tensor
    heads: AttentionHeads
    kv_cache: torch.Tensor
    metadata: AttentionMetadata

    @classmethod
    def random(
        cls,
        lengths: Sequence[int],
        counts: Sequence[int],  # of each request's queries, which are its last positions
        num_heads: tuple[int, int] = (4, 2),
        head_size: int = 64,
        window: int = 0,
        block_size: int = 16,
        dtype: str = "float32",
        device: str = "cpu",
        seed: int = 0,
    ) -> Case:
        torch.manual_seed(seed)
        spec = KVCacheSpec.keys_and_values(num_heads[1], head_size, dtype, window)
        width = -(-MAX_MODEL_LEN // block_size)
        table = torch.zeros(len(lengths), width, dtype=torch.int32)
        ids = torch.randperm(sum(-(-n // block_size) for n in lengths)).int() + 1
        cache = torch.full((len(ids) + 1, 2, num_heads[1], block_size, head_size), torch.nan)
        cache[0] = 0
        slots: list[torch.Tensor] = []
        for row, length, count in zip(table, lengths, counts, strict=True):
            own, ids = ids.split([-(-length // block_size), len(ids) + (-length) // block_size])
            places = torch.arange(length)
            blocks = own[places // block_size].long()
            cache[blocks, :, :, places % block_size] = torch.randn(length, 2, num_heads[1], head_size)
            slots.append((blocks * block_size + places % block_size)[length - count :])
            row[: len(own)] = own
            row[: spec.first_needed_block(length - count, block_size)] = 0
        metadata = AttentionMetadata(
            query_start_loc=torch.tensor([0, *counts]).cumsum(0).int().to(device),
            seq_lens=torch.tensor(lengths).int().to(device),
            block_table=table.to(device),
            slot_mapping=torch.cat(slots).to(device),
            max_query_len=max(counts),
            max_seq_len=max(lengths),
        )
        kind = getattr(torch, dtype)
        positions = torch.cat([torch.arange(n - c, n) for n, c in zip(lengths, counts, strict=True)])
        return cls(
            torch.randn(sum(counts), (num_heads[0] + 2 * num_heads[1]) * head_size).to(device, kind),
            positions.to(device),
            AttentionHeads(spec, num_heads[0], head_size**-0.5, torch.randn(MAX_MODEL_LEN, head_size).to(device)),
            cache.to(device, kind),
            metadata,
        )

    def padded(self, num_reqs: int) -> Case:
        """Returns this batch, of one query per request, as a captured graph for `num_reqs` requests receives it."""
        real, more = self.metadata, num_reqs - len(self.metadata.seq_lens)
        metadata = AttentionMetadata(
            query_start_loc=torch.cat((real.query_start_loc, real.query_start_loc[-1:].expand(more))),
            seq_lens=torch.nn.functional.pad(real.seq_lens, (0, more)),
            block_table=torch.nn.functional.pad(real.block_table, (0, 0, 0, more)),
            slot_mapping=torch.nn.functional.pad(real.slot_mapping, (0, more), value=-1),
            max_query_len=1,
            max_seq_len=MAX_MODEL_LEN,
        )
        qkv = torch.nn.functional.pad(self.qkv, (0, 0, 0, more))
        return replace(self, qkv=qkv, positions=torch.nn.functional.pad(self.positions, (0, more)), metadata=metadata)

    def run(self, backend: AttentionBackend) -> torch.Tensor:
        """Runs the backend on copies, so that the case is not changed."""
        return backend.attend(self.qkv.clone(), self.positions, self.heads, self.kv_cache.clone(), self.metadata)
