"""Digests of the KV of tokens, independent of the memory layout of either side.

Both sides digest the same bytes in the same order, which is that of the sender's axes. A unit of tokens is within one
block on either side, so a wrong digest identifies the block to compute again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import numpy as np

from penstock.kv_transfer.topology.pieces import digest_edges, unit_runs
from penstock.kv_transfer.topology.planner import LayerSlice
from penstock.messages.kv_layout import KVLayout
from penstock.utils.digest import digest

# Units. Between blocks of different sizes, the bytes of one are in many places, and finding them takes up to half a
# millisecond.
_AT_ONCE = 64


class UnitDigests:
    """Computes digests of one rank's memory. `regions` are in the order of its layout."""

    def __init__(self, layout: KVLayout, regions: Sequence[memoryview]) -> None:
        self._layout = layout
        self._regions = regions
        self._starts = np.array([0, *accumulate(len(region) for region in regions)][:-1], np.int64)

    def of(
        self,
        slices: Sequence[LayerSlice],
        order: tuple[str, ...],
        table: Sequence[int],
        group: int,
        first: int,
        end: int,
        unit: int,
    ) -> Iterator[tuple[int, bytes, int]]:
        """Yields for every unit of tokens [first, end): its first token, its digest, and the number of digested bytes.
        The bytes of the first units are found in this call, others some at a time, and all are read when the result is
        iterated over.

        `table` is the request's block table. The digest is empty if the unit has no block, or the group no layer here.
        """
        edges = digest_edges(first, end, unit)

        def find(start: int) -> tuple[list[int], list[tuple[int, int, int]]]:
            """Returns the places of the bytes of the next units, and how many places come before each unit's."""
            runs, bounds = unit_runs(self._layout, order, slices, table, group, edges[start : start + _AT_ONCE + 1])
            numbers = np.searchsorted(self._starts, runs[:, 0], "right") - 1
            offsets = (runs[:, 0] - self._starts[numbers]).tolist()
            return bounds.tolist(), list(zip(numbers.tolist(), offsets, runs[:, 1].tolist(), strict=True))

        def digest_each(found: tuple[list[int], list[tuple[int, int, int]]]) -> Iterator[tuple[int, bytes, int]]:
            for start in range(0, len(edges) - 1, _AT_ONCE):
                bounds, places = find(start) if start else found
                for token, (begin, stop) in zip(edges[start:].tolist(), pairwise(bounds), strict=False):
                    parts = [self._regions[number][at : at + size] for number, at, size in places[begin:stop]]
                    yield token, digest(*parts) if parts else b"", sum(map(len, parts))

        return digest_each(find(0))
