"""How a device's memory is used: measured by a worker, divided by the engine core."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.utils.math import cdiv


class MemoryBudget(msgspec.Struct, frozen=True):
    """How a device's memory is used, in bytes, when the weights are loaded and there is no KV cache yet.

    `in_use` covers all processes and memory not allocated by torch; `step` is the additional memory of the largest
    step, `graphs` that of captured graphs, `adapters` that of LoRA adapters in all slots. A cache without a configured
    size takes at most `most`. Ranks whose budgets name the same `pool` use the same memory; without a name a rank has
    its own memory.
    """

    total: int
    in_use: int
    step: int = 0
    graphs: int = 0
    adapters: int = 0
    most: int = 1 << 62
    pool: str = ""

    @classmethod
    def of_pool(cls, budgets: Sequence[MemoryBudget]) -> MemoryBudget:
        """Returns the budget of memory shared by several ranks, from their measurements."""
        return cls(
            total=min(each.total for each in budgets),
            in_use=max(each.in_use for each in budgets),
            step=sum(each.step for each in budgets),
            graphs=sum(each.graphs for each in budgets),
            adapters=sum(each.adapters for each in budgets),
            most=min(each.most for each in budgets),
            pool=budgets[0].pool,
        )

    @property
    def taken(self) -> int:
        return self.in_use + self.step + self.graphs + self.adapters

    @property
    def room(self) -> int:
        """The memory left if all of the device may be used."""
        return self.total - self.taken

    def left(self, utilization: float) -> int:
        """Returns the memory left for the KV cache with this part of the device; may be negative."""
        return min(int(self.total * utilization) - self.taken, self.most)

    def utilization_for(self, num_bytes: int) -> float:
        """Returns the part of the device, in hundredths, that leaves this many bytes; above 1 if there is none."""
        return cdiv(100 * (self.taken + num_bytes), self.total) / 100

    def __str__(self) -> str:
        adapters = f"{_gib(self.adapters)} GiB for LoRA adapters, " if self.adapters else ""
        return (
            f"{_gib(self.in_use)} GiB in use with the weights, {adapters}{_gib(self.step)} GiB for the largest step "
            f"and {_gib(self.graphs)} GiB for graphs, of {_gib(self.total)} GiB"
        )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f}"
