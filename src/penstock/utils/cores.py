"""How many processor cores this process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path

CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # "max 100000", or microseconds of processor time in every so many


def core_quota() -> int | None:
    """How many cores the cgroup gives time for, rounded up; None without a limit."""
    quota, period = CGROUP_QUOTA.read_text().split() if CGROUP_QUOTA.exists() else ("max", "1")
    return None if quota == "max" else max(1, math.ceil(int(quota) / int(period)))


def usable_cores() -> int:
    """The cores that this process may run on, but never more than its cgroup gives time for."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, core_quota() or cores)
