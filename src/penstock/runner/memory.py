"""How much memory a device has, where it goes, and what is left of it for the KV cache.

expandable_segments is left as torch has it, off: such memory is mapped in pieces, which a network card that shall read
the KV cache by itself cannot register as one, and that CUDA graphs may use it is news. What fragments memory is avoided
instead: weights are allocated once (`penstock.models.weights`), and what a profile leaves is given back.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from penstock.config.engine import CacheConfig
from penstock.utils.errors import ConfigError
from penstock.utils.math import cdiv

# On a CPU the memory is shared with everything else, so the default budget stays modest.
CPU_DEFAULT_KV_BYTES = 4 << 30
_MIN_BLOCKS = 2  # the null block, and one
_OUT_OF_MEMORY = ("out of memory", "allocate memory", "not enough memory", "size calculation overflowed")


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Where a device's memory goes, in bytes, when the weights are loaded and there is no KV cache yet.

    `in_use` counts all processes and memory that torch did not allocate; `step` is what the largest step needs on top
    of it, `graphs` what captured graphs will. A cache without a configured size takes at most `most`.
    """

    total: int
    in_use: int
    step: int = 0
    graphs: int = 0
    most: int = 1 << 62

    @property
    def taken(self) -> int:
        return self.in_use + self.step + self.graphs

    def left(self, utilization: float) -> int:
        """What is left for the KV cache of this part of the device; may be negative."""
        return min(int(self.total * utilization) - self.taken, self.most)

    def utilization_for(self, num_bytes: int) -> float:
        """The part of the device, in whole hundredths, that leaves so many bytes; above 1 there is none."""
        return cdiv(100 * (self.taken + num_bytes), self.total) / 100

    def __str__(self) -> str:
        return (
            f"{_gib(self.in_use)} GiB in use with the weights, {_gib(self.step)} GiB for the largest step and "
            f"{_gib(self.graphs)} GiB for graphs, of {_gib(self.total)} GiB"
        )


def num_blocks_in_budget(config: CacheConfig, budget: MemoryBudget, bytes_per_block: int) -> int:
    """How many blocks the configuration pays for: an explicit number, else explicit bytes, else what is left.

    Raises ConfigError that says what to raise, and how far.
    """
    if config.num_blocks_override is not None:
        return config.num_blocks_override
    least = _MIN_BLOCKS * bytes_per_block
    if config.kv_cache_memory is not None:
        if config.kv_cache_memory < least:
            raise ConfigError(
                f"kv_cache_memory={config.kv_cache_memory} is less than two KV blocks of {bytes_per_block} bytes: "
                f"raise it to {least} at least"
            )
        return config.kv_cache_memory // bytes_per_block
    utilization = config.gpu_memory_utilization
    left = budget.left(utilization)
    if left < least:
        needed = budget.utilization_for(least)
        advice = (
            f"raise it to {needed} at least" if needed <= 1 else "free memory on the device, or take a smaller model"
        )
        raise ConfigError(
            f"gpu_memory_utilization={utilization} leaves no memory for the KV cache ({budget}): {advice}, or lower "
            "max_num_batched_tokens and max_num_seqs, or set kv_cache_memory"
        )
    return left // bytes_per_block


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
        return MemoryBudget(total, total - self.available(), most=CPU_DEFAULT_KV_BYTES)


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


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f}"


def _linux_available_bytes() -> int:
    """MemAvailable from /proc, the kernel's own estimate; 0 where there is none."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return 0
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0
