"""How many processor cores this process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path

CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # "max PERIOD" or "QUOTA PERIOD", in microseconds


def core_quota() -> int | None:
    """Returns the cgroup's CPU quota in cores, rounded up; None without a limit."""
    quota, period = CGROUP_QUOTA.read_text().split() if CGROUP_QUOTA.exists() else ("max", "1")
    return None if quota == "max" else max(1, math.ceil(int(quota) / int(period)))


def usable_cores() -> int:
    """Returns the number of cores that this process may run on, limited by its cgroup's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, core_quota() or cores)
