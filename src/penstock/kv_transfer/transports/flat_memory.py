"""Registered memory as one flat address space, the checks of runs in it, and its names for other processes."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from penstock.messages.kv_layout import MemoryRegion
from penstock.utils.errors import ConfigError, PeerError
from penstock.utils.math import cdiv
from penstock.utils.memory_ahead import Area


class NamedRegion(msgspec.Struct, frozen=True):
    """Memory that another process can map."""

    path: str
    num_bytes: int


def named_regions(regions: Sequence[MemoryRegion], transport: str) -> tuple[NamedRegion, ...]:
    """Returns how others map the regions. Raises ConfigError if one has no path."""
    named = tuple(NamedRegion(region.path, region.num_bytes) for region in regions if region.path is not None)
    if len(named) != len(regions):
        raise ConfigError(
            f"the {transport} transport needs memory that other processes can map, and some of the KV cache has no "
            "path: choose transport=sockets"
        )
    return named


def check_registered(regions: Sequence[memoryview], named: Sequence[NamedRegion]) -> None:
    sizes = [region.nbytes for region in regions]
    assert sizes == [region.num_bytes for region in named], (sizes, named)


class AddressSpace:
    """Regions of memory as one flat address space: a region begins where the one before it ends.

    The addresses may be those of another process. A run may extend from one region into the next.
    """

    def __init__(self, regions: Sequence[tuple[int, int]] = ()) -> None:
        """`regions` has the address and the number of bytes of each region."""
        sizes = [num_bytes for _, num_bytes in regions]
        self._ends = np.cumsum(np.array(sizes, np.int64))  # [num_regions]
        self._starts = self._ends - np.array(sizes, np.int64)
        self._addresses = np.array([address for address, _ in regions], np.int64)
        self.num_bytes = sum(sizes)

    def segments(self, ranges: np.ndarray) -> np.ndarray:
        """Returns [m, 2] int64, address and bytes, for checked ranges, [n, 2] int64, flat offset and bytes.

        A range that crosses regions becomes several segments; one without bytes is dropped.
        """
        return self.located(self.split(ranges, 0), 0)

    def ends(self, ranges: np.ndarray) -> dict[int, int]:
        """Returns where the last byte of checked ranges, [n, 2] int64, ends in each region that has some."""
        pieces = self.split(ranges, 0)
        region = np.searchsorted(self._ends, pieces[:, 0], "right")
        last = pieces.sum(axis=1) - self._starts[region]
        return {int(each): int(last[region == each].max()) for each in np.unique(region)}

    def split(self, runs: np.ndarray, column: int) -> np.ndarray:
        """Cuts runs where a region ends: [n, k] int64, whose last column is bytes and the others are offsets, those in
        `column` in this memory. Runs without bytes are dropped."""
        runs = runs[runs[:, -1] > 0]
        first = np.searchsorted(self._ends, runs[:, column], "right")
        last = np.searchsorted(self._ends, runs[:, column] + runs[:, -1], "left")
        if (first == last).all():
            return runs
        counts = last - first + 1
        source = np.repeat(np.arange(len(runs)), counts)
        region = np.arange(len(source)) - np.repeat(np.cumsum(counts) - counts, counts) + first[source]
        whole = runs[source]
        starts = np.maximum(whole[:, column], self._starts[region])
        ends = np.minimum(whole[:, column] + whole[:, -1], self._ends[region])
        pieces = whole + (starts - whole[:, column])[:, None]
        pieces[:, -1] = ends - starts
        return pieces[ends > starts]

    def located(self, runs: np.ndarray, column: int) -> np.ndarray:
        """Returns the runs with addresses instead of the offsets in `column`; each must be within one region."""
        region = np.searchsorted(self._ends, runs[:, column], "right")
        located = runs.astype(np.int64)
        located[:, column] += self._addresses[region] - self._starts[region]
        return located


class FlatMemory(AddressSpace):
    """Memory of this process."""

    def __init__(self, regions: Sequence[memoryview] = ()) -> None:
        self._regions = [region.cast("B") for region in regions]
        self._arrays = [np.frombuffer(region, np.uint8) for region in self._regions]
        super().__init__([(array.ctypes.data, len(array)) for array in self._arrays])

    def areas(self, ahead: int) -> list[Area]:
        """Returns the addresses of all regions, of which `ahead` bytes together are allocated before their use."""
        sizes = [(array.ctypes.data, len(array)) for array in self._arrays]
        return [Area(address, size, cdiv(ahead * size, max(1, self.num_bytes))) for address, size in sizes]

    def read(self, offset: int, num_bytes: int) -> bytes:
        return b"".join(
            bytes(self._regions[number][start:end]) for number, start, end in self._parts(offset, num_bytes)
        )

    def write(self, offset: int, data: bytes) -> None:
        position = 0
        for number, start, end in self._parts(offset, len(data)):
            self._regions[number][start:end] = data[position : position + end - start]
            position += end - start

    def _parts(self, offset: int, num_bytes: int) -> list[tuple[int, int, int]]:
        """Returns the regions' numbers and intervals that make up bytes [offset, offset + num_bytes)."""
        parts: list[tuple[int, int, int]] = []
        number = int(np.searchsorted(self._ends, offset, "right"))
        while num_bytes > 0:
            start = offset - int(self._starts[number])
            end = min(start + num_bytes, len(self._regions[number]))
            parts.append((number, start, end))
            offset, num_bytes, number = offset + end - start, num_bytes - (end - start), number + 1
        return parts


def pair_segments(local: AddressSpace, remote: AddressSpace, runs: np.ndarray) -> np.ndarray:
    """Returns [m, 3] int64 of local address, remote address and bytes for checked runs, [n, 3] int64."""
    return remote.located(local.located(remote.split(local.split(runs, 0), 1), 0), 1)


def check_ranges(offsets: np.ndarray, sizes: np.ndarray, num_bytes: int, whose: str) -> None:
    """Raises PeerError unless all ranges of bytes are within [0, num_bytes), even if a sum would overflow."""
    is_bad = (offsets < 0) | (sizes < 0) | (offsets > num_bytes) | (sizes > num_bytes - offsets)
    if is_bad.any():
        at = int(is_bad.argmax())
        raise PeerError(f"run {at} is outside the {whose} memory of {num_bytes}: {sizes[at]} bytes at {offsets[at]}")


def check_runs(runs: np.ndarray, local_bytes: int, remote_bytes: int) -> None:
    """Raises PeerError if a run is outside the memory of either side."""
    assert runs.ndim == 2 and runs.shape[1] == 3 and runs.dtype == np.int64, (runs.shape, runs.dtype)
    check_ranges(runs[:, 0], runs[:, 2], local_bytes, "local")
    check_ranges(runs[:, 1], runs[:, 2], remote_bytes, "peer's")
