"""The share of the machine that this process may use, or leaves to others: cores, GPUs, memory, files and priority."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import os
import resource
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # "max PERIOD" or "QUOTA PERIOD", in microseconds
NUMA_NODES = Path("/sys/devices/system/node")
_DRIVER = "libcuda.so.1"
_MAX_OPEN_FILES = 65536


def core_quota() -> int | None:
    """Returns the cgroup's CPU quota in cores, rounded up; None without a limit."""
    quota, period = CGROUP_QUOTA.read_text().split() if CGROUP_QUOTA.exists() else ("max", "1")
    return None if quota == "max" else max(1, math.ceil(int(quota) / int(period)))


def allowed_cores() -> set[int]:
    """Returns the numbers of the cores that this process may run on."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def usable_cores() -> int:
    """Returns the number of cores that this process may run on, limited by its cgroup's quota."""
    cores = len(allowed_cores())
    return min(cores, core_quota() or cores)


def numa_nodes() -> list[set[int]]:
    """Returns the cores of each NUMA node that this process may run on, in the order of the nodes; nothing where the
    system does not name nodes.
    """
    allowed = allowed_cores()
    files = sorted(NUMA_NODES.glob("node[0-9]*/cpulist"), key=lambda file: int(file.parent.name.removeprefix("node")))
    return [node for file in files if (node := _numbers(file.read_text()) & allowed)]


def _numbers(text: str) -> set[int]:
    """Reads "0-3,8": {0, 1, 2, 3, 8}."""
    ranges = [part.split("-") for part in text.strip().split(",") if part]
    return {number for ends in ranges for number in range(int(ends[0]), int(ends[-1]) + 1)}


@contextlib.contextmanager
def bound_to(cores: Collection[int]) -> Iterator[None]:
    """Binds the calling thread to these cores, and with it the threads and processes that it starts meanwhile; without
    cores it does nothing.
    """
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


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


# Of glibc; other C libraries lack it and return memory by themselves.
_trim: Callable[[int], object] = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)


def release_freed_memory() -> None:
    """Returns freed memory to the operating system. Takes milliseconds per gigabyte; other Python threads continue."""
    _trim(0)


def collect_rarely() -> None:
    """Excludes all objects that exist now from garbage collection, and has new ones collected less often.

    For processes that answer requests: modules live until the end, and requests leave few cycles. A body with a million
    lists is read in a third of the time.
    """
    gc.freeze()
    gc.set_threshold(20_000)


def allow_open_files() -> None:
    """Raises this process's soft limit on open files to 65,536, or to the hard limit if that is lower: every HTTP
    connection needs a file descriptor.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(_MAX_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def give_way() -> None:
    """Lets the calling thread run only when the processor is otherwise idle (SCHED_IDLE on Linux; no effect elsewhere).
    This is permanent: use it as the initializer of a thread pool.
    """
    with contextlib.suppress(AttributeError, OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
