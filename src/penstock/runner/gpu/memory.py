"""A GPU's memory, and the share that torch's allocator holds."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from penstock.runner.memory import MemoryBudget, measure


class CudaMemory:
    """`DeviceMemory` and `MemoryMeter`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def total(self) -> int:
        return torch.cuda.mem_get_info(self._device)[1]

    def available(self) -> int:
        return torch.cuda.mem_get_info(self._device)[0]

    def budget(self, largest_step: Callable[[], None], graph_bytes: int) -> MemoryBudget:
        return measure(self, largest_step, graph_bytes)

    def settle(self) -> tuple[int, int, int]:
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        return total, free, torch.cuda.memory_reserved(self._device)

    def peak(self) -> int:
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_reserved(self._device)
