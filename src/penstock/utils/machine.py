"""The share of the machine that this process may use, or leaves to others: cores, GPUs, memory and priority."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
from collections.abc import Callable
from pathlib import Path

CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # "max PERIOD" or "QUOTA PERIOD", in microseconds
_DRIVER = "libcuda.so.1"


def core_quota() -> int | None:
    """Returns the cgroup's CPU quota in cores, rounded up; None without a limit."""
    quota, period = CGROUP_QUOTA.read_text().split() if CGROUP_QUOTA.exists() else ("max", "1")
    return None if quota == "max" else max(1, math.ceil(int(quota) / int(period)))


def usable_cores() -> int:
    """Returns the number of cores that this process may run on, limited by its cgroup's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, core_quota() or cores)


def count_gpus(driver: str = _DRIVER) -> int:
    """Returns how many GPUs CUDA shows this process, which CUDA_VISIBLE_DEVICES limits; 0 without a driver.

    Needs no torch, and takes no memory of a GPU.
    """
    try:
        cuda = ctypes.CDLL(driver)
    except OSError:
        return 0
    count = ctypes.c_int(0)
    failed = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count))
    return 0 if failed else count.value


def _find_trim() -> Callable[[int], object]:
    """Returns glibc's `malloc_trim`; other C libraries lack it and return memory by themselves."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return (lambda _: None) if trim is None else trim


_trim = _find_trim()


def release_freed_memory() -> None:
    """Returns freed memory to the operating system. Takes milliseconds per gigabyte; other Python threads continue."""
    _trim(0)


def give_way() -> None:
    """Lets the calling thread run only when the processor is otherwise idle (SCHED_IDLE on Linux; no effect elsewhere).
    This is permanent: use it as the initializer of a thread pool.
    """
    if hasattr(os, "SCHED_IDLE"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
