"""The memory that the ranks of one engine share: its layout, and the executor's operations on it. Needs no torch.

The executor creates it and calls `abort` when a rank has died; ranks attach it by name and use it through
`penstock.parallel.shared_memory`. The layout is arithmetic over (pp, tp): first the words by which ranks wait (a page
for the engine, then a block for every group and channel), then the buffers. The memory is sparse: pages that are never
written take no space.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from penstock.utils.machine import usable_cores
from penstock.utils.math import round_up
from penstock.utils.shared_memory import SharedMemory, create_memory

# A gather of more bytes than a buffer is divided into pieces. native/ranks.cpp explains why there are three.
GATHER_BUFFER_BYTES = 32 << 20
GATHER_BUFFERS = 3
# Powers of two. A stage runs ahead of the next one by as much as its ring holds: one large prefill, many decode steps.
STAGE_RING_BYTES = 32 << 20
RESULTS_RING_BYTES = 1 << 20

# A wait polls its word for this time before it sleeps, if every rank can have a core: about the cost of a sleep and a
# wake-up.
SPIN_NANOSECONDS = 40_000

_HEADER_BYTES = 4096
_ABORTED_OFFSET = 0
_FACTS_OFFSET, _FACTS = 128, struct.Struct("<iiq")  # pp, tp, nanoseconds to spin
_GROUP_CONTROL_BYTES, _ARRIVAL_BYTES = 512, 128
_CHANNEL_CONTROL_BYTES = 640
_ALIGNMENT = 2 << 20  # a huge page


@dataclass(frozen=True, slots=True)
class Ring:
    """The location of a channel: its control block and its bytes."""

    control: int
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Offsets in the memory of an engine with `pp` stages of `tp` ranks."""

    pp: int
    tp: int

    @property
    def aborted(self) -> int:
        return _ABORTED_OFFSET

    @property
    def num_bytes(self) -> int:
        stages = (self.pp - 1) * self.tp
        rings = stages * (STAGE_RING_BYTES + RESULTS_RING_BYTES)
        return round_up(self._rings + rings, _ALIGNMENT)

    def group_control(self, stage: int) -> int:
        return _HEADER_BYTES + stage * self._group_control_bytes

    def gather_buffer(self, stage: int, turn: int) -> int:
        return self._buffers + (stage * GATHER_BUFFERS + turn % GATHER_BUFFERS) * GATHER_BUFFER_BYTES

    def stage_ring(self, stage: int, tp_rank: int) -> Ring:
        """From (stage, tp_rank) to (stage + 1, tp_rank)."""
        assert 0 <= stage < self.pp - 1, f"stage {stage} of {self.pp} has none behind it"
        number = stage * self.tp + tp_rank
        return Ring(self._channel_control(number), self._rings + number * STAGE_RING_BYTES, STAGE_RING_BYTES)

    def results_ring(self, stage: int, tp_rank: int) -> Ring:
        """From (the last stage, tp_rank) to (stage, tp_rank)."""
        assert 0 <= stage < self.pp - 1, f"stage {stage} of {self.pp} sends results to itself"
        number, stages = stage * self.tp + tp_rank, (self.pp - 1) * self.tp
        start = self._rings + stages * STAGE_RING_BYTES + number * RESULTS_RING_BYTES
        return Ring(self._channel_control(stages + number), start, RESULTS_RING_BYTES)

    @property
    def _group_control_bytes(self) -> int:
        return _GROUP_CONTROL_BYTES + self.tp * _ARRIVAL_BYTES

    def _channel_control(self, number: int) -> int:
        return self.group_control(self.pp) + number * _CHANNEL_CONTROL_BYTES

    @property
    def _buffers(self) -> int:
        return round_up(self._channel_control(2 * (self.pp - 1) * self.tp), _ALIGNMENT)

    @property
    def _rings(self) -> int:
        groups = self.pp if self.tp > 1 else 0
        return self._buffers + groups * GATHER_BUFFERS * GATHER_BUFFER_BYTES


def create_rank_memory(pp: int, tp: int, num_ranks: int | None = None) -> SharedMemory:
    """Creates the memory of pp x tp ranks. All `num_ranks`, by default these, run on the cores of this process."""
    memory = create_memory(Layout(pp, tp).num_bytes)
    spin = SPIN_NANOSECONDS if (num_ranks or pp * tp) <= usable_cores() else 0
    _FACTS.pack_into(memory.view, _FACTS_OFFSET, pp, tp, spin)
    return memory


def spin_nanoseconds(memory: SharedMemory, layout: Layout) -> int:
    """Returns how long the ranks of this engine spin. It must be the memory of an engine with this layout."""
    pp, tp, spin = _FACTS.unpack_from(memory.view, _FACTS_OFFSET)
    assert (pp, tp) == (layout.pp, layout.tp), f"the memory is for {pp} x {tp} ranks, not {layout.pp} x {layout.tp}"
    return spin


def abort(memory: SharedMemory) -> None:
    """Makes every rank that waits, or calls anything later, raise RanksLostError, within a few tenths of a second."""
    memory.view[_ABORTED_OFFSET] = 1
