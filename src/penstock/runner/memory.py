"""A device's total memory, its uses, and the remaining part for the KV cache.

expandable_segments keeps torch's default, off: such memory is mapped in pieces, which a network card that reads the KV
cache directly cannot register as one region, and CUDA graphs have supported it only recently. Fragmentation is avoided
instead: weights are allocated once (`penstock.models.weights`), and memory left over from profiling is freed.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch

from penstock.messages.memory_budget import MemoryBudget
from penstock.utils.errors import ConfigError

# On a CPU the memory is shared with all other processes, so the default budget is modest.
CPU_DEFAULT_KV_BYTES = 4 << 30
_OUT_OF_MEMORY = ("out of memory", "allocate memory", "not enough memory", "size calculation overflowed")


class DeviceMemory(Protocol):
    """The memory that a device allocates from."""

    def total(self) -> int:
        """Returns the total size in bytes."""
        ...

    def available(self) -> int:
        """Returns the bytes that can be allocated without taking them from another process."""
        ...

    def budget(self, largest_step: Callable[[], None], graph_bytes: int) -> MemoryBudget:
        """Returns the uses of memory before there is a KV cache; may run the largest step to measure them."""
        ...


class HostMemory:
    """The machine's main memory (`DeviceMemory`)."""

    def total(self) -> int:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def available(self) -> int:
        return _linux_available_bytes() or self.total() // 2

    def budget(self, largest_step: Callable[[], None], graph_bytes: int) -> MemoryBudget:
        """Nothing is measured, because other processes use the same memory."""
        total = self.total()
        return MemoryBudget(total, total - self.available(), most=CPU_DEFAULT_KV_BYTES, pool=_this_machine())


class MemoryMeter(Protocol):
    """A device's measurements of its memory."""

    def settle(self) -> tuple[int, int, int]:
        """Frees all unused memory, resets `peak`, and returns (total, free, held by torch) bytes."""
        ...

    def peak(self) -> int:
        """Returns the maximum of bytes that torch has held since then, including unusable fragments."""
        ...


def measure(meter: MemoryMeter, largest_step: Callable[[], None], graph_bytes: int) -> MemoryBudget:
    """Runs the largest step, and reads the memory in use after it, when kernels and libraries are loaded."""
    meter.settle()
    largest_step()
    peak = meter.peak()
    total, free, held = meter.settle()
    return MemoryBudget(total, total - free, max(0, peak - held), graph_bytes)


@contextmanager
def memory_for(what: str, device: torch.device, advice: Callable[[], str]) -> Iterator[None]:
    """Converts running out of memory inside to a ConfigError: `what` does not fit, follow `advice`."""
    try:
        yield
    except (RuntimeError, MemoryError, OSError, OverflowError) as error:
        if not is_out_of_memory(error):
            raise
        detail = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"{what} need more memory than {device} has: {advice()} ({detail})") from None


def is_out_of_memory(error: Exception) -> bool:
    """Returns whether torch, a driver or the system was out of memory, or the size is beyond any."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError, OverflowError)):
        return True
    text = str(error).lower()
    return any(sign in text for sign in _OUT_OF_MEMORY)


def _this_machine() -> str:
    """Returns a name that is unique to this machine, and equal in all its processes."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    return boot_id.read_text().strip() if boot_id.exists() else platform.node()


def _linux_available_bytes() -> int:
    """Returns MemAvailable from /proc, the kernel's own estimate; 0 if there is none."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return 0
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0
