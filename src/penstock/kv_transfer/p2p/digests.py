"""Digests of the KV of tokens, which do not depend on how either side lays it out.

Both sides digest the same bytes in the same order, which is that of the sender's axes. The unit divides the block sizes
of both, so that the tokens of a unit lie in one block on either side.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from penstock.kv_transfer.topology.planner import LayerSlice, piece_runs
from penstock.messages.kv_cache_spec import NULL_BLOCK
from penstock.messages.kv_layout import KVLayout
from penstock.utils.digest import digest


@dataclass(frozen=True, slots=True)
class UnitDigest:
    digest: bytes
    num_bytes: int


_MISSING = UnitDigest(b"", 1)

_Piece = tuple[int, int, int, int]
"""(region, offset in block 0, bytes from a block to the next, number of bytes)"""


class UnitDigests:
    """Of one rank's memory, `regions` as its layout lists them."""

    def __init__(self, layout: KVLayout, regions: Sequence[memoryview]) -> None:
        self._layout = layout
        self._regions = regions
        self._block_bytes = {layer.name: layer.block_bytes for layer in layout.layers}
        self._bases = [0, *accumulate(len(region) for region in regions)]
        self._pieces: dict[tuple[tuple[LayerSlice, ...], tuple[str, ...], int, int, int], list[_Piece]] = {}

    def of(
        self,
        slices: tuple[LayerSlice, ...],
        order: tuple[str, ...],
        table: Sequence[int],
        group: int,
        first: int,
        end: int,
        unit: int,
    ) -> Iterator[UnitDigest]:
        """For every `unit` tokens of [first, end); no digest where the request's block table has no block."""
        size = self._layout.block_size
        for start in range(first, end, unit):
            block = table[start // size] if start // size < len(table) else NULL_BLOCK
            if block == NULL_BLOCK:
                yield _MISSING
                continue
            pieces = self._of_unit(slices, order, group, start % size, unit)
            parts = [
                self._regions[region][offset + block * stride : offset + block * stride + num_bytes]
                for region, offset, stride, num_bytes in pieces
            ]
            yield UnitDigest(digest(*parts), sum(map(len, parts)) or 1)

    def _of_unit(
        self, slices: tuple[LayerSlice, ...], order: tuple[str, ...], group: int, inner: int, unit: int
    ) -> list[_Piece]:
        """Where a unit lies in a block, layer by layer: the same places in every block."""
        key = (slices, order, group, inner, unit)
        if key not in self._pieces:
            pieces: list[_Piece] = []
            for each in slices:
                stride = self._block_bytes[each.name]
                runs = piece_runs(self._layout, order, (each,), [1], group, inner, inner + unit)
                pieces += (self._piece(start, stride, num_bytes) for start, num_bytes in runs.tolist())
            self._pieces[key] = pieces
        return self._pieces[key]

    def _piece(self, start: int, stride: int, num_bytes: int) -> _Piece:
        region = bisect_right(self._bases, start) - 1
        return region, start - self._bases[region] - stride, stride, num_bytes
