"""How much memory a device has, and how much of it is free."""

from __future__ import annotations

import os
from pathlib import Path

import torch


def total_bytes(device: torch.device) -> int:
    """All of the device's memory in bytes."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated without taking them from anybody."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return _linux_available_bytes() or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _linux_available_bytes() -> int:
    """MemAvailable from /proc, the kernel's own estimate; 0 where there is none."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return 0
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0
