"""Where KV memory is and how it is laid out: described once per rank, for tiers, transports and peers alike."""

from __future__ import annotations

import msgspec


class MemoryRegion(msgspec.Struct, frozen=True):
    """Memory by name. `address` is where the process that describes it has it mapped, 0 where only the path counts.

    `path` is what other processes of the same user open to map it, None where they cannot.
    """

    name: str
    num_bytes: int
    device: str = "cpu"
    address: int = 0
    path: str | None = None
