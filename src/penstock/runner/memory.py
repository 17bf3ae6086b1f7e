"""How much memory a device has, where it goes, and what is left of it for the KV cache.

expandable_segments is left as torch has it, off: such memory is mapped in pieces, which a network card that shall read
the KV cache by itself cannot register as one, and that CUDA graphs may use it is news. What fragments memory is avoided
instead: weights are allocated once (`penstock.models.weights`), and what a profile leaves is given back.
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

# On a CPU the memory is shared with everything else, so the default budget stays modest.
CPU_DEFAULT_KV_BYTES = 4 << 30
_OUT_OF_MEMORY = ("out of memory", "allocate memory", "not enough memory", "size calculation overflowed")


class DeviceMemory(Protocol):
    """The memory that a device allocates from."""

    def total(self) -> int:
        """All of it, in bytes."""
        ...

    def available(self) -> int:
        """Bytes that can be allocated without taking them from another process."""
        ...

    def budget(self, largest_step: Callable[[], None], graph_bytes: int) -> MemoryBudget:
        """Where the memory goes before there is a KV cache; may run the largest step to find out."""
        ...


class HostMemory:
    """The machine's main memory (`DeviceMemory`)."""

    def total(self) -> int:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def available(self) -> int:
        return _linux_available_bytes() or self.total() // 2

    def budget(self, largest_step: Callable[[], None], graph_bytes: int) -> MemoryBudget:
        """Nothing is measured: other processes use the same memory."""
        total = self.total()
        return MemoryBudget(total, total - self.available(), most=CPU_DEFAULT_KV_BYTES, pool=_this_machine())


class MemoryMeter(Protocol):
    """What a device tells of its memory."""

    def settle(self) -> tuple[int, int, int]:
        """(total, free, held by torch) bytes, when all has been given back that nothing uses. Starts `peak` anew."""
        ...

    def peak(self) -> int:
        """Most bytes that torch has held at once since then, what it could not use included."""
        ...


def measure(meter: MemoryMeter, largest_step: Callable[[], None], graph_bytes: int) -> MemoryBudget:
    """Runs the largest step, and reads what is in use behind it: kernels and libraries are loaded by then."""
    meter.settle()
    largest_step()
    peak = meter.peak()
    total, free, held = meter.settle()
    return MemoryBudget(total, total - free, max(0, peak - held), graph_bytes)


@contextmanager
def memory_for(what: str, device: torch.device, advice: Callable[[], str]) -> Iterator[None]:
    """Running out of memory inside becomes a ConfigError: `what` does not fit, do as `advice` says."""
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        detail = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"{what} need more memory than {device} has: {advice()} ({detail})") from None


def is_out_of_memory(error: Exception) -> bool:
    """Whether torch, a driver or the system had none left; only torch's own has a type for that."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error).lower()
    return any(sign in text for sign in _OUT_OF_MEMORY)


def _this_machine() -> str:
    """A name that no other machine has, and that all processes here agree on."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    return boot_id.read_text().strip() if boot_id.exists() else platform.node()


def _linux_available_bytes() -> int:
    """MemAvailable from /proc, the kernel's own estimate; 0 where there is none."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return 0
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0
