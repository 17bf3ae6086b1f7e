"""Gathers whole KV blocks from the cache into one buffer, or scatters them back: all layers of all blocks in one
launch.

    packed[i] = layer 0's bytes of block ids[i], layer 1's, ...

Layers have separate memory, each with its own bytes per block; a table has their addresses. A program moves one block
of one layer as 8-byte words, which preserves all bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

_WORD_BYTES = 8
_BLOCK = 1024
_WARPS = 4


@dataclass(frozen=True, slots=True)
class LayerTable:
    """The locations of the blocks of some layers, in memory and within a packed block."""

    table: torch.Tensor  # [num_layers, 3] int64: address, words of a block, words before them in a packed block
    block_bytes: int  # of all layers
    memory: tuple[torch.Tensor, ...]  # the memory at these addresses

    @classmethod
    def of(cls, layers: Sequence[torch.Tensor]) -> LayerTable:
        """`layers` [num_blocks, bytes of a block] uint8 each, contiguous, bytes a multiple of 8."""
        rows: list[tuple[int, int, int]] = []
        start = 0
        for layer in layers:
            assert layer.is_contiguous() and layer.dtype == torch.uint8, f"{layer.dtype} {layer.stride()}"
            assert layer.shape[1] % _WORD_BYTES == 0 == layer.data_ptr() % _WORD_BYTES, f"{tuple(layer.shape)}"
            words = layer.shape[1] // _WORD_BYTES
            rows.append((layer.data_ptr(), words, start))
            start += words
        table = torch.tensor(rows, dtype=torch.int64, device=layers[0].device)
        return cls(table, start * _WORD_BYTES, tuple(layers))


def gather_blocks(layers: LayerTable, ids: torch.Tensor, packed: torch.Tensor) -> None:
    """Copies the blocks `ids`, [n] int64, to `packed` [n, block_bytes] uint8."""
    _launch(layers, ids, packed, True)


def scatter_blocks(layers: LayerTable, ids: torch.Tensor, packed: torch.Tensor) -> None:
    """Copies `packed`, [n, block_bytes] uint8, to the blocks `ids`, [n] int64, which must be distinct."""
    _launch(layers, ids, packed, False)


def _launch(layers: LayerTable, ids: torch.Tensor, packed: torch.Tensor, gathers: bool) -> None:
    assert packed.shape == (len(ids), layers.block_bytes) and packed.is_contiguous(), f"{tuple(packed.shape)}"
    assert ids.dtype == torch.int64 and packed.dtype == torch.uint8, f"{ids.dtype} {packed.dtype}"
    words = layers.block_bytes // _WORD_BYTES
    grid = (len(ids), len(layers.table))
    _move_blocks[grid](layers.table, ids, packed.view(torch.int64), words, gathers, _BLOCK, num_warps=_WARPS)


@triton.jit(do_not_specialize=["packed_words"], do_not_specialize_on_alignment=["ids_ptr"])
def _move_blocks(table_ptr, ids_ptr, packed_ptr, packed_words, gathers: tl.constexpr, block: tl.constexpr):
    number = tl.program_id(0).to(tl.int64)
    entry = table_ptr + 3 * tl.program_id(1)
    words = tl.load(entry + 1)
    address = tl.load(entry) + tl.load(ids_ptr + number) * words * 8
    cache_ptr = address.to(tl.pointer_type(tl.int64))
    packed_ptr += number * packed_words + tl.load(entry + 2)
    for start in tl.range(0, words, block):
        place = start + tl.arange(0, block)
        if gathers:
            tl.store(packed_ptr + place, tl.load(cache_ptr + place, mask=place < words, other=0), mask=place < words)
        else:
            tl.store(cache_ptr + place, tl.load(packed_ptr + place, mask=place < words, other=0), mask=place < words)
