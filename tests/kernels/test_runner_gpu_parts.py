"""The runner's table writer and ring for a GPU, the former compared with that for the CPU."""

from __future__ import annotations

import torch

from penstock.runner.buffers import TableWriter
from penstock.runner.cpu.parts import HostTableWriter
from penstock.runner.gpu.buffers import PinnedRing, StagedTableWriter

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def written(writer: TableWriter) -> list[list[list[float]]]:
    """Returns tables of every dtype after several steps, the last of which outgrows every buffer."""
    tables = [torch.zeros((4, 9000), dtype=dtype, device=DEVICE) for dtype in (torch.int32, torch.int64, torch.float32)]
    blocks = torch.zeros((2, 4, 10), dtype=torch.int32, device=DEVICE)
    for step in range(5):
        for number, table in enumerate(tables):
            writer.write(table, (step + number) % 4, step, range(1, 1 + step))
        writer.write(blocks[1], step % 4, 2, (7 + step, -1))
        writer.write(tables[1], 3, 8000, (-(2**63), 2**63 - 1))
        writer.write(tables[2], 3, 8000, (float("-inf"), 0.1))
        writer.apply()
    writer.apply()
    writer.write(tables[0], 2, 0, range(9000))
    writer.apply()
    return [table.tolist() for table in (*tables, blocks)]


def test_both_writers_write_the_same_tables() -> None:
    assert written(StagedTableWriter(DEVICE, 2)) == written(HostTableWriter())


def test_a_ring_keeps_buffers_that_may_still_be_copied() -> None:
    ring, out = PinnedRing(4, 2, DEVICE), torch.zeros(4, dtype=torch.uint8, device=DEVICE)
    slots = []
    for step in range(3):
        slot = ring.open(4)
        slot[:] = step
        slots.append(slot)
        ring.copy(4, out)
        assert out.tolist() == [step] * 4
    addresses = [slot.ctypes.data for slot in slots]
    assert addresses[0] == addresses[2] != addresses[1]
