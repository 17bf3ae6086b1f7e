"""Counts GPUs without torch, which the engine core need not load."""

from __future__ import annotations

import ctypes

_DRIVER = "libcuda.so.1"


def count_gpus(driver: str = _DRIVER) -> int:
    """Returns how many GPUs CUDA shows this process, which CUDA_VISIBLE_DEVICES limits; 0 without a driver.

    Takes no memory of a GPU.
    """
    try:
        cuda = ctypes.CDLL(driver)
    except OSError:
        return 0
    count = ctypes.c_int(0)
    failed = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count))
    return 0 if failed else count.value
